"""`oktopk COMMAND ...`: finds the command, parses its flags, turns its errors into one clear message.

A command is a frozen dataclass (its fields are the flags) with `__call__(self) -> int`. A group of commands is a
literal dict from name to target, like the one below. Both are imported only when they are asked for, and so are the
libraries that parse flags and print tables: the list of commands must come at once.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.errors import OkTopkError, nearest
from oktopk.training.environment import world_rank

# name: (module:Class of a command, or module:DICT of a group; what it is for)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("oktopk.cli.train:Train", "Train a workload on one or many workers."),
    "compare": (
        "oktopk.cli.compare:Compare",
        "Train one workload under several algorithms: one table, one report.",
    ),
    "evaluate": ("oktopk.cli.evaluate:Evaluate", "Score a checkpoint of a run on its validation set."),
    "report": ("oktopk.cli.report:Report", "One HTML page about one or more runs."),
    "inspect": ("oktopk.cli.inspect:Inspect", "Say what a run or a checkpoint holds."),
    "data": ("oktopk.cli.data:COMMANDS", "Prepare, repair and check corpora."),
    "bench": ("oktopk.cli.bench:COMMANDS", "Measure kernels, wire formats, collectives and training steps."),
    "results": (
        "oktopk.cli.results:Results",
        "Train the small presets under every algorithm and write docs/results.md.",
    ),
    "plan": ("oktopk.cli.plan:Plan", "Predict what each algorithm costs on a cluster you describe."),
    "advise": ("oktopk.cli.plan:Advise", "Recommend an algorithm and density for a cluster you describe."),
    "launch": ("oktopk.cli.job_scripts:COMMANDS", "Write a job script for SLURM or PBS."),
    "doctor": ("oktopk.cli.doctor:Doctor", "Check that this machine is ready, and say what to fix."),
}

USAGE_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0 done, 1 a command says no, 2 a clear error, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in args
    args = [arg for arg in args if arg != "--traceback"]
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head, less) left: not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OkTopkError, OSError) as error:
        if traceback:
            raise
        _say(str(error))
        return USAGE_ERROR
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR


def resolve(target: str) -> Any:
    """The object that 'module:name' names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        _print_commands("oktopk", {name: text for name, (_, text) in COMMANDS.items()})
        return 0 if args else USAGE_ERROR
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"oktopk {version('oktopk')}")
        return 0
    _require(args[0], COMMANDS, "oktopk")
    return _dispatch(resolve(COMMANDS[args[0]][0]), args[1:], f"oktopk {args[0]}")


def _dispatch(target: Any, args: list[str], prog: str) -> int:
    if not isinstance(target, Mapping):
        return int(_parse(target, args, prog)())
    if not args or args[0] in ("-h", "--help"):
        _print_commands(prog, {name: _summary(resolve(path)) for name, path in target.items()})
        return 0 if args else USAGE_ERROR
    _require(args[0], target, prog)
    return _dispatch(resolve(target[args[0]]), args[1:], f"{prog} {args[0]}")


def _parse(command: Any, args: list[str], prog: str) -> Any:
    if hasattr(command, "parse"):
        return command.parse(args, prog)
    from oktopk.cli.arguments import parse

    return parse(command, args, prog)


def _summary(command: Any) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


def _require(name: str, known: Mapping[str, Any], prog: str) -> None:
    if name not in known:
        print(f"{prog}: no command {name!r}. {nearest(name, known)} See {prog} --help.", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def _print_commands(prog: str, commands: Mapping[str, str]) -> None:
    width = max(len(name) for name in commands) + 2
    print(f"usage: {prog} COMMAND [OPTIONS]\n")
    for name, text in commands.items():
        print(f"  {name:<{width}}{text}")
    print(f"\nExample:\n  {prog} {next(iter(commands))} --help")
    if prog == "oktopk":
        print("\nEvery command takes --help, --config FILE.toml and --traceback.")


def _say(text: str) -> None:
    """One message, from one rank: peers fail for the same reason, or because of it."""
    if world_rank() == 0:
        from oktopk.cli.console import error_console

        escaped = text.replace("[", r"\[")
        error_console().print(f"[bold red]error:[/] {escaped}", highlight=False, soft_wrap=True)
