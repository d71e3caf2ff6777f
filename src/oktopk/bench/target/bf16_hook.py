"""Torch's bfloat16 hook for Gloo. DDP refuses it by its name without NCCL, though Gloo adds such numbers too.

This module must not postpone its annotations: torch looks at the real ones of a hook.
"""

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


def bf16_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What `bf16_compress_hook` does, over the default group."""
    done: torch.futures.Future[torch.Tensor] = bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
    return done
