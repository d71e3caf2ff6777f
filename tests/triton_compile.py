"""Compiles every Triton kernel for cards that are not here: python tests/triton_compile.py 80 90 100 > rows.json"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oktopk.kernels import triton as kernels_module
from oktopk.kernels import triton_search
from oktopk.kernels.reference import ReferenceKernels
from oktopk.types import Difference, SparseVector

POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, as the compiler sees a call."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int

    @classmethod
    def of(cls, kernel: Any, warps: int, args: tuple[Any, ...], given: dict[str, Any]) -> Launch:
        named = dict(zip(kernel.arg_names, args, strict=False)) | given
        types = {name: _type(value) for name, value in named.items()} | dict.fromkeys(given, "constexpr")
        constants = {name: named[name] for name in kernel.arg_names if types[name] == "constexpr"}
        return cls(kernel, tuple((name, types[name]) for name in kernel.arg_names), tuple(constants.items()), warps)

    @property
    def variant(self) -> str:
        """What tells it from other launches of the kernel."""
        words = [name.lower() for name, value in self.constants if value is True]
        words += [f"{name.lower()} {value}" for name, value in self.constants if name in ("DIGIT", "SIGN")]
        kinds = {kind for name, kind in self.signature if name in ("x", "grad", "values", "piece")}
        return ", ".join([*words, *sorted(kind[1:] for kind in kinds if kind.startswith("*") and kind != "*fp32")])

    def compile(self, architecture: int) -> Any:
        at = {name: position for position, (name, _) in enumerate(self.signature)}
        # Tensors begin at multiples of 16 bytes, as torch allocates them.
        aligned = {(at[name],): [["tt.divisibility", 16]] for name, kind in self.signature if kind.startswith("*")}
        constants = {(at[name],): value for name, value in self.constants}
        source = ASTSource(self.kernel, dict(self.signature), constants, aligned)
        return triton.compile(source, GPUTarget("cuda", architecture, 32), {"num_warps": self.warps})


@dataclass(frozen=True)
class Row:
    kernel: str
    variant: str
    architecture: int
    registers: int
    spilled: int  # bytes of local memory per thread
    shared: int  # bytes per program
    flushes: bool  # whether tiny sums would become zero


def launches() -> list[Launch]:
    """All that the kernels do with gradients of every kind they serve, short and long, in one piece and in several."""
    seen: dict[Launch, None] = {}

    def record(kernel: Any, programs: int, *args: Any, warps: int = triton_search.WARPS, **constants: Any) -> None:
        seen[Launch.of(kernel, warps, args, constants)] = None

    kernels_module.launch = triton_search.launch = record
    for numel in (1000, 100_000):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            _use(kernels_module.TritonKernels(torch.device("cpu"), ReferenceKernels()), numel, dtype)
    return list(seen)


def _use(kernels: kernels_module.TritonKernels, numel: int, dtype: torch.dtype) -> None:
    residual, grad, k = torch.zeros(numel), torch.zeros(numel, dtype=dtype), numel // 100
    sent = SparseVector(torch.arange(3, dtype=torch.int32), torch.ones(3), numel)
    kernels.accumulate_(residual, grad, 0)
    kernels.accumulate_(residual, grad, k)
    kernels.add(torch.zeros(numel), residual, grad.split(numel // 2), k)
    kernels.select_topk(grad, k)
    kernels.count_above(grad, 1.0)
    difference = Difference(residual, tuple(torch.zeros(numel).split(numel // 2)))
    kernels.scan(difference, k)
    kernels.pick(difference, sent.indices)
    kernels.pick(grad, sent.indices)
    kernels.move_(difference, sent, sent)
    kernels.retain_(residual, sent)
    kernels.fill_([grad], sent)
    kernels.fill_(grad.split(numel // 2), sent)


def rows(architectures: list[int]) -> Iterator[Row]:
    for launch in launches():
        for architecture in architectures:
            compiled = launch.compile(architecture)
            used = _resources(compiled.asm["cubin"])
            flushes = bool(re.search(r"add\.(rn\.)?ftz", compiled.asm["ptx"]))
            yield Row(
                launch.kernel.__name__, launch.variant, architecture, used["REG"], used["STACK"] + used["LOCAL"],
                compiled.metadata.shared, flushes,
            )  # fmt: skip


def table(rows: list[Row]) -> str:
    """The most that any variant of a kernel takes, in Markdown."""
    architectures = sorted({row.architecture for row in rows})
    head = ["kernel", *(f"registers, sm_{a}" for a in architectures), "spilled bytes", "shared memory, bytes"]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for kernel in dict.fromkeys(row.kernel for row in rows):
        own = [row for row in rows if row.kernel == kernel]
        registers = [max(row.registers for row in own if row.architecture == a) for a in architectures]
        most = [*registers, max(row.spilled for row in own), max(row.shared for row in own)]
        lines.append([f"`{kernel}`", *(f"{number:,}" for number in most)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, int) and not isinstance(value, bool):
        return "i64" if value > 2**31 - 1 else "i32"
    return "constexpr"


if __name__ == "__main__":
    json.dump([asdict(row) for row in rows([int(word) for word in sys.argv[1:]])], sys.stdout)
