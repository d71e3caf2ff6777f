"""`oktopk data images` and `oktopk data text` as a user types them."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from oktopk.cli import main
from oktopk.workloads.vision.data import load_images

MNIST = {
    "train-images-idx3-ubyte": ((3, 28, 28), bytes(3 * 784)),
    "train-labels-idx1-ubyte": ((3,), bytes(3)),
    "t10k-images-idx3-ubyte": ((2, 28, 28), bytes(2 * 784)),
    "t10k-labels-idx1-ubyte": ((2,), bytes(2)),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_images_are_described_and_what_is_missing_is_named(tmp_path, capsys):
    for name, (shape, body) in MNIST.items():
        header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(header + body))
    assert main(["data", "images", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "MNIST, 10 classes, 28x28, grey" in out and "oktopk train vision" in out
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert main(["data", "images", str(tmp_path)]) == 2
    assert "lacks t10k-labels-idx1-ubyte[.gz]: get the four files" in " ".join(capsys.readouterr().err.split())


def test_text_is_prepared_for_every_workload(tmp_path, capsys):
    text = "\n\n".join("one two three .\nfour five six ." for _ in range(30))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text(text + "\n\nalone here .\n")
    assert main(["data", "text", str(tmp_path), "--pieces", "60"]) == 0
    out = capsys.readouterr().out
    assert "plain splits, 1 training files, 1 validation files" in out
    assert "gpt  988 training characters, 1003 validation characters, vocabulary" in out
    assert "ptb  329 training words" in out and "vocabulary 9" in out
    assert "bert valid: 30 documents, 60 sentences" in out and "1 documents of one sentence left out" in out


def test_text_without_a_validation_part_is_prepared_for_bert_and_gpt_only(tmp_path, capsys):
    path = tmp_path / "some.txt"
    path.write_text("\n\n".join("one two three .\nfour five six ." for _ in range(60)))
    assert main(["data", "text", str(path), "--pieces", "60"]) == 0
    out = capsys.readouterr().out
    assert "gpt  1781 training characters, 197 validation characters" in out
    assert "ptb  needs a validation part" in out and "bert train: 57 documents" in out


def test_text_for_tuning_is_judged_by_training_documents_and_the_validation_part_stays_unseen(tmp_path, capsys):
    told = [f"told {number} is here .\nand goes on ." for number in range(30)]
    (tmp_path / "train.txt").write_text("\n\n".join(told))
    (tmp_path / "valid.txt").write_text("hidden one .\nhidden two .\n\n" * 9)
    assert main(["data", "text", str(tmp_path), "--pieces", "60", "--tuning", "tuning"]) == 0
    assert "oktopk train bert --data tuning" in capsys.readouterr().out
    train, valid = ((tmp_path / "tuning" / f"{part}.txt").read_text() for part in ("train", "valid"))
    assert valid == f"{told[11]}\n\n{told[23]}\n\n"
    assert train.count("told") == 28 and "hidden" not in train
    assert main(["data", "text", str(tmp_path), "--pieces", "60", "--tuning", str(tmp_path)]) == 2
    assert "holds a text already" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "train.txt").read_text() == "\n\n".join(told)
    (tmp_path / "test.txt").write_text("there is a test part .\n")
    assert main(["data", "text", str(tmp_path), "--pieces", "60", "--tuning", "again"]) == 2
    assert "has a test part" in " ".join(capsys.readouterr().err.split())


def test_images_for_tuning_are_judged_by_training_images(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("oktopk.workloads.vision.data.TRAIN_SHAPES", 240)
    monkeypatch.setattr("oktopk.workloads.vision.data.VALID_SHAPES", 20)
    assert main(["data", "images", "shapes", "--tuning", "tuning"]) == 0
    whole, copy = load_images("shapes", 32, False, False), load_images("tuning", 32, False, False)
    assert (len(copy.train), len(copy.valid)) == (220, 20)
    pixels, labels = whole.train.take(np.arange(11, 240, 12), None)
    judging, told = copy.valid.take(np.arange(20), None)
    assert sorted(map(bytes, judging)) == sorted(map(bytes, pixels))
    assert sorted(copy.classes[label] for label in told) == sorted(whole.classes[label] for label in labels)
    capsys.readouterr()
    assert main(["data", "images", "shapes", "--tuning", "tuning"]) == 2
    assert "holds images already" in capsys.readouterr().err
