"""Compiled loops without their compiler: machine code that was made before is linked into the process and called.

numba takes most of a second and 90 MB in every process, and is only needed when there is no machine code yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import sys
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np

log = logging.getLogger("oktopk")

# What machine code may call and name of Python.
_FUNCTIONS = (
    "PyBool_FromLong", "PyErr_Occurred", "PyEval_RestoreThread", "PyEval_SaveThread", "PyFloat_AsDouble",
    "PyFloat_FromDouble", "PyLong_AsLongLong", "PyLong_AsUnsignedLongLongMask", "PyLong_FromLongLong",
    "PyLong_FromUnsignedLongLong", "PyTuple_GetItem", "PyTuple_New", "PyTuple_SetItem", "Py_IncRef",
)  # fmt: skip
OBJECTS = {name: f"oktopk.{name}" for name in ("None", "NotImplemented", "ndarray")}
HEAD = object.__basicsize__  # bytes that every object begins with; the last of them tell its type

_linking = Lock()  # one thread at a time compiles and links


class Library:
    """The loops of a module, which is only imported to compile what was not compiled yet."""

    def __init__(self, module: str) -> None:
        if find_spec("numba") is None:
            raise ImportError("no module named 'numba'")
        self._module = module

    def __getattr__(self, name: str) -> Loop:
        loop = Loop(self._module, name)
        setattr(self, name, loop)
        return loop


class Loop:
    """A loop, compiled for kinds of arrays when it is first called with them. It releases the interpreter."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._linked: tuple[Any, ...] = ()  # the latest first

    def __call__(self, *args: Any) -> Any:
        for function in self._linked:
            result = function(args)
            if result is not NotImplemented:
                return result
        kinds = tuple(_kind(arg) for arg in args)
        with _linking:
            function = _link(self._module, self._name, kinds)
        self._linked = (function, *self._linked)
        result = function(args)
        assert result is not NotImplemented, f"{self._name} was made for {kinds}"
        return result


@dataclass(frozen=True)
class MadeLoop:
    """Machine code of a loop for some kinds of arguments, as it lies on disk."""

    symbol: str
    code: bytes

    def to_bytes(self) -> bytes:
        about = {"symbol": self.symbol, "sha256": sha256(self.code).hexdigest()}
        return json.dumps(about).encode() + b"\n" + self.code

    @classmethod
    def from_bytes(cls, data: bytes) -> MadeLoop | None:
        """None if it is damaged."""
        head, _, code = data.partition(b"\n")
        try:
            about = json.loads(head)
            return cls(about["symbol"], code) if about["sha256"] == sha256(code).hexdigest() else None
        except (ValueError, KeyError, TypeError):
            return None


@cache
def _link(module: str, name: str, kinds: tuple[str, ...]) -> Any:
    """A function in memory: takes the tuple of arguments, returns the result."""
    loop = _find(module, name, kinds)
    builder = llvm.JITLibraryBuilder().add_object_img(loop.code).export_symbol(loop.symbol)
    for symbol, address in addresses().items():
        builder.import_symbol(symbol, address)
    library = builder.link(_linker(), loop.symbol)
    function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(library[loop.symbol])
    function.library = library  # type: ignore[attr-defined]  # it owns the memory of the function
    return function


@cache
def addresses() -> dict[str, int]:
    """Where things of Python are that machine code may name."""
    objects: dict[str, Any] = {"None": None, "NotImplemented": NotImplemented, "ndarray": np.ndarray}
    functions = {name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    return functions | {symbol: id(objects[name]) for name, symbol in OBJECTS.items()}


def _kind(arg: Any) -> str:
    """What an argument is to the compiler: numpy's kind and width, for an array after its number of dimensions."""
    if type(arg) is not np.ndarray:
        return f"{(dtype := np.asarray(arg).dtype).kind}{dtype.itemsize}"
    if not arg.flags.c_contiguous:
        raise ValueError("compiled loops want contiguous arrays.")
    return f"{arg.ndim}{arg.dtype.kind}{arg.dtype.itemsize}"


# -- LLVM --------------------------------------------------------------------------------------------------------


@cache
def _linker() -> Any:
    return llvm.create_lljit_compiler(target_machine())


def target_machine() -> Any:
    """This processor, as LLVM sees it."""
    _start_llvm()
    target = llvm.Target.from_default_triple()
    name, features = _processor()
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc="static", codemodel="jitdefault", jit=True
    )


@cache
def _start_llvm() -> None:
    with contextlib.suppress(RuntimeError, AttributeError):  # some versions of llvmlite start by themselves, or say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _processor() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


# -- on disk -----------------------------------------------------------------------------------------------------


def _find(module: str, name: str, kinds: tuple[str, ...]) -> MadeLoop:
    """The machine code of a loop: from disk, or made now and kept there."""
    digest = sha256(
        repr(
            (
                _sources(module),
                module,
                name,
                kinds,
                HEAD,
                sys.implementation.cache_tag,
                llvmlite.__version__,
                _processor(),
            )
        ).encode()
    )
    file = f"{name}-{digest.hexdigest()[:24]}.loop"
    for folder in _folders():
        loop = _read(folder / file)
        if loop is not None:
            return loop
    from oktopk.kernels.compiling import make

    loop = make(module, name, kinds, f"oktopk.{file}")
    _keep(file, loop.to_bytes())
    return loop


@cache
def _sources(module: str) -> str:
    """All that machine code is made of: what a loop does may be decided in any of these files."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    here = Path(__file__).parent
    made = {here / "compiling.py", here / "calling.py"}
    files = {*made, *here.glob("cpu_*.py"), *Path(spec.origin).parent.glob("compiled_*.py")}
    return sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _folders() -> list[Path]:
    """Where machine code is looked for, and kept in the first that can be written to."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(os.environ["NUMBA_CACHE_DIR"])]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [Path(__file__).parent / "__pycache__", *([user / "oktopk" / "kernels"] if user.is_absolute() else [])]


def _read(path: Path) -> MadeLoop | None:
    try:
        return MadeLoop.from_bytes(path.read_bytes())
    except OSError:
        return None


def _keep(file: str, data: bytes) -> None:
    for folder in _folders():
        temporary = folder / f"{file}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(folder / file)
        except OSError as error:
            log.debug("compiled loops cannot be kept in %s: %s", folder, error)
        else:
            return
