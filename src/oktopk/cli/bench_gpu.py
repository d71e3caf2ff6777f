"""`oktopk bench gpu`: all that needs a GPU to be known, in one page to send in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oktopk.cli.console import console


@dataclass(frozen=True)
class BenchGpu:
    """Run everything that needs a GPU, and write one Markdown page to send in.

    Kernels against plain torch, two ranks on one card, overlap, memory, speed, short trainings; some minutes. A part
    that fails is written down too, and exits with 1. Without a GPU it says so; --device cpu tries the procedure.

    Example:
      oktopk bench gpu --device cpu --quick --output build/gpu-check.md
    """

    output: Path = Path("gpu-check.md")  # the page
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: a trial of the procedure itself
    quick: bool = False  # small sizes: whether it works, not how fast

    def __call__(self) -> int:
        from oktopk.bench.gpu.check import Trial, check
        from oktopk.training.devices import kind_of

        trial = Trial(kind_of(self.device), self.quick)
        ok = check(trial, self.output, lambda text: console().print(f"{text} ...", markup=False))
        said = "all parts are as they should be" if ok else "some parts FAILED"
        console().print(f"{said}: {self.output}", markup=False, soft_wrap=True)
        return 0 if ok else 1
