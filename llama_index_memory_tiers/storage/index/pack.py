"""A table as one piece of bytes: read back ten times as fast as row by row."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np

from llama_index_memory_tiers.storage.index.rows import Array
from llama_index_memory_tiers.storage.index.table import TableState

FORMAT = 1
_HEAD = struct.Struct("<4sHIQ")  # magic, format, CRC-32 of what follows, bytes of the description
_MAGIC = b"LMTP"
_ALIGNMENT = 8


def pack(state: TableState) -> bytes:
    """Write a table.

    Args:
        state: From `OwnerTable.state`.

    Returns:
        Head, description as JSON, arrays; little-endian.
    """
    arrays = {**state.arrays, "vectors": state.vectors}
    described = {
        "names": state.names,
        "arrays": {name: (array.dtype.newbyteorder("<").str, array.shape) for name, array in arrays.items()},
    }
    about = json.dumps(described).encode()
    parts = [about, b"\0" * (-(_HEAD.size + len(about)) % _ALIGNMENT)]
    for array in arrays.values():
        body = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        parts += [body, b"\0" * (-len(body) % _ALIGNMENT)]
    rest = b"".join(parts)
    return _HEAD.pack(_MAGIC, FORMAT, zlib.crc32(rest), len(about)) + rest


def unpack(body: bytes) -> TableState:
    """Read a table.

    Args:
        body: From `pack`.

    Returns:
        Its state; the arrays are views of `body` and cannot be written to.

    Raises:
        ValueError: It is damaged, or of another format.
    """
    try:
        magic, version, checksum, length = _HEAD.unpack_from(body)
    except struct.error as error:
        raise ValueError from error
    if magic != _MAGIC or version != FORMAT or zlib.crc32(memoryview(body)[_HEAD.size :]) != checksum:
        raise ValueError
    described = json.loads(body[_HEAD.size : _HEAD.size + length])
    at = _HEAD.size + length
    at += -at % _ALIGNMENT
    arrays: dict[str, Array] = {}
    for name, (kind, shape) in described["arrays"].items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        size = count * arrays[name].itemsize
        at += size + -size % _ALIGNMENT
    vectors = arrays.pop("vectors")
    return TableState(described["names"], arrays, vectors)
