"""Job scripts: run as a batch system would, with stand-ins for its commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oktopk.bench.cluster import EmulatedCluster, address, emulated_cluster, missing_for_emulation
from oktopk.bench.network import Network
from oktopk.cli.main import main
from trainings import TOY, strict_rows
from trainings import plain_kernels as plain_kernels

pytestmark = [pytest.mark.usefixtures("plain_kernels"), pytest.mark.timeout(300)]
TESTS = Path(__file__).parent
BASH = str(shutil.which("bash"))

# What the batch systems tell a script, and what their commands answer.
SLURM = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
PBS = {"PBS_JOBID": "77[3].server"}
SCONTROL = '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"'
SHOW = 'printf "%s\\n" "$@"'
SYSTEMS = ["slurm", "pbs"]


@dataclass(frozen=True)
class Batch:
    """A folder with a job script, and stand-ins for the commands it calls."""

    folder: Path

    def stand_in(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{BASH}\n{script}\n")
        path.chmod(0o755)

    def write(self, system: str, *words: str, nodes: int = 2, workers: int = 3) -> Path:
        script = self.folder / "job.sh"
        numbers = ["--nodes", str(nodes), "--workers", str(workers), "--cores", "5", "--out", str(script)]
        assert main(["launch", system, *numbers, "--", *words]) == 0
        return script

    @property
    def environment(self) -> dict[str, str]:
        nodes = self.folder / "nodes"
        nodes.write_text("node1\nnode2\n")
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        pbs = PBS | {"PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": str(TESTS)}
        return os.environ | SLURM | pbs | {"PATH": path}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    made = Batch(tmp_path)
    made.stand_in("scontrol", SCONTROL)
    made.stand_in("srun", SHOW)
    made.stand_in("mpirun", SHOW)
    return made


@pytest.mark.processes
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_script_starts_one_torchrun_per_node(system: str, batch: Batch) -> None:
    script = batch.write(system, "train", "speech", "--data", "my corpus", "--lr", "0.1")
    ended = subprocess.run([BASH, script], env=batch.environment, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    called = ended.stdout.splitlines()
    start = called.index("torchrun")
    options = dict(zip(called[start + 1 :: 2], called[start + 2 :: 2], strict=False))
    host, port = options["--rdzv-endpoint"].split(":")
    assert (options["--nnodes"], options["--nproc-per-node"], options["--rdzv-backend"]) == ("2", "3", "c10d")
    assert host == "node1" and 20000 <= int(port) < 30000
    assert options["--rdzv-id"] == (SLURM["SLURM_JOB_ID"] if system == "slurm" else PBS["PBS_JOBID"])
    assert called[called.index("-m") :] == ["-m", "oktopk.cli", "train", "speech", "--data", "my corpus", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("system", "asked"),
    [
        ("slurm", ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=15", "--partition=fast"]),
        ("pbs", ["select=2:ncpus=15:mpiprocs=1", "-q fast"]),
    ],
)
def test_a_script_asks_for_what_it_needs(system: str, asked: list[str], batch: Batch) -> None:
    words = ["--nodes", "2", "--workers", "3", "--cores", "5", "--partition", "fast"]
    script = batch.folder / "job.sh"
    assert main(["launch", system, *words, "--out", str(script), "--", "train"]) == 0
    directives = [line for line in script.read_text().splitlines() if line.startswith(("#SBATCH", "#PBS"))]
    assert all(any(wanted in line for line in directives) for wanted in asked)


@pytest.mark.processes
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_failure_of_the_workers_is_one_of_the_job(system: str, batch: Batch) -> None:
    batch.stand_in("srun", "exit 3")
    batch.stand_in("mpirun", "exit 3")
    script = batch.write(system, "train")
    assert subprocess.run([BASH, script], env=batch.environment, timeout=30).returncode == 3


@pytest.mark.processes
def test_the_end_of_the_time_is_told_to_the_workers_and_the_job_counts_as_done(batch: Batch) -> None:
    told = batch.folder / "told"
    os.mkfifo(batch.folder / "ready")
    batch.stand_in(
        "srun",
        f"trap 'echo told > {told}; exit 1' TERM; echo > {batch.folder / 'ready'}; while true; do sleep 0.1; done",
    )
    job = subprocess.Popen([BASH, batch.write("slurm", "train")], env=batch.environment)
    (batch.folder / "ready").read_text()  # blocks until the step runs
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 0
    assert told.read_text() == "told\n"


@pytest.mark.parametrize("wrong", [["--nodes", "0"], ["--workers", "0"], ["--cores", "-1"]])
def test_numbers_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", *wrong, "--", "train"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err


# -- two hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[EmulatedCluster]:
    obstacle = missing_for_emulation()
    if obstacle:
        pytest.skip(f"no emulated hosts: {obstacle}")
    with emulated_cluster(2, Network(None)) as cluster:
        yield cluster


def stand_in_for_hosts(batch: Batch, cluster: EmulatedCluster) -> None:
    """srun and mpirun that start a command once on each host, under its own name; qsub and sbatch that run a script."""
    (batch.folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address(host)} node{host + 1}\n" for host in range(2))
    )
    inside = f'hostname "$NODE" && mount --bind {batch.folder / "hosts"} /etc/hosts && exec "$@"'
    batch.stand_in("inside", inside)
    start = "\n".join(
        f"NODE=node{host + 1} SLURM_PROCID={host} SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_ID=0 "
        f"SLURM_STEP_TASKS_PER_NODE='1(x2)' PMI_RANK={host} PMI_SIZE=2 "
        f'ip netns exec {cluster.namespace(host)} unshare --mount --uts inside "$@" &\npids+=($!)'
        for host in range(2)
    )
    # As srun does, signals go on to the tasks, and the first failure is the exit code.
    ending = (
        'trap \'kill -TERM "${pids[@]}"\' TERM\ncode=0\nfor p in "${pids[@]}"; do wait $p || code=$?; done\nexit $code'
    )
    batch.stand_in("srun", f"shift 2\n{start}\n{ending}")
    batch.stand_in("mpirun", f"shift 2\n{start}\n{ending}")
    for name in ("sbatch", "qsub"):
        batch.stand_in(name, f'cd {TESTS} && exec {BASH} "$1"')


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_job_trains_on_two_hosts(system: str, batch: Batch, two_hosts: EmulatedCluster) -> None:
    stand_in_for_hosts(batch, two_hosts)
    options = ["--runs", str(batch.folder), "--name", "run", "--no-tensorboard", "--min-numel", "0", "--epochs", "1"]
    script = batch.write(system, "train", TOY, *options, workers=2)
    submit = "sbatch" if system == "slurm" else "qsub"
    ended = subprocess.run([submit, script], env=batch.environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 workers" in ended.stdout
    assert [row["step"] for row in strict_rows(batch.folder / "run" / "steps.jsonl")] == list(range(6))


@pytest.mark.slow
def test_a_job_on_two_hosts_that_is_told_to_stop_writes_a_checkpoint(batch: Batch, two_hosts: EmulatedCluster) -> None:
    stand_in_for_hosts(batch, two_hosts)
    options = ["--runs", str(batch.folder), "--name", "run", "--no-tensorboard", "--epochs", "100000"]
    script = batch.write("slurm", "train", TOY, *options, workers=1)
    job = subprocess.Popen(["sbatch", script], env=batch.environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    for line in job.stdout:
        if "epoch 3 " in line:
            break
    job.send_signal(signal.SIGUSR1)
    rest = job.communicate(timeout=150)[0]
    assert job.returncode == 0 and "stopped by SIGTERM" in rest
    assert (batch.folder / "run" / "checkpoints" / "last.json").is_file()
