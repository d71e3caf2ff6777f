"""The rank of this process, from the variables that its launcher set.

torchrun says everything itself, on any number of hosts. mpirun, mpiexec and srun may start the ranks of one host; over
several hosts they start one torchrun on each, which knows how to meet.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from oktopk.errors import ConfigError

TORCHRUN = "torchrun"
_FIRST_PORT, _PORTS = 15000, 5000  # below the ports that the kernel hands out by itself


@dataclass(frozen=True)
class RankInfo:
    """A rank, its world and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    """The names of a launcher's variables: rank, world size, and the same on this host where it says so."""

    name: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    job: tuple[str, ...] = ()  # what tells its jobs apart

    def is_in(self, environ: Mapping[str, str]) -> bool:
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return all(environ.get(name, "")[:1].isdigit() for name in names if name is not None)


# The first one whose variables are all set wins. torchrun inside srun is torchrun; mpirun inside a SLURM job may be
# srun's child; and srun --mpi=pmi2 sets PMI variables too, but not those that only MPICH's mpiexec has.
_LAUNCHERS = (
    _Launcher(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(TORCHRUN, "RANK", "WORLD_SIZE"),
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher("a launcher with PMI", "PMI_RANK", "PMI_SIZE"),
)  # fmt: skip


def find_rank(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """What a launcher told this process, or None when nobody launched it."""
    launcher = _find_launcher(environ)
    return None if launcher is None else _read(environ, launcher)


def world_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank alone, 0 without a launcher: who speaks when the rest cannot be read."""
    launcher = _find_launcher(environ)
    return 0 if launcher is None else int(environ[launcher.rank])


def _find_launcher(environ: Mapping[str, str]) -> _Launcher | None:
    return next((launcher for launcher in _LAUNCHERS if launcher.is_in(environ)), None)


def _read(environ: Mapping[str, str], launcher: _Launcher) -> RankInfo:
    world_size = int(environ[launcher.world_size])
    local_rank, local_world_size = _on_this_host(environ, launcher)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not (address and port) and local_world_size != world_size:
        raise ConfigError(_nowhere_to_meet(launcher, world_size, local_world_size))
    return RankInfo(
        rank=int(environ[launcher.rank]),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=address or "127.0.0.1",
        port=int(port) if port else _job_port(environ, launcher),
        launcher=launcher.name,
    )


def _on_this_host(environ: Mapping[str, str], launcher: _Launcher) -> tuple[int, int]:
    """Local rank and size; where the launcher does not say, as if this rank were alone on its host."""
    if launcher.local_rank is None or launcher.local_world_size is None:
        return 0, 1
    # SLURM writes 2(x3) for three hosts of two ranks.
    leading = re.match(r"\d+", environ[launcher.local_world_size])
    return int(environ[launcher.local_rank]), int(leading[0]) if leading else 1


def _nowhere_to_meet(launcher: _Launcher, world_size: int, local_world_size: int) -> str:
    if launcher.name == TORCHRUN:
        return (
            f"{launcher.rank} and {launcher.world_size} are set, but MASTER_ADDR and MASTER_PORT are not: use "
            f"torchrun, which sets them all, or unset {launcher.rank} to run alone."
        )
    return (
        f"{launcher.name} started {world_size} ranks, and not all of them are known to be on this host "
        f"({local_world_size} are). On several hosts let it start one torchrun on each, which starts the ranks: "
        f"torchrun --nnodes HOSTS --nproc-per-node {local_world_size} --rdzv-backend c10d "
        "--rdzv-endpoint FIRST_HOST:29400 --rdzv-id JOB -m oktopk.cli ... `oktopk launch slurm` and `oktopk launch "
        "pbs` write job scripts that do. Or set MASTER_ADDR and MASTER_PORT on every rank to say where they meet."
    )


def _job_port(environ: Mapping[str, str], launcher: _Launcher) -> int:
    """A port that all ranks of a job on one host, and no other job, come up with."""
    job = "/".join(environ[name] for name in launcher.job if environ.get(name))
    # MPICH's mpiexec names no job, but it is the parent of all its ranks.
    return _FIRST_PORT + zlib.crc32((job or f"parent {os.getppid()}").encode()) % _PORTS
