"""What a rank of a test world needs, imported once in the server that ranks are forked from."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not survive the fork

import torch
import torch.distributed
import torch.nn.parallel

import oktopk
from oktopk.kernels import choose

torch.set_num_threads(1)
_kernels = choose(torch.device("cpu")).kernels
_kernels.accumulate_(torch.zeros(4096), torch.ones(4096))
_kernels.select_topk(torch.randn(4096), 40)
oktopk.sparse_allreduce  # noqa: B018 - the package with everything below it
