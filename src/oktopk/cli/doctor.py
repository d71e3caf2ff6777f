"""`oktopk doctor`: is this machine ready?"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from oktopk.bench.cluster import missing_for_emulation
from oktopk.cli.console import console
from oktopk.training.health import Check, examine


@dataclass(frozen=True)
class Doctor:
    """Check that this machine is ready, and say what to fix.

    Looks at Python, torch and its backends, the kernels and why they were chosen, cores, memory, network devices, the
    optional packages, runs a reduction on two processes, and says whether a cluster can be emulated here.

    Example:
        oktopk doctor
    """

    def __call__(self) -> int:
        checks = [*examine(), emulation()]
        console().print(_shown(checks))
        faults = [check for check in checks if check.fix is not None and check.is_needed]
        ending = "; ".join(f"{check.name}: {check.fix}" for check in faults)
        console().print(f"fix: {ending}" if faults else "ready", markup=False, soft_wrap=True)
        return 1 if faults else 0


def emulation() -> Check:
    """Whether `oktopk bench` can make a slow network of its own here."""
    obstacle = missing_for_emulation()
    return Check(
        "network emulation", obstacle or "possible", obstacle and "only oktopk bench needs it", is_needed=False
    )


def _shown(checks: list[Check]) -> Table:
    shown = Table(show_header=False, box=None, pad_edge=False)
    for check in checks:
        mark = "[green]ok[/]" if check.fix is None else "[red]fix[/]" if check.is_needed else "[yellow]note[/]"
        note = f" ({check.fix})" if check.fix else ""
        shown.add_row(mark, check.name, (check.found + note).replace("[", r"\["))
    return shown
