"""`oktopk data ...` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oktopk.cli import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_manifests_are_made_checked_broken_and_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "an4", "synth-an4:6", "--out", "manifests"]) == 0
    assert main(["data", "check", "manifests"]) == 0
    assert "10 utterances good" in capsys.readouterr().out

    manifest = tmp_path / "manifests" / "train.csv"
    moved = manifest.read_text().replace("../cache", "/home/someone/elsewhere")
    manifest.write_text(moved)
    assert main(["data", "check", str(manifest)]) == 1
    out = capsys.readouterr().out
    assert out.count("no such audio file") == 6 and "0 utterances good" in out

    assert main(["data", "relocate", str(manifest), "--root", "cache"]) == 0
    assert "6 of 6 rows changed" in capsys.readouterr().out
    assert main(["data", "check", str(manifest)]) == 0


def test_check_lists_all_problems_of_all_kinds_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "an4", "synth-an4:6", "--out", "manifests"])
    rows = (tmp_path / "manifests" / "train.csv").read_text().splitlines()
    rows[1] = rows[1].split(",")[0] + ",ROUTE 66"
    rows[2] = rows[2].split(",")[0] + "," + "LONG " * 60
    (tmp_path / "manifests" / "empty.wav").write_bytes(b"")
    (tmp_path / "manifests" / "m.csv").write_text("\n".join([*rows, "empty.wav,YES", "gone.wav,YES", "a.wav,no.txt"]))
    capsys.readouterr()
    assert main(["data", "check", "manifests/m.csv"]) == 1
    out = capsys.readouterr().out
    for words in ("'6'", "too short for the", "is empty", "no such audio file", "no.txt cannot be read"):
        assert words in out
    assert "4 utterances good" in out and "5 bad" in out


def test_manifests_for_tuning_need_names_of_speakers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "an4", "synth-an4:6", "--tuning-speakers", "2"]) != 0
    assert "cannot be told" in capsys.readouterr().err


def test_absolute_paths_are_written_only_when_asked(tmp_path: Path) -> None:
    main(["data", "an4", "synth-an4:6", "--out", "relative"])
    main(["data", "an4", "synth-an4:6", "--out", "absolute", "--absolute"])
    assert str(tmp_path) not in (tmp_path / "relative" / "train.csv").read_text()
    assert (tmp_path / "absolute" / "train.csv").read_text().count(str(tmp_path)) == 6


def test_utterances_without_a_transcript_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["data", "an4", "synth-an4:6", "--out", "manifests"])
    for part in ("train", "test"):
        (tmp_path / "corpus" / part).mkdir(parents=True)
        for name in "ab":
            audio = next((tmp_path / "cache").rglob("0000.wav"))
            (tmp_path / "corpus" / part / f"{name}.wav").write_bytes(audio.read_bytes())
            (tmp_path / "corpus" / part / f"{name}.txt").write_text("YES")
    (tmp_path / "corpus" / "test" / "b.txt").unlink()
    capsys.readouterr()
    assert main(["data", "an4", "corpus", "--out", "out"]) == 1
    out = capsys.readouterr().out
    assert "left out" in out and "b.txt" in out and "validation.csv: 1 utterances" in out


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["data", "an4", "synth-an4:6", "--out", "file/manifests"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_is_not_an4_ends_with_one_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    assert main(["data", "an4", "photos"]) == 2
    captured = capsys.readouterr()
    assert "not an AN4 corpus" in captured.err and "Traceback" not in captured.err
