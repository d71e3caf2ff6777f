"""What a rank has reduced of its part, as a message to the ranks of its host.

Numbers lie in it as they are: inside a host bytes cost less than coding them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oktopk.kernels.staging import to_device, to_host
from oktopk.types import Reduced, SparseVector, Vector

_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_NOTHING, _THE_SAME = -1, -2  # instead of a dtype: there is no such tensor, or it is that of the mean
_FIELDS = 4  # indices and values of the mean, and of what was sent
_WORD = 8  # bytes; every tensor begins on a word


def pack_outcome(reduced: Reduced, room: Callable[[Sequence[int]], Sequence[Tensor]]) -> Tensor:
    """A message (uint8), in memory that `room` gives for such sizes."""
    fields = [*_fields(reduced.mean), *_fields(reduced.sent)]
    kinds = [_kind(field) for field in fields]
    if fields[2] is not None and fields[2] is fields[0]:
        fields[2], kinds[2] = None, _THE_SAME
    given = [torch.empty(0) if field is None else field for field in fields]
    header = [word for kind, field in zip(kinds, given, strict=True) for word in (kind, field.numel())]
    sections = [torch.tensor(header, dtype=torch.int64), *to_host(*given)]
    places = _places([section.numel() * section.element_size() for section in sections])
    (message,) = room([places[-1][1]])
    for section, (start, end) in zip(sections, places, strict=True):
        message[start:end] = section.contiguous().view(torch.uint8)
    return message


def unpack_outcome(message: Tensor, numel: int, device: torch.device) -> Reduced:
    """The inverse of `pack_outcome`, of a vector on `device`; it may lie in the memory of the message."""
    header = message[: 2 * _FIELDS * _WORD].view(torch.int64).tolist()
    kinds, counts = header[::2], header[1::2]
    dtypes = [_DTYPES[kind] if kind >= 0 else torch.float32 for kind in kinds]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    places = _places([2 * _FIELDS * _WORD, *sizes])[1:]
    fields = [
        message[start:end].view(dtype) if kind >= 0 else None
        for (start, end), kind, dtype in zip(places, kinds, dtypes, strict=True)
    ]
    if kinds[2] == _THE_SAME:
        fields[2] = fields[0]
    mean = _vector(fields[0], fields[1], numel, device)
    assert mean is not None
    return Reduced(mean, _vector(fields[2], fields[3], numel, device))


def _fields(vector: Vector | None) -> list[Tensor | None]:
    if isinstance(vector, SparseVector):
        return [vector.indices, vector.values]
    return [None, vector]


def _vector(indices: Tensor | None, values: Tensor | None, numel: int, device: torch.device) -> Vector | None:
    if values is None:
        return None
    return SparseVector(indices, values, numel) if indices is not None else to_device(device, values)[0]


def _kind(field: Tensor | None) -> int:
    return _NOTHING if field is None else _DTYPES.index(field.dtype)


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each of several sections begins and ends, one after the other."""
    places, start = [], 0
    for size in sizes:
        places.append((start, start + size))
        start += -(-size // _WORD) * _WORD
    return places
