"""Reports in a real browser: every plot is drawn, nothing is logged, nothing is fetched, no width overflows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import open_browser, set_view, why_not
from oktopk.report import write_report
from run_directories import write_run
from test_report import FIGURES

REASON = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    runs = [write_run(root / name, algorithm=name, seed=n) for n, name in enumerate(("dense", "topka", "oktopk"))]
    empty = write_run(root / "empty", steps=0)
    return {
        "one": write_report(runs[2:], root / "one.html"),
        "several": write_report(runs, root / "several.html"),
        "empty": write_report([empty], root / "empty.html"),
    }


def visit(driver: Any, page: Path, width: int = 1360, scheme: str = "light") -> None:
    driver.get_log("browser")
    driver.get_log("performance")
    set_view(driver, width, 900, scheme)
    driver.get(page.as_uri())


def requests(driver: Any) -> set[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own start page may still be loading its parts when the first test begins.
    return {url for url in sent if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))}


VIEWS = list(itertools.product(["several", "one", "empty"], [360, 768, 1360], ["dark", "light"]))


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [VIEWS[0], *(pytest.param(*view, marks=pytest.mark.slow) for view in VIEWS[1:])]
)
def test_a_page_is_quiet_and_fits(driver: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    visit(driver, pages[name], width, scheme)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.get_log("browser") == []
    assert requests(driver) == {pages[name].as_uri()}


def test_every_plot_is_drawn_inside_its_box(driver: Any, pages: dict[str, Path]) -> None:
    visit(driver, pages["one"])
    marks = driver.execute_script(
        """const found = {};
        for (const figure of document.querySelectorAll("figure")) {
          const svg = figure.querySelector("svg");
          const frame = figure.getBoundingClientRect();
          const inside = svg && [...svg.querySelectorAll("path, rect, text")].every((one) => {
            const box = one.getBoundingClientRect();
            return box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.bottom <= frame.bottom + 1;
          });
          const curves = svg && svg.querySelectorAll("path:not(.axis), rect").length;
          found[figure.id] = { curves, inside, height: svg && svg.getBoundingClientRect().height };
        }
        return found;"""
    )
    assert set(marks) == set(FIGURES)
    for name, mark in marks.items():
        assert mark["curves"] >= 1, name
        assert mark["inside"], name
        assert mark["height"] > 100, name


def test_labels_of_an_axis_do_not_run_into_each_other(driver: Any, pages: dict[str, Path]) -> None:
    for width in (1360, 360):
        visit(driver, pages["one"], width)
        clashes = driver.execute_script(
            """const clashes = [];
            for (const svg of document.querySelectorAll("figure svg")) {
              const boxes = [...svg.querySelectorAll(".tick.x")].map((one) => one.getBoundingClientRect());
              boxes.sort((a, b) => a.left - b.left);
              boxes.forEach((box, n) => { if (n && box.left < boxes[n - 1].right) clashes.push(svg.parentNode.id); });
            }
            return clashes;"""
        )
        assert clashes == []


def test_hovering_and_arrow_keys_show_values(driver: Any, pages: dict[str, Path]) -> None:
    visit(driver, pages["one"])
    said = driver.execute_script(
        """const svg = document.querySelector("#loss-step svg");
        svg.scrollIntoView();
        const box = svg.getBoundingClientRect();
        const place = { clientX: box.left + box.width * 0.5, clientY: box.top + 40, bubbles: true };
        svg.dispatchEvent(new PointerEvent("pointermove", place));
        const tip = document.getElementById("tip");
        const hovered = getComputedStyle(tip).display + " " + tip.textContent;
        svg.dispatchEvent(new Event("pointerleave"));
        const left = getComputedStyle(tip).display;
        svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
        return [hovered, left, tip.textContent, svg.querySelectorAll(".spot").length];"""
    )
    assert said[0].startswith("block step")
    assert "training loss" in said[0]
    assert said[1] == "none"
    assert "validation loss" in said[2]
    assert said[3] >= 1


def test_colours_follow_the_system_and_the_button(driver: Any, pages: dict[str, Path]) -> None:
    def paper() -> str:
        return str(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    visit(driver, pages["one"], scheme="light")
    driver.execute_script("localStorage.clear()")
    light = paper()
    visit(driver, pages["one"], scheme="dark")
    dark = paper()
    assert light != dark
    button = driver.find_element("id", "theme")
    button.click()
    assert (button.text, paper()) == ("Light", light)
    button.click()
    assert (button.text, paper()) == ("Dark", dark)
    driver.refresh()
    assert driver.find_element("id", "theme").text == "Dark"
    driver.execute_script("localStorage.clear()")
