"""`oktopk data images` and `oktopk data text` as a user types them."""

from __future__ import annotations

import gzip
import struct

import pytest

from oktopk.cli import main

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
