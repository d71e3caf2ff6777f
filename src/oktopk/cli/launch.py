"""`oktopk launch`: job scripts for batch systems."""

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
#SBATCH --ntasks-per-node={workers}
#SBATCH --cpus-per-task={cores}
#SBATCH --time={time}
#SBATCH --output=%x-%j.log
# Two minutes before the time is up the workers get SIGUSR1: they write a checkpoint and end with code 0.
#SBATCH --signal=USR1@120
{partition}
# One thread per core of a worker; more would make workers wait for each other.
export OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-{cores}}}
# srun tells each task its rank; oktopk meets at the first node of the job. Several networks? Pick the fast one:
# export GLOO_SOCKET_IFNAME=ib0

# All nodes must see the run directory. After a pre-emption, submit again with --resume RUN.
srun --kill-on-bad-exit=1 {command}
"""

_PBS = """\
#!/bin/bash
# Written by: oktopk launch pbs. Submit with: qsub {file}
#PBS -N {name}
#PBS -l select={nodes}:ncpus={total_cores}:mpiprocs={workers}
#PBS -l walltime={time}
#PBS -j oe
{partition}
cd "$PBS_O_WORKDIR"
# One thread per core of a worker; more would make workers wait for each other.
export OMP_NUM_THREADS={cores}
# All ranks meet at the first node of the job. Several networks? Pick the fast one:
# export GLOO_SOCKET_IFNAME=ib0
export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")

# All nodes must see the run directory. After a pre-emption, submit again with --resume RUN.
mpirun -np {ranks} -x MASTER_ADDR -x OMP_NUM_THREADS {command}
"""


@dataclass(frozen=True)
class Job:
    """A job script."""

    TEMPLATE: ClassVar[str]
    PARTITION: ClassVar[str]

    nodes: int = 1  # machines
    workers: int = 4  # per machine
    cores: int = 4  # per worker
    time: str = "01:00:00"  # limit, hours:minutes:seconds
    name: str = "oktopk"  # of the job
    partition: str | None = None  # partition or queue; None: the default one
    out: Path | None = None  # file to write; None: print it
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, args: Sequence[str], prog: str) -> Job:
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
        return self.TEMPLATE.format(
            name=self.name, nodes=self.nodes, workers=self.workers, cores=self.cores, time=self.time,
            total_cores=self.workers * self.cores, ranks=self.nodes * self.workers, file=self.out or "job.sh",
            partition=self.PARTITION.format(self.partition) if self.partition else "",
            command=shlex.join(["oktopk", *self.command]),
        )  # fmt: skip


@dataclass(frozen=True)
class Slurm(Job):
    """Write a SLURM job script.

    Example:
        oktopk launch slurm --nodes 4 --workers 2 --time 02:00:00 -- train speech --density 0.02 --epochs 10
    """

    TEMPLATE = _SLURM
    PARTITION = "#SBATCH --partition={}\n"


@dataclass(frozen=True)
class Pbs(Job):
    """Write a PBS job script.

    Example:
        oktopk launch pbs --nodes 4 --workers 2 --time 02:00:00 -- train speech --density 0.02 --epochs 10
    """

    TEMPLATE = _PBS
    PARTITION = "#PBS -q {}\n"


COMMANDS = {"slurm": "oktopk.cli.launch:Slurm", "pbs": "oktopk.cli.launch:Pbs"}
