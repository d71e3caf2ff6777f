"""`python tests/first_use.py`: what importing the library and reducing a first gradient add to a process with torch."""

import sys
from time import process_time

import torch
import torch.distributed
import torch.nn.parallel


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def main(wire: str) -> None:
    x = torch.randn(100_000)
    began, before = process_time(), resident_megabytes()
    import oktopk

    with oktopk.Reducer(density=0.01, wire=wire) as reducer:
        for _ in range(2):
            reducer.reduce("w", x)
    print(
        f"{process_time() - began:.2f} s of CPU, {resident_megabytes() - before:.0f} MB, numba {'numba' in sys.modules}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:] or ["float32"])
