"""The kernel contract on a real GPU: `make gpu-check` runs it, nothing else can."""

from __future__ import annotations

import os

import pytest
import torch

from kernel_contract import DenseContract
from mirror import MirroredKernels
from oktopk.kernels import Kernels, ReferenceKernels, choose
from oktopk.kernels.staged import StagedKernels

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
