"""Loops that `linking` must refuse to make."""

from typing import Any

import numpy as np

from oktopk.kernels.compiling import jit


@jit
def allocate(values: Any) -> Any:
    return np.zeros(values.size).sum() + np.ones(values.size * 2)[values.size]
