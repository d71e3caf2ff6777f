"""Audio files, corpora and manifests: what is read, and what is refused in words."""

from __future__ import annotations

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from oktopk.errors import ConfigError, DataError
from oktopk.workloads.speech import synth
from oktopk.workloads.speech.audio import read_audio, resample, write_audio
from oktopk.workloads.speech.corpus import Corpus, find_corpus, for_tuning
from oktopk.workloads.speech.data import load, require
from oktopk.workloads.speech.espeak import Manner, Speaker
from oktopk.workloads.speech.manifest import Entry, read_manifest, relocate, write_manifest
from oktopk.workloads.speech.text import ALPHABET, encode, frames_needed, normalise, spell, unknown


def tone(seconds: float = 1.0, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    return (8000 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.int16)


def write_sphere(path: Path, samples: np.ndarray) -> None:
    """A NIST SPHERE file as AN4's: 1024 bytes of text header, big-endian samples."""
    fields = [
        "NIST_1A", "   1024", "channel_count -i 1", f"sample_count -i {len(samples)}", "sample_rate -i 16000",
        "sample_n_bytes -i 2", "sample_byte_format -s2 10", "sample_sig_bits -i 16", "sample_max -i 1",
        "sample_min -i 1", "end_head",
    ]  # fmt: skip
    header = ("\n".join(fields) + "\n").encode().ljust(1024)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + samples.astype(">i2").tobytes())


def make_an4(root: Path) -> Path:
    """Two training utterances and one test utterance in AN4's own layout."""
    parts = {
        "train": ("an4_clstk", [("fash", "an251-fash-b", "<s> YES </s>"), ("fbbh", "an86-fbbh-b", "<s> GO ON </s>")]),
        "test": ("an4test_clstk", [("fcaw", "an406-fcaw-b", "RUBOUT")]),
    }
    (root / "etc").mkdir(parents=True)
    for part, (folder, rows) in parts.items():
        ids = [f"{folder}/{speaker}/{name}" for speaker, name, _ in rows]
        (root / f"etc/an4_{part}.fileids").write_text("\n".join(ids) + "\n")
        lines = [f"{text} ({name})" for _, name, text in rows]
        (root / f"etc/an4_{part}.transcription").write_text("\n".join(lines) + "\n")
        for number, file in enumerate(ids):
            write_sphere(root / "wav" / f"{file}.sph", tone(1.0 + number / 4))
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


def problem(entry: Entry, stride: int = 4) -> str:
    loaded = load([entry], stride)
    assert not loaded.utterances
    return loaded.problems[0]


# Text


def test_there_are_29_labels_and_text_survives_them() -> None:
    assert len(ALPHABET) == 29 and len(set(ALPHABET)) == 29
    assert spell(encode("IT'S ME")) == "IT'S ME"
    assert normalise("  it's\n me ") == "IT'S ME"
    assert unknown("A-B 9_") == ["-", "9", "_"]


def test_ctc_needs_a_blank_between_equal_letters() -> None:
    assert frames_needed(encode("ABC")) == 3
    assert frames_needed(encode("AABB")) == 6


# Audio


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_samples_survive_lossless_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    soundfile.write(str(path), tone(), 16_000, subtype="PCM_16")
    assert torch.equal(read_audio(path), torch.from_numpy(tone()))


def test_sphere_files_are_read_whatever_their_header_says_of_extremes(tmp_path: Path) -> None:
    write_sphere(tmp_path / "a.sph", tone())
    assert torch.equal(read_audio(tmp_path / "a.sph"), torch.from_numpy(tone()))


@pytest.mark.parametrize("order", [">i2", "<i2"])
def test_raw_files_are_read_in_either_byte_order(tmp_path: Path, order: str) -> None:
    (tmp_path / "a.raw").write_bytes(tone().astype(order).tobytes())
    assert torch.equal(read_audio(tmp_path / "a.raw"), torch.from_numpy(tone()))


def test_resampling_keeps_a_tone_and_its_level() -> None:
    got = resample(tone(rate=22_050).astype(float), 22_050)
    assert len(got) == 16_000
    middle = slice(1000, -1000)  # the ends ring
    assert np.abs(got[middle] - tone()[middle]).max() < 80  # 1% of the amplitude


def test_bad_audio_is_named_with_its_remedy(tmp_path: Path) -> None:
    files = {
        name: tmp_path / f"{name}.wav" for name in ("missing", "empty", "corrupt", "rate", "stereo", "short", "cut")
    }
    files["empty"].write_bytes(b"")
    files["corrupt"].write_bytes(b"RIFF but not really a sound file" * 10)
    soundfile.write(str(files["rate"]), tone(rate=8000), 8000)
    soundfile.write(str(files["stereo"]), np.stack([tone(), tone()], axis=1), 16_000)
    write_audio(files["short"], tone(0.05))
    flac = tmp_path / "cut.flac"
    soundfile.write(str(flac), np.random.default_rng(0).integers(-9999, 9999, 32_000).astype(np.int16), 16_000)
    flac.write_bytes(flac.read_bytes()[:20_000])
    expected = {
        "missing": "no such audio file", "empty": "is empty", "corrupt": "cannot be decoded", "rate": "got 8000",
        "stereo": "got 2", "short": "too short",
    }  # fmt: skip
    for name, words in expected.items():
        message = problem(Entry(files[name], "YES"))
        assert words in message and str(files[name]) in message and ";" in message
    assert str(flac) in problem(Entry(flac, "YES"))


# Transcripts


def test_bad_transcripts_are_named(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", tone(1.0))
    assert "'9'" in problem(Entry(tmp_path / "a.wav", "ROUTE 9"))
    assert "empty" in problem(Entry(tmp_path / "a.wav", ""))
    too_long = problem(Entry(tmp_path / "a.wav", "A B C D E F G H I J K L M N O P"))
    assert "too short for the 31 characters" in too_long and "1.21 s" in too_long


def test_an_utterance_that_fits_only_slowly_is_never_sped_up_beyond_it(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", tone(1.0))  # 101 frames
    (utterance,) = load([Entry(tmp_path / "a.wav", "A" * 12)], stride=4).utterances  # 23 steps, 89 frames
    assert utterance.fastest == pytest.approx(101 / 89)


def test_all_that_is_wrong_is_said_at_once_or_skipped_and_counted(tmp_path: Path) -> None:
    write_audio(tmp_path / "good.wav", tone())
    entries = [
        Entry(tmp_path / "good.wav", "YES"),
        Entry(tmp_path / "no1.wav", "NO"),
        Entry(tmp_path / "no2.wav", "NO"),
    ]
    loaded = load(entries, 4)
    with pytest.raises(DataError, match=r"2 of 3 training(.|\n)*no1(.|\n)*no2(.|\n)*--on-bad-audio skip"):
        require({"training": loaded}, "corpus", skip=False)
    require({"training": loaded}, "corpus", skip=True)
    assert [utterance.text for utterance in loaded.utterances] == ["YES"]


def test_an_empty_part_is_refused_even_when_skipping() -> None:
    with pytest.raises(DataError, match="validation set is empty"):
        require({"validation": load([], 4)}, "corpus", skip=True)
    gone = load([Entry(Path("gone.wav"), "YES")], 4)
    with pytest.raises(DataError, match=r"training set is empty after skipping 1(.|\n)*gone\.wav"):
        require({"training": gone}, "corpus", skip=True)


def test_a_corpus_beyond_memory_is_read_again_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.workloads.speech.data.KEPT_SAMPLES", 1)
    for name in "ab":
        write_audio(tmp_path / f"{name}.wav", tone())
    first, second = load([Entry(tmp_path / f"{name}.wav", "YES") for name in "ab"], 4).utterances
    assert first.samples is not None and second.samples is None
    assert torch.equal(first.load(), second.load())


# Layouts


def test_an4_as_distributed_is_read_with_its_markers_removed(tmp_path: Path) -> None:
    corpus = find_corpus(str(make_an4(tmp_path / "an4")))
    assert [entry.text for entry in corpus.train] == ["YES", "GO ON"]
    assert [entry.text for entry in corpus.validation] == ["RUBOUT"]
    assert not load([*corpus.train, *corpus.validation], 4).problems


def test_the_original_archive_is_read_through_the_cache(tmp_path: Path) -> None:
    make_an4(tmp_path / "unpacked" / "an4")
    with tarfile.open(tmp_path / "an4_sphere.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "unpacked" / "an4", arcname="an4")
    corpus = find_corpus(str(tmp_path / "an4_sphere.tar.gz"))
    assert [entry.text for entry in corpus.train] == ["YES", "GO ON"]
    assert not load(corpus.train, 4).problems


def test_an_archive_that_escapes_its_folder_or_is_damaged_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        member = tarfile.TarInfo("../outside.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    (tmp_path / "broken.tar.gz").write_bytes(b"not gzip at all")
    for name in ("evil.tar", "broken.tar.gz"):
        with pytest.raises(DataError, match=name):
            find_corpus(str(tmp_path / name))
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_table_of_transcripts_is_read(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        soundfile.write(str(tmp_path / part / "a.flac"), tone(), 16_000)
        (tmp_path / f"{part}_transcripts.tsv").write_text(f"file\tspeaker\tseconds\ttext\n{part}/a.flac\tx\t1.0\tyes\n")
    corpus = find_corpus(str(tmp_path))
    assert [entry.text for entry in corpus.train] == ["YES"] and corpus.train[0].path.is_file()


def test_audio_with_text_files_beside_it_is_read_and_a_missing_text_is_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in "ab":
            (tmp_path / part).mkdir(exist_ok=True)
            write_audio(tmp_path / part / f"{name}.wav", tone())
            (tmp_path / part / f"{name}.txt").write_text("yes\n")
    (tmp_path / "test" / "b.txt").unlink()
    corpus = find_corpus(str(tmp_path))
    assert len(load(corpus.train, 4).utterances) == 2
    assert "no transcript b.txt" in load(corpus.validation, 4).problems[0]


def test_speakers_for_tuning_come_from_the_training_part_and_the_test_part_stays_unseen() -> None:
    said = [Entry(Path(f"an{take}-{speaker}-b.flac"), "YES") for speaker in "abcdef" for take in (1, 2)]
    corpus = for_tuning(Corpus("an4", tuple(said), (Entry(Path("an9-test-b.flac"), "NO"),)), 2)
    assert {entry.path.stem.split("-")[1] for entry in corpus.validation} == {"b", "e"}
    assert sorted([*corpus.train, *corpus.validation], key=said.index) == said


@pytest.mark.parametrize("speakers", [-1, 0, 6])
def test_a_wrong_number_of_speakers_for_tuning_is_refused(speakers: int) -> None:
    said = tuple(Entry(Path(f"an1-{speaker}-b.flac"), "YES") for speaker in "abcdef")
    with pytest.raises(DataError, match=rf"{speakers} speakers for tuning, expected 1 to 5"):
        for_tuning(Corpus("an4", said, ()), speakers)


def test_files_that_do_not_name_a_speaker_cannot_be_split_for_tuning() -> None:
    with pytest.raises(DataError, match=r"speaker of '0003\.wav'.*an251-fash-b"):
        for_tuning(Corpus("mine", (Entry(Path("an1-a-b.flac"), "YES"), Entry(Path("0003.wav"), "NO")), ()), 1)


def test_an_utterance_that_cannot_be_used_has_no_speaker_and_keeps_its_problem() -> None:
    said = tuple(Entry(Path(f"an1-{speaker}-b.flac"), "YES") for speaker in "ab")
    corpus = for_tuning(Corpus("an4", (*said, Entry(Path("wav"), "", "no such file")), ()), 1)
    assert [entry.problem for entry in corpus.train] == ["", "no such file"] and len(corpus.validation) == 1


def test_a_folder_that_is_not_an4_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"not an AN4 corpus.*an4_train\.transcription"):
        find_corpus(str(tmp_path))
    with pytest.raises(DataError, match="no such folder"):
        find_corpus(str(tmp_path / "nowhere"))


def test_a_transcription_line_without_its_file_is_reported_not_dropped(tmp_path: Path) -> None:
    root = make_an4(tmp_path / "an4")
    with open(root / "etc/an4_train.transcription", "a") as file:
        file.write("<s> LOST </s> (an999-xxxx-b)\nno id at all\n")
    problems = load(find_corpus(str(root)).train, 4).problems
    assert len(problems) == 2 and "an999-xxxx-b" in problems[0] and "no id at all" in problems[1]


# Manifests


def test_manifests_are_relative_so_a_corpus_can_move(tmp_path: Path) -> None:
    corpus = find_corpus(str(make_an4(tmp_path / "old" / "an4")))
    write_manifest(tmp_path / "old" / "train.csv", corpus.train)
    assert "\nan4/wav/" in (tmp_path / "old" / "train.csv").read_text()
    (tmp_path / "old").rename(tmp_path / "new")
    entries = read_manifest(tmp_path / "new" / "train.csv")
    assert [entry.text for entry in entries] == ["YES", "GO ON"] and not load(entries, 4).problems


def test_texts_with_commas_survive_and_transcripts_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("go on\n")
    (tmp_path / "m.csv").write_text('a.wav,"YES, SIR"\nb.wav,a.txt\n')
    assert [entry.text for entry in read_manifest(tmp_path / "m.csv")] == ["YES, SIR", "GO ON"]


def test_relocate_repairs_foreign_paths_by_their_longest_common_tail(tmp_path: Path) -> None:
    for speaker in ("fash", "fbbh"):
        write_sphere(tmp_path / "data" / speaker / "an1.sph", tone())
    manifest = tmp_path / "train.csv"
    manifest.write_text("wav,txt\n/home/someone/an4/fash/an1.sph,YES\nC:\\an4\\fbbh\\an1.sph,NO\n")
    assert relocate(manifest, tmp_path / "data") == (2, 2)
    entries = read_manifest(manifest)
    assert [entry.path.parent.name for entry in entries] == ["fash", "fbbh"] and not load(entries, 4).problems
    assert relocate(manifest, tmp_path / "data") == (0, 2)


def test_relocate_changes_nothing_unless_every_file_is_found(tmp_path: Path) -> None:
    write_sphere(tmp_path / "data" / "a.sph", tone())
    manifest = tmp_path / "train.csv"
    before = "wav,txt\n/x/a.sph,YES\n/x/b.sph,NO\n"
    manifest.write_text(before)
    with pytest.raises(DataError, match="1 of 2 files"):
        relocate(manifest, tmp_path / "data")
    write_sphere(tmp_path / "data" / "one" / "b.sph", tone())
    write_sphere(tmp_path / "data" / "two" / "b.sph", tone())
    with pytest.raises(DataError, match="narrower --root"):
        relocate(manifest, tmp_path / "data")
    assert manifest.read_text() == before


def test_broken_manifests_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("a.wav,YES,extra\n")
    with pytest.raises(DataError, match="row 1"):
        read_manifest(tmp_path / "m.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match="not a readable CSV"):
        read_manifest(tmp_path / "b.csv")
    with pytest.raises(DataError, match="no such manifest"):
        read_manifest(tmp_path / "no.csv")
    with pytest.raises(DataError, match="--validation"):
        find_corpus(str(tmp_path / "m.csv"))


# The embedded corpus


def test_synth_an4_is_the_same_every_time_with_voices_of_its_own_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_corpus("synth-an4:6")
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "other"))
    second = find_corpus("synth-an4:6")
    assert [entry.text for entry in first.train] == [entry.text for entry in second.train]
    for a, b in zip((*first.train, *first.validation), (*second.train, *second.validation), strict=True):
        assert a.path != b.path and torch.equal(read_audio(a.path), read_audio(b.path))
    assert not load([*first.train, *first.validation], 4).problems
    assert not set(synth.TRAINING_VOICES) & set(synth.VALIDATION_VOICES) and len(synth.TRAINING_VOICES) >= 12


def test_synth_an4_is_made_once_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        if done == 3:
            raise OSError("No space left on device")

    with pytest.raises(DataError, match="No space left"):
        find_corpus("synth-an4:6", progress=fail)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    find_corpus("synth-an4:6", progress=lambda done, total: calls.append(done))
    count = len(calls)
    find_corpus("synth-an4:6", progress=lambda done, total: calls.append(done))
    assert len(calls) == count == 3 + 10


def test_of_several_processes_that_start_at_once_one_speaks_and_the_others_wait() -> None:
    calls: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(find_corpus, "synth-an4:6", None, lambda done, total: calls.append(done)) for _ in range(3)
        ]
        sources = {task.result(60).train for task in asked}
    assert len(sources) == 1 and len(calls) == 10


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="OKTOPK_CACHE"):
        find_corpus("synth-an4:6")


def test_a_refused_voice_is_an_error_not_the_previous_voice() -> None:
    with pytest.raises(DataError, match="no voice 'xx-nobody'"):
        Speaker().say("YES", Manner("xx-nobody"))


def test_the_letter_a_is_not_read_as_the_article() -> None:
    speaker = Speaker()
    assert not np.array_equal(speaker.say("A", Manner("en-us")), speaker.say("UH", Manner("en-us")))


@pytest.mark.parametrize("name", ["synth-an4:", "synth-an4:x", "synth-an4:0"])
def test_a_wrong_size_of_the_embedded_corpus_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="COUNT"):
        find_corpus(name)
