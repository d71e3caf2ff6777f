"""Charts: places that follow from values, files that stand alone, words that match the shapes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from oktopk.plotting.bars import Bar, draw_bars, draw_labelled_bars
from oktopk.plotting.colors import PALETTE, variables
from oktopk.plotting.drawing import Drawing, rules, write_svg
from oktopk.plotting.frame import Axis, Frame, Marker
from oktopk.plotting.lines import Chart, Series, draw_lines

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawing: Drawing) -> ET.Element:
    return ET.fromstring(drawing.inline("name"))


def test_equal_factors_are_equal_distances_on_logarithmic_axes() -> None:
    axis = Axis("seconds", log=True)
    dots = Series("one", [1.0, 10.0, 100.0], [2.0, 20.0, 200.0], "c0", "dots")
    circles = parsed(draw_lines(Chart(axis, axis, [dots]))).findall("circle")
    for side, sign in (("cx", 1), ("cy", -1)):
        first, second, third = (float(circle.attrib[side]) for circle in circles)
        assert sign * (second - first) > 0
        assert third - second == pytest.approx(second - first, abs=0.2)  # places are rounded to tenths


def test_dots_are_not_joined_and_points_are() -> None:
    def paths(style: str) -> int:
        series = Series("one", [1.0, 2.0], [1.0, 2.0], "c0", style)  # type: ignore[arg-type]
        return len(parsed(draw_lines(Chart(Axis("x"), Axis("y"), [series]))).findall("path"))

    assert paths("points") == paths("dots") + 1


def test_ticks_that_are_asked_for_are_the_ticks() -> None:
    x = Axis("ranks", log=True, ticks=(2.0, 4.0, 16.0))
    drawing = draw_lines(Chart(x, Axis("y"), [Series("one", [2.0, 16.0], [1.0, 2.0], "c0")]))
    assert [t.text for t in parsed(drawing).findall("text") if t.attrib["class"] == "tick x"] == ["2", "4", "16"]


def test_parts_of_a_bar_lie_end_to_end_and_whiskers_at_its_spread() -> None:
    bars = [Bar("a", [("work", 3.0, "c0"), ("wait", 1.0, "c1")], "4", (3.5, 5.0)), Bar("b", [("work", 2.0, "c0")])]
    root = parsed(draw_labelled_bars(bars, Axis("seconds"), [Marker(2.0, "bound")]))
    work, wait, other = ([float(r.attrib[side]) for side in ("x", "width")] for r in root.findall("rect"))
    assert wait[0] == pytest.approx(sum(work), abs=0.11)
    per_unit = other[1] / 2
    assert work[1] == pytest.approx(3 * per_unit, abs=0.2)
    whisker = next(p.attrib["d"] for p in root.findall("path") if p.attrib["class"] == "whisker")
    low, high = (float(found) for found in re.match(r"M([\d.]+) [\d.]+H([\d.]+)", whisker).groups())  # type: ignore[union-attr]
    assert (low - work[0]) == pytest.approx(3.5 * per_unit, abs=0.3)
    assert (high - work[0]) == pytest.approx(5.0 * per_unit, abs=0.3)
    bound = next(line for line in root.findall("line") if line.attrib["class"] == "mark")
    assert float(bound.attrib["x1"]) == pytest.approx(other[0] + other[1], abs=0.11)


def test_nothing_is_drawn_outside_the_frame() -> None:
    bars = [Bar("a long label of a contender", [("x", 9.0, "c0")], "9.00 s", (8.0, 12.0)), Bar("b", [("x", 1.0, "c0")])]
    for drawing in (draw_bars(bars, Axis("s")), draw_labelled_bars(bars, Axis("s"))):
        for rect in parsed(drawing).findall("rect"):
            assert float(rect.attrib["x"]) >= 0
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= drawing.width


def test_a_file_stands_alone_with_title_legend_colours_and_words(tmp_path: Path) -> None:
    series = [Series(f"series <{n}>", [1.0, 2.0], [float(n), 2.0], f"c{n}") for n in range(6)]
    drawing = draw_lines(Chart(Axis("x"), Axis("time", "seconds"), series, frame=Frame(300, 200)))
    root = ET.fromstring(write_svg(tmp_path / "deep" / "a.svg", "A & B", drawing).read_text())
    assert root.find(f"{SVG}title").text == "A & B"  # type: ignore[union-attr]
    assert "series <5>: from 5 s to 2 s" in root.find(f"{SVG}desc").text  # type: ignore[union-attr, operator]
    keys = [text for text in root.findall(f"{SVG}text") if text.attrib["class"] == "key"]
    assert [key.text for key in keys] == [one.name for one in series]
    assert len({key.attrib["y"] for key in keys}) > 1, "a legend that is wider than the drawing is wrapped"
    assert all(float(key.attrib["x"]) < 300 for key in keys)
    assert "time (s)" in [text.text for text in root.findall(f"{SVG}text")]
    used = set(re.findall(r"var\(--([\w-]+)\)", ET.tostring(root, encoding="unicode")))
    assert used <= set(PALETTE)


def test_every_colour_that_shapes_use_has_a_light_and_a_dark_side() -> None:
    css = variables()
    for name in re.findall(r"var\(--([\w-]+)\)", rules()):
        light, dark = PALETTE[name]
        assert css.count(f"--{name}:{light};") >= 1
        assert css.count(f"--{name}:{dark};") >= 2, "by the system's wish and by the button's"
