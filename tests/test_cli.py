"""The command line: help that helps, errors that say what to do, flags and files that mean the same."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from oktopk.cli.arguments import take, to_flags
from oktopk.cli.compare import Compare
from oktopk.cli.console import bytes_text, duration_text
from oktopk.cli.main import COMMANDS, main, resolve
from oktopk.cli.progress import epoch_text
from oktopk.cli.train import Train, as_config, to_argv
from oktopk.errors import ConfigError
from oktopk.training.journal import EpochEntry
from trainings import TOY, toy_config, train_alone
from trainings import plain_kernels as plain_kernels

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(400)]
CONFIGS = Path(__file__).parent.parent / "configs"


def commands() -> list[list[str]]:
    """Every command and sub-command."""
    found = []
    for name, (target, _) in COMMANDS.items():
        command = resolve(target)
        found += [[name, sub] for sub in command] if isinstance(command, dict) else [[name]]
    return found


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands():
        assert main([*words, "--help"]) == 0, words
        assert "Example:" in capsys.readouterr().out, words


def test_the_list_of_commands_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_wrong_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--densty", "0.1"]) == 2
    assert "--density" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "speach"], "Did you mean 'speech'?"),
        (["train", TOY, "--algorithm", "oktop"], "Did you mean 'oktopk'?"),
        (["train", TOY, "--config", "nowhere.toml"], "no configuration file"),
        (["train", TOY, "--config"], "wants a value"),
        (["train", "--resume", "nowhere"], "no last checkpoint"),
        (["inspect", "nowhere"], "is not a run"),
        (["evaluate", "nowhere"], "no last checkpoint"),
        (["evaluate", "nowhere", "--checkpoint", "best"], "no best checkpoint"),
        (["compare", TOY, "--algorithms", "dense,okto"], "Did you mean 'oktopk'?"),
        (["compare", TOY, "--sweep", "densty=1"], "Did you mean 'density'?"),
        (["launch", "slurm"], "after --"),
    ],
)
def test_an_error_is_one_clear_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_traceback_shows_where_an_error_came_from() -> None:
    with pytest.raises(ConfigError):
        main(["train", "speach", "--traceback"])


def test_values_that_make_no_sense_name_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--density", "2.0"]) == 2
    assert "density must be in (0, 1]" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'workload = "{TOY}"\nlr = 0.5\nepochs = 7\nlr-steps = [2, 4]\ntensorboard = false\nlr_linear_decay = true\n'
        "[density_schedule]\n0 = 0.5\n10 = 0.1\n[workload_options]\nbatches = 3\n[algorithm_options]\ncap = 2.0\n"
    )
    command = Train.parse(["--config", str(file), "--epochs", "9"], "oktopk train")
    assert (command.workload, command.lr, command.epochs, command.lr_steps) == (TOY, 0.5, 9, (2, 4))
    assert (command.tensorboard, command.lr_linear_decay) == (False, True)
    assert command.density_schedule == {0: 0.5, 10: 0.1}
    assert command.workload_options["batches"] == 3
    assert command.algorithm_options["cap"] == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("densty = 0.1", "unknown option 'densty'. Did you mean 'density'?"),
        ("density = 'high'", "density must be float | None, got 'high'"),
        ("workers = true", "workers must be int, got True"),
        ("lr_steps = 3", "lr_steps must be tuple[int, ...] | None, got 3"),
        ("on_nonfinite = 'ignore'", "on_nonfinite must be Literal['raise', 'skip'], got 'ignore'"),
        ("[algorithm_options]\ncap = []", "cap must be float"),
    ],
)
def test_a_wrong_value_in_a_file_names_the_file_and_the_option(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["train", TOY, "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and said in error


def test_a_file_gives_values_to_any_command_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('nodes = 3\ntime = "02:00:00"\n')
    assert main(["launch", "slurm", "--config", str(file), "--nodes", "5", "--", "train"]) == 0
    shown = capsys.readouterr().out
    assert "--nodes=5" in shown and "--time=02:00:00" in shown
    (tmp_path / "inspect.toml").write_text("csv = true\n")
    assert main(["inspect", "nowhere", "--config", str(tmp_path / "inspect.toml")]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_arguments_made_from_a_command_parse_to_the_same_command() -> None:
    given = [TOY, "--workers", "3", "--lr", "0.1", "--lr-steps", "2", "3", "--no-tensorboard", "--batches", "4"]
    given += ["--algorithm", "gaussiank", "--corrections", "2", "--density-schedule", "0", "0.5", "9", "0.1", "--quiet"]
    command = Train.parse(given, "oktopk train")
    assert Train.parse(to_argv(command), "oktopk train") == command


def test_options_of_the_workload_and_the_algorithm_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--algorithm", "gaussiank", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--dropout" in shown and "--corrections" in shown and "--reestimate-every" not in shown


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (["gpt", "--reduce", "updates", "--every", "4"], "--global-cut", "--draw-seed"),
        (["gpt", "--reduce", "updates"], "--draw-seed", "--global-cut"),
        (["gpt", "--reduce", "updates", "--every=4", "--keep-owed", "True"], "--draw-seed", "--global-cut"),
        (["speech", "--reduce", "updates", "--every", "4"], "--draw-seed", "--global-cut"),  # its preset keeps
        (["ptb", "--reduce", "updates", "--every", "4"], "--global-cut", "--draw-seed"),
        (["ptb", "--reduce", "updates", "--every", "auto"], "--draw-seed", "--global-cut"),
        (["ptb", "--reduce", "updates", "--mean-over", "senders"], "--global-cut", "--draw-seed"),
    ],
)
def test_help_lists_the_options_of_the_algorithm_that_would_run(
    arguments: list[str], shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--help"]) == 0
    out = capsys.readouterr().out
    assert shown in out and hidden not in out


def test_a_dry_run_prints_the_configuration_and_the_launch_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--workers", "2", "--density", "0.25", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    configuration, _, launch = shown.partition("launch: ")
    assert json.loads(configuration)["lr"] == 0.02  # from the recipe
    assert json.loads(configuration)["density"] == 0.25
    assert "torchrun --standalone --nproc-per-node 2 -m oktopk.cli train toy:ToyWorkload" in launch
    assert "--dry-run" not in launch


@pytest.mark.parametrize("name", [path.name for path in sorted(CONFIGS.glob("*.toml"))])
def test_every_configuration_file_parses(name: str) -> None:
    kind = Compare if name.startswith("sweep") else Train
    command = kind.parse(["--config", str(CONFIGS / name)], "oktopk")
    assert as_config(command).workload


def test_the_extended_configuration_leaves_the_warm_up_by_twelve_steps() -> None:
    command = Train.parse(["--config", str(CONFIGS / "lstm_extended.toml")], "oktopk train")
    steps = 948 // (command.workers * (command.batch_size or 0)) * (command.epochs or 0)
    assert (steps, command.warmup_steps) == (140, 128)


def test_the_sweep_is_a_grid_of_six() -> None:
    command = Compare.parse(["--config", str(CONFIGS / "sweep_density.toml")], "oktopk compare")
    variants = command.variants()
    assert [(v.density, v.lr) for v in variants] == [(d, lr) for d in (0.02, 0.05, 0.1) for lr in (0.002, 0.004)]
    assert len({v.name for v in variants}) == 6


def test_a_run_can_be_trained_inspected_evaluated_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--runs", str(tmp_path), "--no-tensorboard", "--min-numel", "0", "--epochs", "2"]
    assert main(["train", TOY, *common, "--name", "one"]) == 0
    shown = capsys.readouterr().out
    assert "[rank 0 step 6] epoch 0 train loss" in shown
    assert "sparse from step 3 on" in shown
    assert "sparse 6/6 steps, sparsity 0.900, ratio 10.0" in shown
    assert main(["inspect", str(tmp_path / "one")]) == 0
    assert "step-00000012" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "one"), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert main(["inspect", str(tmp_path / "one" / "checkpoints" / "step-00000012")]) == 0
    assert "owed by 0" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "one")]) == 2
    assert "names code to run" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "one"), "--trust"]) == 0
    assert "error" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "one"), "--workload", TOY]) == 0
    assert "error" in capsys.readouterr().out
    assert main(["compare", TOY, *common, "--algorithms", "dense,oktopk", "--name", "both"]) == 0
    shown = capsys.readouterr().out
    assert "both-dense" in shown and "speed-up" in shown and "comparison.html" in shown


def test_resume_takes_the_configuration_of_the_run_and_the_flags_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_alone(toy_config(tmp_path, "run", epochs=1, lr=0.01))
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "2"]) == 2
    assert "names code to run" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "2", "--trust"]) == 0
    assert "resumed at step 6" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["epochs"], config["lr"], config["workload"]) == (2, 0.01, TOY)
    assert main(["train", TOY, "--resume", str(tmp_path / "run"), "--preset", "wide", "--epochs", "3"]) == 2
    assert "another model" in capsys.readouterr().err


def test_quiet_says_only_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--runs", str(tmp_path), "--no-tensorboard", "--epochs", "1", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("done: 6 steps")


def test_a_run_inside_its_warm_up_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TOY, "--runs", str(tmp_path), "--epochs", "1", "--warmup-steps", "128"]) == 0
    assert "All 6 steps were inside the dense warm-up of 128 steps" in capsys.readouterr().out


@pytest.mark.processes
def test_the_doctor_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert (code, lines[-1]) == (0, "ready")
    assert any("collectives on 2 processes" in line and "correct" in line for line in lines)


def test_an_epoch_in_words_names_both_phases() -> None:
    entry = EpochEntry(
        epoch=5, steps=14, dense_steps=2, sparse_steps=12, skipped_steps=0, seconds=3.0, wall_seconds=9.0,
        train_loss=1.6, sparsity=0.98, compression_ratio=50.2, bytes_per_step=2e7, sparse_bytes_per_step=1.9e6,
        dense_bytes_per_step=1.93e8, validation={"loss": 1.0, "WER": 0.5},
    )  # fmt: skip
    assert epoch_text(entry, "WER") == (
        "epoch 5 train loss 1.60 | dense 2/14 steps, sent 129 MB/step | sparse 12/14 steps, sparsity 0.980, "
        "ratio 50.2, sent 1.9 MB/step (dense 193 MB) | validation WER 0.500, loss 1.000 | 3.0s"
    )


def test_numbers_read_well() -> None:
    assert [bytes_text(n) for n in (5, 1900, 27_000, 1.9e6, 193e6)] == ["5 B", "1.9 kB", "27 kB", "1.9 MB", "193 MB"]
    assert [duration_text(s) for s in (0.5, 45, 200, 7500)] == ["0.5s", "45s", "3m20s", "2h05m"]


def test_flags_of_values_and_values_of_flags() -> None:
    assert take(["--a", "1", "--config=x", "b"], "--config") == ("x", ["--a", "1", "b"])
    assert to_flags({"a_b": [1, 2], "c": True, "d": False, "e": None}, {"c": bool, "d": bool}) == [
        "--a-b", "1", "2", "--c", "--no-d",
    ]  # fmt: skip


def test_a_signal_that_ends_one_training_of_a_comparison_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def end_by_signal(variant: Train) -> int:
        begun.append(variant.name)
        run = variant.runs / str(variant.name)
        run.mkdir(parents=True)
        (run / "summary.json").write_text('{"stopped_by": "SIGTERM"}')
        return 0

    monkeypatch.setattr(Train, "__call__", end_by_signal)
    command = Compare.parse([TOY, "--runs", str(tmp_path), "--name", "both"], "oktopk compare")
    assert command() == 0
    assert begun == ["both-dense"]
