"""The kernel contract on a real GPU, and hosts that sum over NCCL: `make gpu-check` runs it, nothing else can."""

from __future__ import annotations

import os

import pytest
import torch

from kernel_contract import DenseContract
from mirror import MirroredKernels
from oktopk.kernels import Kernels, ReferenceKernels, choose
from oktopk.kernels.staged import StagedKernels
from test_device_groups import check_a_killed_rank_is_named, check_sums_of_a_host

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a GPU, and kernels that are compiled for it: make gpu-check", allow_module_level=True)

GPU = torch.device("cuda", 0)


class TestKernelsOfACard(DenseContract):
    """Those that serve it."""

    @pytest.fixture
    def kernels(self) -> Kernels:
        return MirroredKernels(choose(GPU).kernels, GPU)


class TestPlainTorchOnACard(DenseContract):
    """Those that serve it when others do not."""

    thrift = 5

    @pytest.fixture
    def kernels(self) -> Kernels:
        return MirroredKernels(StagedKernels(GPU, ReferenceKernels()), GPU)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestTwoCardsOfAHost:
    """Their ranks sum over NCCL."""

    def test_means_are_those_of_the_cpu_but_for_rounding(self) -> None:
        check_sums_of_a_host("cuda")

    def test_a_rank_that_is_killed_is_named_in_time(self) -> None:
        check_a_killed_rank_is_named("cuda")
