"""Text for bert, gpt and ptb: published layouts, plain files, and the docstrings of the standard library."""

from __future__ import annotations

import ast
import platform
import re
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from oktopk.errors import DataError
from oktopk.workloads.cache import cached_folder, fingerprint

EMBEDDED = "docstrings"
_LAYOUTS = {  # published name -> (train, valid, test)
    "PTB": ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    "WikiText": ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    "plain splits": ("train.txt", "valid.txt", "test.txt"),
}
_WHERE = (
    "Give a text file, a folder of .txt files, a folder or the original archive of PTB (simple-examples.tgz, Mikolov's "
    "RNNLM page: ptb.train.txt, ptb.valid.txt) or of WikiText (wikitext-2-v1.zip: wiki.train.tokens, "
    f"wiki.valid.tokens), or use the embedded text '{EMBEDDED}'."
)


@dataclass(frozen=True)
class TextFiles:
    """A corpus as files. Without `valid`, a reader holds some documents out."""

    layout: str
    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()

    def fingerprints(self) -> tuple[object, ...]:
        return tuple(fingerprint(path) for path in (*self.train, *self.valid))


def find_text(data: str) -> TextFiles:
    """The files of a corpus given as 'docstrings', a file, a folder or a published archive."""
    if data == EMBEDDED:
        return _splits(_embedded_folder(), "docstrings")
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"{path} does not exist. {_WHERE}")
    if path.is_dir():
        return _in_folder(path)
    if path.suffix in (".tgz", ".gz", ".zip", ".tar"):
        return _in_folder(cached_folder("text-archive", fingerprint(path), lambda into: _unpack(path, into)))
    return TextFiles("plain text", (path,))


def write_for_tuning(data: str, folder: Path) -> None:
    """The corpus as another one in which training documents judge, one in twelve, and its validation part is unseen."""
    files = find_text(data)
    if files.test:
        raise DataError(f"{data} has a test part: tune on its validation part, and report the test part.")
    if (folder / "train.txt").exists():
        raise DataError(f"{folder} holds a text already: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    _write_splits(folder, documents(files.train))


def read_lines(path: Path) -> Iterator[str]:
    """Stripped lines; bytes that are no UTF-8 are an error that names the line."""
    for line in _decoded(path):
        yield line.strip()


def read_blocks(path: Path, lines: int = 4_096) -> Iterator[str]:
    """The text as it is, some lines at a time: all of it may not fit into memory once it is taken apart."""
    decoded = _decoded(path)
    while block := "".join(islice(decoded, lines)):
        yield block


def _decoded(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8 text ({error.reason}). Convert it first.") from None


def documents(paths: tuple[Path, ...]) -> Iterator[list[str]]:
    """Documents as lists of sentences: blank lines separate them, or WikiText's titles do."""
    for path in paths:
        yield from _wiki_documents(path) if _is_wiki(path) else _plain_documents(path)


def _plain_documents(path: Path) -> Iterator[list[str]]:
    document: list[str] = []
    for line in read_lines(path):
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


_TITLE = re.compile(r"= [^=].*[^=] =$|= [^=] =$")
_HEADING = re.compile(r"(= )+.*( =)+$")
_SENTENCE_END = re.compile(r"(?<= [.!?]) (?=[A-Z\"'(<])")


def _is_wiki(path: Path) -> bool:
    first = next((line for line in read_lines(path) if line), "")
    return bool(_TITLE.match(first))


def _wiki_documents(path: Path) -> Iterator[list[str]]:
    document: list[str] = []
    for line in read_lines(path):
        if _TITLE.match(line):
            if document:
                yield document
            document = []
        elif line and not _HEADING.match(line):
            document += _SENTENCE_END.split(re.sub(r" @(.)@ ", r"\1", line).replace("<unk>", "[UNK]"))
    if document:
        yield document


def _in_folder(folder: Path) -> TextFiles:
    for layout, (train, *_) in _LAYOUTS.items():
        found = next(iter(sorted(folder.rglob(train))), None)
        if found:
            return _splits(found.parent, layout)
    texts = tuple(sorted(folder.glob("*.txt")))
    if not texts:
        raise DataError(f"{folder} holds no text that is known here. {_WHERE}")
    return TextFiles("plain text", texts)


def _splits(folder: Path, layout: str) -> TextFiles:
    names = _LAYOUTS.get(layout, _LAYOUTS["plain splits"])
    train, valid, test = ((folder / name,) if (folder / name).is_file() else () for name in names)
    if not valid:
        raise DataError(f"{folder} has {names[0]} but no {names[1]}: copy it from the published {layout} corpus.")
    return TextFiles(layout, train, valid, test)


def _unpack(archive: Path, into: Path) -> None:
    """The known members only, by their last name: nothing can be written elsewhere."""
    wanted = {name for names in _LAYOUTS.values() for name in names}
    try:
        members = dict(_members(archive, wanted))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{archive} cannot be read as an archive ({error}): download it again.") from None
    if not members:
        raise DataError(f"{archive} is another archive: it holds none of {', '.join(sorted(wanted))}. {_WHERE}")
    for name, data in members.items():
        (into / name).write_bytes(data)


def _members(archive: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as bundle:
            for path in bundle.namelist():
                if PurePosixPath(path).name in wanted:
                    yield PurePosixPath(path).name, bundle.read(path)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file and PurePosixPath(member.name).name in wanted:
                yield PurePosixPath(member.name).name, file.read()


# The embedded text.

_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_VALID_EVERY = 12  # one document of so many is held out


def _embedded_folder() -> Path:
    key = (3, platform.python_implementation(), platform.python_version())  # 3: of the cleaning rules below
    return cached_folder("docstrings", key, _write_docstrings)


def _write_docstrings(into: Path) -> None:
    _write_splits(into, _library_documents())


def _write_splits(into: Path, texts: Iterable[list[str]]) -> None:
    with (
        open(into / "train.txt", "w", encoding="utf-8") as train,
        open(into / "valid.txt", "w", encoding="utf-8") as valid,
    ):
        for number, document in enumerate(texts):
            file = valid if number % _VALID_EVERY == _VALID_EVERY - 1 else train
            file.write("\n".join(document) + "\n\n")


def _library_documents() -> Iterator[list[str]]:
    """One document per top-level definition; those of a single sentence join the one before."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()  # mixins repeat their docstrings
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield from _merge_short([_new_sentences(node, seen) for node in _top_level(path)])


def _merge_short(parts: list[list[str]]) -> list[list[str]]:
    merged: list[list[str]] = []
    for part in parts:
        if merged and (len(part) < 2 or len(merged[-1]) < 2):
            merged[-1] += part
        else:
            merged.append(part)
    return [document for document in merged if len(document) > 1]


def _top_level(path: Path) -> list[ast.AST]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and such: not our text
        return []
    module = ast.Module([node for node in tree.body[:1] if isinstance(node, ast.Expr)], [])
    return [module, *(node for node in tree.body if isinstance(node, _DEFINITIONS))]


def _new_sentences(node: ast.AST, seen: set[str]) -> list[str]:
    fresh: list[str] = []
    for part in ast.walk(node):
        text = ast.get_docstring(part) if isinstance(part, _DEFINITIONS) else None
        for sentence in sentences(text or ""):
            if sentence not in seen:
                seen.add(sentence)
                fresh.append(sentence)
    return fresh


_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+|[.,;:!?()]")


def sentences(docstring: str) -> Iterator[str]:
    """Sentences of prose: lower case, words and marks apart, numbers as N, no code."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith((">>>", "...", "|", "#"))]
        prose = re.sub(r"[-=~*^+]{3,}", " ", " ".join(lines))
        for piece in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"'(`])", prose):
            tokens = ["N" if token.isdigit() else token for token in _TOKEN.findall(piece.lower())]
            words = [token for token in tokens if len(token) > 1]
            if len(words) >= 4 and len(tokens) <= 60 and len(words) >= 0.6 * len(tokens):
                yield " ".join(tokens)
