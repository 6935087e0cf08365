"""What an index outside the database is asked for; whoever keeps one implements `VectorIndex`."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from llama_index_memory_tiers.storage.index.rows import Array
from llama_index_memory_tiers.storage.index.search import IndexQuery
from llama_index_memory_tiers.storage.index.sought import Sought


@dataclass(frozen=True, slots=True)
class Space:
    """One collection: all owners' records with the vectors of one model.

    Args:
        name: Of the collection.
        dimensions: Size of its embeddings; 0 without any.
    """

    name: str
    dimensions: int

    @classmethod
    def of(cls, prefix: str, model: str, dimensions: int) -> Space:
        """The collection for a storage's tables and a model, '' for none."""
        number = zlib.crc32(model.encode("utf-8", "surrogatepass"))
        return cls(f"{prefix}-{number:08x}-{dimensions}", dimensions)

    @classmethod
    def named(cls, name: str) -> Space:
        """The collection of a name that `of` made."""
        return cls(name, int(name.rpartition("-")[2]))


@dataclass(frozen=True, slots=True)
class Point:
    """A live record as an index keeps it: what it is found by and filtered by, and no text.

    Args:
        id: See `point_id`.
        record: Row id of the record.
        owner: Whose.
        kind: Kind of record.
        block: Key of the block that wrote it.
        said_at: When it was said, epoch seconds.
        expires_at: From when on it is invisible, epoch seconds, or `None`.
        sid: Session row of the message, or `None`.
        seq: Position in that session, or `None`.
        speaker: Who said it, or "".
        terms: Number of a term → times it occurs.
        vector: Unit length, shape (dimensions,), or `None`.
    """

    id: str
    record: int
    owner: str
    kind: str
    block: str
    said_at: float
    expires_at: float | None
    sid: int | None
    seq: int | None
    speaker: str
    terms: Mapping[int, int]
    vector: Array | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A question as an index is asked it.

    Args:
        query: With its filters.
        terms: What to look for, by its numbers.
        vector: The question's direction without what all vectors of the owner share, or `None`.
        limit: At most so many candidates per leg.
    """

    query: IndexQuery
    terms: tuple[Sought, ...]
    vector: Array | None
    limit: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """What an index knows: where to look, and what makes scores comparable. SQL decides what is so.

    Args:
        records: Row ids.
        rows: How many visible records the owner has.
        found: Numbers of terms that count as one → how many of them hold one of these.
        speakers: Who is heard in them.
        lowest: Lowest product with `Wanted.vector` among those that pass the filters, or `None`.
    """

    records: frozenset[int]
    rows: int
    found: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    speakers: tuple[str, ...] = ()
    lowest: float | None = None


@runtime_checkable
class VectorIndex(Protocol):
    """An index outside the database: a projection that may be missing, old or wrong at any time.

    Writing the same twice is the same as once. Every method may raise whatever its server raises; the database answers
    in its place then.
    """

    async def prepare(self, space: Space) -> None:
        """Make the collection if there is none."""
        ...

    async def put(self, space: Space, points: Sequence[Point]) -> None:
        """Write points over those with the same ids."""
        ...

    async def drop(self, space: Space, ids: Sequence[str]) -> None:
        """Delete points by id; unknown ones are no error."""
        ...

    async def held(self, space: Space, owner: str, after: str | None) -> tuple[list[str], str | None]:
        """Ids of an owner's points, a page of them, and where the next page begins."""
        ...

    async def candidates(self, space: Space, owner: str, wanted: Wanted) -> Candidates:
        """Records of this owner, and of nobody else, that may answer a question."""
        ...


def point_id(uid: str) -> str:
    """Id of a record's point: the same whenever and wherever it is made from the record's public id."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"memory-tiers/{uid}"))
