"""Text: published layouts and archives, documents, and the embedded docstrings."""

from __future__ import annotations

import io
import tarfile
import zipfile

import pytest

from oktopk.errors import DataError
from oktopk.workloads.text import documents, find_text, sentences

WIKI = """
 = First Title =

 The first <unk> . It has 1 @,@ 000 words . " Why ? " she said .
 = = A heading = =

 More of it .

 = Second Title =

 Another one .
"""


def test_plain_text_has_a_sentence_per_line_and_documents_between_blank_lines(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("\n\na b\nc d\n\n\ne f\n", encoding="utf-8")
    assert list(documents((path,))) == [["a b", "c d"], ["e f"]]


def test_wikitext_has_a_document_per_article_split_into_sentences(tmp_path):
    path = tmp_path / "wiki.train.tokens"
    path.write_text(WIKI, encoding="utf-8")
    first, second = documents((path,))
    assert first == ["The first [UNK] .", "It has 1,000 words .", '" Why ?', '" she said .', "More of it ."]
    assert second == ["Another one ."]


def test_published_folders_and_archives_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "wikitext-2-v1.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for part in ("train", "valid", "test"):
            bundle.writestr(f"wikitext-2/wiki.{part}.tokens", WIKI)
    ptb = tmp_path / "simple-examples.tgz"
    with tarfile.open(ptb, "w:gz") as tar:
        for part in ("train", "valid", "test"):
            member = tarfile.TarInfo(f"./simple-examples/data/ptb.{part}.txt")
            member.size = 8
            tar.addfile(member, io.BytesIO(b" a b c \n"))
    for path, layout in ((archive, "WikiText"), (ptb, "PTB")):
        files = find_text(str(path))
        assert files.layout == layout and len(files.train) == len(files.valid) == len(files.test) == 1
        assert find_text(str(files.train[0].parent)) == files


def test_members_of_an_archive_cannot_leave_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "evil.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for part in ("train", "valid"):
            bundle.writestr(f"../../../wiki.{part}.tokens", WIKI)
    files = find_text(str(archive))
    assert (tmp_path / "cache") in files.train[0].parents
    assert not list(tmp_path.glob("*.tokens"))


def test_wrong_text_is_named_with_what_would_be_right(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"nowhere does not exist.*docstrings"):
        find_text(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no text"):
        find_text(str(tmp_path / "empty"))
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as bundle:
        bundle.writestr("readme", "hello")
    with pytest.raises(DataError, match=r"other.zip is another archive"):
        find_text(str(other))
    broken = tmp_path / "broken.tgz"
    broken.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(DataError, match=r"broken.tgz cannot be read"):
        find_text(str(broken))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("fine\ncaf\u00e9\n".encode("latin1"))
    with pytest.raises(DataError, match=r"latin.txt, line 2: not UTF-8"):
        list(documents((latin,)))
    left = [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]
    assert not left, "a failed preparation leaves nothing behind"


def test_docstrings_become_sentences_of_words():
    docstring = """Return the number 42 of ITEMS in a list.  It's never negative!

    >>> count([1, 2])
    2
    ------------
    x = y
    """
    assert list(sentences(docstring)) == ["return the number N of items in a list .", "it's never negative !"][:1]


def test_the_embedded_text_is_large_and_split_into_documents(tmp_path):
    files = find_text("docstrings")
    train, valid = list(documents(files.train)), list(documents(files.valid))
    words = sum(len(sentence.split()) for document in train for sentence in document)
    assert words > 100_000 and len(train) > 800 and 0.02 < len(valid) / len(train) < 0.2
    assert min(len(document) for document in (*train, *valid)) >= 2
    assert not set(map(tuple, train)) & set(map(tuple, valid))
    assert all(sentence == " ".join(sentence.split()) for document in train for sentence in document)
