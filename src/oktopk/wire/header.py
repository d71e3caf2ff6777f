"""The fixed head of every message: what follows, and a checksum of itself."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from oktopk.errors import WireError

MAGIC = b"OK"
VERSION = 1
MAX_NUMEL = 2**48

# magic, version, index codec, value codec, index parameter, value parameter, numel, nnz, first, index bytes
_FIELDS = struct.Struct("<2sBBBBhQQQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


@dataclass(frozen=True)
class Header:
    """What a message holds. Field by field in docs/wire-format.md."""

    index_codec: int
    value_codec: int
    index_parameter: int  # Rice: bits of a remainder
    value_parameter: int  # float16: exponent of the scale
    numel: int
    nnz: int
    first: int  # the first index; 0 when there is none
    index_bytes: int

    def to_bytes(self) -> bytes:
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.index_codec, self.value_codec, self.index_parameter, self.value_parameter,
            self.numel, self.nnz, self.first, self.index_bytes,
        )  # fmt: skip
        return fields + _CRC.pack(zlib.crc32(fields))

    @staticmethod
    def from_bytes(message: bytes) -> Header:
        """The header at the start of `message`, which may be longer."""
        if len(message) < HEADER_BYTES:
            raise WireError(
                f"a message starts with {HEADER_BYTES} bytes of header, got {len(message)}: it was truncated."
            )
        magic, version, *fields = _FIELDS.unpack_from(message)
        if magic != MAGIC:
            raise WireError(f"a message starts with {MAGIC!r}, got {magic!r}: these bytes are something else.")
        if version != VERSION:
            raise WireError(f"expected wire version {VERSION}, got {version}: install the same oktopk on every rank.")
        if _CRC.unpack_from(message, _FIELDS.size)[0] != zlib.crc32(message[: _FIELDS.size]):
            raise WireError("the header does not match its checksum: it was damaged on the way.")
        header = Header(*fields)
        header._check()
        return header

    def _check(self) -> None:
        if not self.nnz <= self.numel <= MAX_NUMEL:
            raise WireError(f"expected nnz <= numel <= {MAX_NUMEL}, got nnz {self.nnz} and numel {self.numel}.")
        if self.first + self.nnz > self.numel:
            raise WireError(f"{self.nnz} indices from {self.first} on do not fit into {self.numel} entries.")
