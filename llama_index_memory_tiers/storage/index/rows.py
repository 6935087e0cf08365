"""Rows as the index takes them from SQL, and how what a record is found by is written as bytes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama_index_memory_tiers.errors import EmbeddingError

Array = NDArray[Any]


class IndexRow(NamedTuple):
    """One record as read from SQL; a tuple, as an owner may have 100 000 of them.

    Args:
        id: Row id; ties are decided by it.
        rev: The owner's revision that wrote this state; a lower one than seen before is ignored.
        kind: Kind of record.
        block: Key of the block that wrote it.
        live: False removes the record.
        said_at: When it was said, epoch seconds.
        expires_at: From when on it is invisible, epoch seconds.
        sid: Session row of the message, or `None`.
        seq: Position in that session, or `None`.
        speaker: Who said it, or "".
        tokens: Size when shown.
        vector: See `encode_vector`, or `None`.
        terms: See `encode_terms`.
        counts: See `encode_terms`.
    """

    id: int
    rev: int
    kind: str
    block: str
    live: bool
    said_at: float | None
    expires_at: float | None
    sid: int | None
    seq: int | None
    speaker: str
    tokens: int
    vector: bytes | None
    terms: bytes
    counts: bytes


IndexColumns = Mapping[str, Sequence[Any]]
"""The fields of `IndexRow` by name, each with one value per row: 100 000 tuples less to make."""


def encode_terms(terms: Mapping[str, int]) -> tuple[bytes, bytes]:
    """Make terms storable.

    Args:
        terms: Term → times it occurs.

    Returns:
        CRC-32 of each term, ascending, as little-endian uint32, and its counts as uint16. Among 50 000 terms of one
        owner 0.3 pairs share a number.
    """
    counts: dict[int, int] = {}
    for term, count in terms.items():
        if count > 0:
            number = term_number(term)
            counts[number] = counts.get(number, 0) + count
    order = sorted(counts)
    amounts = [min(counts[number], 0xFFFF) for number in order]
    return np.array(order, "<u4").tobytes(), np.array(amounts, "<u2").tobytes()


def term_number(term: str) -> int:
    """CRC-32 of a term, by which it is stored."""
    return zlib.crc32(term.encode("utf-8", "surrogatepass"))


def unit(vector: Sequence[float] | Array) -> Array:
    """Direction of a vector, shape (dimensions,), in double precision; raises as `encode_vector` does."""
    values = np.asarray(vector, dtype=np.float64)
    length = np.abs(values).max(initial=0) if values.ndim == 1 else 0
    if not np.isfinite(length) or length == 0:
        raise EmbeddingError(
            f"An embedding of shape {values.shape} with largest component {length} was given.",
            allowed="An embedding is one row of finite numbers that are not all zero.",
            remedy="Check the embedding model; texts it cannot embed may be stored without a vector.",
        )
    values = values / length  # first, so that squares neither overflow nor vanish
    direction: Array = values / np.linalg.norm(values)
    return direction


def encode_vector(vector: Sequence[float]) -> bytes:
    """Make an embedding storable.

    Args:
        vector: Shape (dimensions,).

    Returns:
        Its direction, unit length, as little-endian float16.

    Raises:
        EmbeddingError: It is empty, zero, or not finite.
    """
    return unit(vector).astype("<f2").tobytes()
