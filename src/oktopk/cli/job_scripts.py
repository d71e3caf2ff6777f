"""`oktopk launch`: job scripts for batch systems. Each starts one torchrun per node, which starts the workers."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import tyro

from oktopk.cli.arguments import parse
from oktopk.cli.console import console
from oktopk.errors import ConfigError

_SLURM = """\
#!/bin/bash
# Written by: oktopk launch slurm. Submit with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
# One torchrun per node; it starts the workers of the node.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={node_cores}
#SBATCH --time={time}
#SBATCH --output=%x-%j.log
# Two minutes before the time is up this script gets SIGUSR1: see below.
#SBATCH --signal=B:USR1@120
{queue}
# One thread per core of a worker; more would make workers wait for each other.
export OMP_NUM_THREADS={cores}
# Several networks? Pick the fast one:
# export GLOO_SOCKET_IFNAME=ib0

# The torchruns of this job meet on its first node, at a port that follows from the number of the job.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# Workers that are told to stop write a checkpoint first. The job then counts as done; submit again with --resume RUN.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
stop() {{ stopped=yes; kill -TERM "$step"; }}
trap stop USR1 TERM

# All nodes must see the run directory.
srun --kill-on-bad-exit=1 --cpus-per-task={node_cores} \\
  torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {workers} \\
  --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id "$SLURM_JOB_ID" \\
  -m {command} &
step=$!
wait "$step"
code=$?
if [ -n "$stopped" ]; then
  wait "$step"  # the first one ended with the signal
  exit 0
fi
exit $code
"""

_PBS = """\
#!/bin/bash
# Written by: oktopk launch pbs. Submit with: qsub {file}
#PBS -N {name}
# One torchrun per node; it starts the workers of the node.
#PBS -l select={nodes}:ncpus={node_cores}:mpiprocs=1
#PBS -l walltime={time}
#PBS -j oe
{queue}
cd "$PBS_O_WORKDIR"

# The torchruns of this job meet on its first node, at a port that follows from the name of the job.
host=$(head -n 1 "$PBS_NODEFILE")
port=$((20000 + $(printf %s "$PBS_JOBID" | cksum | cut -d ' ' -f 1) % 10000))
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)

# OMP_NUM_THREADS: one thread per core of a worker; more would make workers wait for each other.
# Several networks? Pick the fast one beside it, e.g. GLOO_SOCKET_IFNAME=ib0.
# All nodes must see the run directory. After a pre-emption, submit again with --resume RUN.
mpirun -np "$nodes" env OMP_NUM_THREADS={cores} \\
  torchrun --nnodes "$nodes" --nproc-per-node {workers} \\
  --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id "$PBS_JOBID" \\
  -m {command}
"""


@dataclass(frozen=True)
class JobScript:
    """A job script."""

    TEMPLATE: ClassVar[str]
    QUEUE: ClassVar[str]

    nodes: int = 1  # machines
    workers: int = 4  # per machine
    cores: int = 4  # per worker
    time: str = "01:00:00"  # limit, hours:minutes:seconds
    name: str = "oktopk"  # of the job
    partition: str | None = None  # partition or queue; None: the default one
    out: Path | None = None  # file to write; None: print it
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, args: Sequence[str], prog: str) -> JobScript:
        """What follows `--` is the oktopk command of the job."""
        cut = list(args).index("--") if "--" in args else len(args)
        return replace(parse(cls, args[:cut], prog), command=tuple(args[cut + 1 :]))

    def __call__(self) -> int:
        script = self.script()
        if self.out is None:
            print(script, end="")
            return 0
        self.out.write_text(script, encoding="utf-8")
        self.out.chmod(self.out.stat().st_mode | stat.S_IXUSR)
        console().print(f"wrote {self.out}", markup=False)
        return 0

    def script(self) -> str:
        """The text of the job script."""
        if not self.command:
            raise ConfigError("say what to run after --, e.g. oktopk launch slurm --nodes 2 -- train speech")
        for name in ("nodes", "workers", "cores"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        return self.TEMPLATE.format(
            name=self.name, nodes=self.nodes, workers=self.workers, cores=self.cores, time=self.time,
            node_cores=self.workers * self.cores, file=self.out or "job.sh",
            queue=self.QUEUE.format(self.partition) if self.partition else "",
            command=shlex.join(["oktopk.cli", *self.command]),
        )  # fmt: skip


@dataclass(frozen=True)
class Slurm(JobScript):
    """Write a SLURM job script.

    Example:
        oktopk launch slurm --nodes 4 --workers 2 --time 02:00:00 -- train speech --density 0.02 --epochs 10
    """

    TEMPLATE = _SLURM
    QUEUE = "#SBATCH --partition={}\n"


@dataclass(frozen=True)
class Pbs(JobScript):
    """Write a PBS job script.

    Example:
        oktopk launch pbs --nodes 4 --workers 2 --time 02:00:00 -- train speech --density 0.02 --epochs 10
    """

    TEMPLATE = _PBS
    QUEUE = "#PBS -q {}\n"


COMMANDS = {"slurm": "oktopk.cli.job_scripts:Slurm", "pbs": "oktopk.cli.job_scripts:Pbs"}
