"""Launching: reading launchers' variables, dividing cores, stopping without orphans, surviving kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from oktopk.cli.main import main
from oktopk.errors import ConfigError
from oktopk.training.environment import RankInfo, find_rank, world_rank
from oktopk.training.turns import Turns, find_turns, turn_variables
from oktopk.training.workers import cores_of, launch_command, threads_per_worker
from trainings import TOY, final_weights, strict_rows
from trainings import plain_kernels as plain_kernels

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(400)]
TESTS = Path(__file__).parent
# Beside the interpreter when it came as a wheel, else wherever the system has it.
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "9",
}  # fmt: skip


def test_ranks_take_turns_only_where_there_are_fewer_cores_than_ranks(tmp_path: Path) -> None:
    assert turn_variables(tmp_path, workers=2, cores=2) == {}
    told = turn_variables(tmp_path, workers=5, cores=2)
    paths = [find_turns(rank, told)._path for rank in range(5)]
    assert len(set(paths)) == 2 and [paths.count(path) for path in sorted(set(paths), key=str)] == [3, 2]
    assert find_turns(0, {})._path is None


def test_a_turn_is_had_by_one_rank_at_a_time_and_is_handed_on_by_an_error(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def compute(rank: int) -> None:
        with suppress(RuntimeError), Turns(tmp_path / "turn").taken():
            inside.append(rank)
            most.append(len(inside))
            inside.remove(rank)
            raise RuntimeError("a rank fails while it has the turn")

    ranks = [threading.Thread(target=compute, args=(rank,)) for rank in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert most == [1] * 8


def read(variables: dict[str, str]) -> RankInfo:
    info = find_rank(variables)
    assert info is not None
    return info


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, SRUN], ids=["Open MPI", "MPICH", "srun"])
def test_a_launcher_may_start_the_ranks_of_one_host(variables: dict[str, str]) -> None:
    info = read(variables)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (1, 2, 1, 2)
    assert info.address == "127.0.0.1"


def test_torchrun_says_everything_itself() -> None:
    info = read(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 8, 1, 2)
    assert (info.address, info.port) == ("n", 9)


def test_without_a_launcher_there_is_no_rank() -> None:
    assert find_rank({}) is None and world_rank({}) == 0
    assert find_rank({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None  # a batch script, not srun


def test_the_innermost_launcher_counts() -> None:
    assert read(SRUN | OPEN_MPI | MPICH | TORCHRUN).rank == 3
    assert read(SRUN | {"SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI).launcher == "mpirun"
    # mpiexec of MPICH starts its helpers with srun; srun --mpi=pmi2 sets two of the variables of mpiexec.
    assert read(SRUN | MPICH).launcher == "mpiexec"
    assert read(SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "srun"


@pytest.mark.parametrize(
    "variables",
    [
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        MPICH | {"MPI_LOCALNRANKS": "1"},
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "PMI_RANK": "1", "PMI_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
    ids=["Open MPI", "MPICH", "srun", "srun with PMI", "PMI alone"],
)
def test_ranks_on_several_hosts_are_sent_to_torchrun_at_once(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"one torchrun on each.*--nproc-per-node 1.*oktopk launch slurm"):
        find_rank(variables)
    assert world_rank(variables) == 1  # who says it is known all the same
    said = read(variables | {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"})
    assert (said.rank, said.address, said.port) == (1, "node1", 29400)


def test_a_rank_without_a_meeting_point_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not"):
        find_rank({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "job"),
    [(OPEN_MPI | {"PMIX_NAMESPACE": "a"}, {"PMIX_NAMESPACE": "b"}), (SRUN, {"SLURM_JOB_ID": "78"}),
     (SRUN, {"SLURM_STEP_ID": "1"})],
)  # fmt: skip
def test_ranks_of_one_job_meet_and_jobs_do_not(variables: dict[str, str], job: dict[str, str]) -> None:
    other_rank = {name: value.replace("1", "0") for name, value in variables.items() if "RANK" in name}
    assert read(variables).port == read(variables | other_rank).port
    assert read(variables).port != read(variables | job).port


def test_jobs_without_a_name_are_told_apart_by_who_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    one = read(MPICH).port
    assert one == read(MPICH | {"PMI_RANK": "0"}).port
    monkeypatch.setattr(os, "getppid", lambda: 4712)
    assert one != read(MPICH).port


def test_cores_are_divided_fairly() -> None:
    assert [threads_per_worker(n, cores=8) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert cores_of(1, 2, range(8)) == [4, 5, 6, 7]
    assert cores_of(1, 2, [0, 1]) == []  # one core each: computing and communicating could not overlap
    assert "--nproc-per-node 2 -m oktopk.cli" in launch_command(2, ["oktopk.cli", "train"])


def start(runs: Path, name: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """`oktopk train` with two workers, as a user starts it."""
    command = [sys.executable, "-m", "oktopk.cli", "train", TOY, "--workers", "2", "--runs", str(runs), "--name", name]
    return subprocess.Popen(
        [*command, "--no-tensorboard", "--min-numel", "0", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS, env=os.environ | environment,
    )  # fmt: skip


def wait_for(path: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)


@pytest.mark.slow  # in one world of processes: tests/test_training_checkpoints.py
def test_a_killed_run_resumed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    words = ["--epochs", "5", "--checkpoint-every", "4", "--kill-at", "21"]  # inside epoch 3
    whole = start(tmp_path, "whole", *words)
    output = whole.communicate(timeout=200)[0]
    assert whole.returncode == 0, output
    killed = start(tmp_path, "killed", *words, TOY_KILLED=str(tmp_path / "marker"))
    output = killed.communicate(timeout=200)[0]
    assert killed.returncode == 2, output
    assert "killed by SIGKILL" in output and "--resume" in output
    resumed = subprocess.run(
        [sys.executable, "-m", "oktopk.cli", "train", TOY, "--resume", str(tmp_path / "killed")],
        cwd=TESTS, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    one, other = final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [row["step"] for row in strict_rows(tmp_path / "killed" / "steps.jsonl")]
    assert steps == list(range(30))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_writes_a_checkpoint_and_leaves_no_orphan(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = start(tmp_path, "run", "--epochs", "100000", "--checkpoint-every", "5")
    wait_for(tmp_path / "run" / "checkpoints" / "last.json")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == code, output
    assert f"stopped by {number.name}" in output and "--resume" in output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.processes
def test_workers_do_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "--epochs", "100000")
    wait_for(tmp_path / "run" / "checkpoints" / "last.json")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.slow  # in one world of processes: tests/test_training.py
def test_bad_data_on_one_worker_is_one_message(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "--fail-at", "4")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 2
    assert output.count("sample 17 is a stone") == 1 and "Traceback" not in output


@pytest.mark.slow
def test_the_same_command_joins_the_world_of_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "oktopk.cli",
    ]
    words = ["train", TOY, "--workers", "4", "--runs", str(tmp_path), "--name", "run", "--no-tensorboard"]
    ended = subprocess.run([*command, *words], cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "2 workers" in ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed: there is no mpirun")
def test_the_same_command_joins_the_world_of_mpirun(tmp_path: Path) -> None:
    words = ["train", TOY, "--runs", str(tmp_path), "--name", "run", "--no-tensorboard"]
    start = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command = [*start, sys.executable, "-m", "oktopk.cli", *words]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "2 workers" in ended.stdout


@pytest.mark.slow  # what is read of each launcher: tests/test_launch.py, without processes
def test_ranks_of_mpiexec_form_a_world(tmp_path: Path) -> None:
    """What mpiexec of MPICH does, by hand: two children of one process that know rank and size, here and in all."""
    words = ["train", TOY, "--runs", str(tmp_path), "--name", "run", "--no-tensorboard", "--epochs", "1"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "oktopk.cli", *words], cwd=TESTS, stdout=subprocess.PIPE, text=True,
            env=os.environ | MPICH | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "2 workers" in outputs[0] and outputs[1] == ""


def test_srun_over_two_hosts_ends_at_once_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    two_hosts = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for rank, said in (("0", True), ("1", False)):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (two_hosts | {"SLURM_PROCID": rank}).items():
                patch.setenv(name, value)
            assert main(["train", TOY]) == 2
        assert ("one torchrun on each" in capsys.readouterr().err) is said
