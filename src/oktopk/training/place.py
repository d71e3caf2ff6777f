"""Where this process stands among its peers, read from the variables its launcher set."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from oktopk.errors import ConfigError

_FIRST_PORT, _PORTS = 15000, 15000  # below the ports that the kernel hands out by itself


@dataclass(frozen=True)
class Place:
    """A rank, its world and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    launcher: str


@dataclass(frozen=True)
class _Variables:
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# The first launcher whose rank and world size are set wins: torchrun inside srun is torchrun.
LAUNCHERS = {
    "torchrun": _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun (Open MPI)": _Variables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "mpirun (PMI)": _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": _Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID")


def find_place(environ: Mapping[str, str] | None = None) -> Place | None:
    """The place a launcher gave this process, or None when nobody launched it."""
    environ = os.environ if environ is None else environ
    for launcher, names in LAUNCHERS.items():
        if environ.get(names.rank) and environ.get(names.world_size):
            return _place(environ, launcher, names)
    return None


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: 'gpu[03-05,9],x' names gpu03 first."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]


def _place(environ: Mapping[str, str], launcher: str, names: _Variables) -> Place:
    rank, world_size = int(environ[names.rank]), int(environ[names.world_size])
    local_world_size = _leading_number(environ.get(names.local_world_size, ""), default=world_size)
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=int(environ.get(names.local_rank, rank % local_world_size)),
        local_world_size=local_world_size,
        address=_address(environ, launcher, local_world_size == world_size),
        port=int(environ.get("MASTER_PORT") or _job_port(environ)),
        launcher=launcher,
    )


def _address(environ: Mapping[str, str], launcher: str, one_host: bool) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    found = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else nodes and first_host(nodes))
    if not found:
        raise ConfigError(
            f"{launcher} started ranks on several hosts, and MASTER_ADDR does not say where they meet: set it to the "
            "host of rank 0 on all of them, e.g. mpirun -x MASTER_ADDR=node1 ..."
        )
    return found


def _job_port(environ: Mapping[str, str]) -> int:
    """A port that all ranks of a job, and no other job, come up with."""
    job = "/".join(environ[name] for name in _JOB_VARIABLES if environ.get(name))
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _leading_number(text: str, default: int) -> int:
    """SLURM writes '2(x3)' for three nodes of two tasks."""
    digits = text[: next((i for i, letter in enumerate(text) if not letter.isdigit()), len(text))]
    return int(digits) if digits else default
