"""Search through an index outside the database: it proposes records, the rows of the database are scored."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.errors import EmbeddingError, StorageError
from llama_index_memory_tiers.events import IndexDegraded, emit
from llama_index_memory_tiers.storage.catch_up import index_columns
from llama_index_memory_tiers.storage.index import Corpus, Hit, IndexQuery, OwnerIndex
from llama_index_memory_tiers.storage.index.rows import Array, unit
from llama_index_memory_tiers.storage.index.seam import Candidates, Space, Wanted
from llama_index_memory_tiers.storage.index.sought import sought
from llama_index_memory_tiers.storage.keeper import IndexKeeper
from llama_index_memory_tiers.storage.marks import Standing

MOST_PENDING = 500
"""With more changes that the index has not been told of, the database answers."""
_FEWEST, _MOST = 64, 256  # candidates per leg
_READ_TERMS = 128
_TIMEOUT_SECONDS = 2.0
_NEAR = 2  # messages on each side that share in a message's BM25
_MOST_CENTRES = 10_000


@dataclass(frozen=True, slots=True)
class _Centre:
    """Sum of an owner's vectors as of a revision, and who is heard in their records."""

    epoch: int
    rev: int
    embedded: int
    total: Array | None
    speakers: tuple[str, ...]


class OutsideSearch:
    """Finds what the owner index finds, while this process holds one vector per owner.

    What differs from the owner index: only the best `_MOST` per leg are scored, with two messages beside each, and
    sessions are judged by these; messages are neighbours when no more than four unrecorded ones lie between; the
    common direction of all vectors may be one hundredth of the records old. With fewer records than that, scores of
    records with evidence of their own are equal.

    Args:
        keeper: Keeps the index in step.
    """

    def __init__(self, keeper: IndexKeeper) -> None:
        self.keeper = keeper
        self._marks = keeper.marks
        self._centres: OrderedDict[tuple[str, str], _Centre] = OrderedDict()

    async def search(self, owner: str, model: str, query: IndexQuery) -> list[Hit] | None:
        """Find candidates among one owner's records, best first.

        Args:
            owner: Whose.
            model: Name of the embedding model whose vectors count; '' for none.
            query: What to look for.

        Returns:
            As `OwnerIndex.search`; `None` when the index does not answer or is far behind: the chat goes on with the
            owner index, and an event says so.
        """
        standing = await self._marks.standing(owner, model)
        if standing is None:
            return []
        if self.keeper.resting:
            return self._degraded(self.keeper.error or "resting")
        if standing.behind:
            self.keeper.soon(owner, model)
        space = Space.named(standing.space) if standing.space else None
        pending = await self._marks.pending(owner, standing.seen_rev, MOST_PENDING + 1)
        if space is None or standing.seen_epoch < 0 or len(pending) > MOST_PENDING:
            return self._degraded("behind", len(pending))
        if query.vector is not None and len(query.vector) != space.dimensions:
            return None  # the owner index knows whose vectors these are, and whether they were embedded again
        try:
            return await self._found(owner, model, query, space, standing, pending)
        except (EmbeddingError, StorageError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever the client raises
            self.keeper.failed(error)
            return self._degraded(type(error).__name__, len(pending))

    def drop(self, owners: Collection[str]) -> None:
        """Let what is held of owners go."""
        for key in [key for key in self._centres if key[0] in owners]:
            self._centres.pop(key, None)

    async def speakers(self, owner: str, model: str) -> tuple[str, ...] | None:
        """Who was heard in an owner's embedded records when they were searched last; `None` as in `search`."""
        known = self._centres.get((owner, model))
        if known is None and not self.keeper.resting:
            standing = await self._marks.standing(owner, model)
            if standing is None:
                return ()
            if standing.space:
                known = await self._centre(owner, model, standing)
        return known.speakers if known is not None and known.embedded else None

    @staticmethod
    def _degraded(error: str, pending: int | None = None) -> list[Hit] | None:
        emit(IndexDegraded(error=error, pending=pending))
        return None

    def soon(self, owner: str) -> None:
        """Tell the index in the background what is new about an owner."""
        self.keeper.soon(owner)

    async def _found(
        self, owner: str, model: str, query: IndexQuery, space: Space, standing: Standing, pending: list[int]
    ) -> list[Hit]:
        centre = await self._centre(owner, model, standing) if query.vector is not None else None
        moved = _moved(query, space, centre)
        terms = sought(query.text, _READ_TERMS)
        wanted = Wanted(query, terms, moved, min(max(query.limit, _FEWEST), _MOST))
        asked = self.keeper.index.candidates(space, owner, wanted)
        proposed = await asyncio.wait_for(asked, _TIMEOUT_SECONDS)
        self.keeper.worked()
        rows = await self._marks.rows(owner, model, sorted(proposed.records | set(pending)))
        beside = await self._marks.around(owner, model, _ranges(rows))
        every = {row.id: row for row in (*rows, *beside)}
        candidates = _with_neighbours({row.id for row in rows}, list(every.values()))
        index = OwnerIndex(dimensions=space.dimensions or None)
        if every:
            index.take(index_columns(list(every.values())))
        return index.search(query, _corpus(candidates, proposed, centre))

    async def _centre(self, owner: str, model: str, standing: Standing) -> _Centre:
        """The sum of the owner's vectors; read again when a hundredth of the records may have changed."""
        key = (owner, model)
        known = self._centres.get(key)
        if known is not None and known.epoch == standing.epoch:
            self._centres.move_to_end(key)
            if standing.rev - known.rev <= known.embedded // 100:
                return known
        dimensions = Space.named(standing.space).dimensions
        after, embedded = 0, 0
        total: Array | None = None
        speakers: dict[str, None] = {}
        while page := await self._marks.vectors(owner, model, after):
            after = page[-1].id
            speakers.update(dict.fromkeys(row.speaker for row in page if row.speaker))
            part = [row.vec for row in page if 0 < len(row.vec) == 2 * dimensions]  # not damaged
            if part:
                vectors = np.frombuffer(b"".join(part), "<f2").reshape(len(part), -1).astype(np.float32)
                summed = vectors.sum(axis=0, dtype=np.float32).astype(np.float64)
                total = summed if total is None else total + summed
                embedded += len(part)
        made = self._centres[key] = _Centre(standing.epoch, standing.rev, embedded, total, tuple(speakers))
        while len(self._centres) > _MOST_CENTRES:
            self._centres.popitem(last=False)
        return made


def _moved(query: IndexQuery, space: Space, centre: _Centre | None) -> Array | None:
    if query.vector is None or not space.dimensions:
        return None
    vector = unit(query.vector).astype(np.float32)
    if centre is None or centre.total is None or len(centre.total) != vector.size:
        return vector
    return scoring.off_centre(vector, centre.total, centre.embedded).astype(np.float32)


def _corpus(candidates: frozenset[int], proposed: Candidates, centre: _Centre | None) -> Corpus:
    return Corpus(
        candidates=candidates,
        rows=proposed.rows,
        found=proposed.found,
        speakers=proposed.speakers,
        embedded=0 if centre is None else centre.embedded,
        total=None if centre is None else centre.total,
        lowest=float("inf") if proposed.lowest is None else proposed.lowest,
    )


def _ranges(rows: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Ranges of sessions in which the neighbours' neighbours of messages lie, those that touch as one."""
    reach = 2 * _NEAR + 4
    found: list[tuple[int, int, int]] = []
    for sid, seq in sorted((row.sid, row.seq) for row in rows if row.sid is not None and row.seq is not None):
        if found and found[-1][0] == sid and found[-1][2] >= seq - reach - 1:
            found[-1] = (sid, found[-1][1], seq + reach)
        else:
            found.append((sid, seq - reach, seq + reach))
    return found


def _with_neighbours(proposed: set[int], rows: Sequence[Any]) -> frozenset[int]:
    """Candidates and the messages beside them, whose BM25 they share in."""
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        live = row.superseded_by is None and row.archived_at is None
        if live and row.sid is not None and row.seq is not None:
            lines.setdefault((row.sid, row.kind, row.block), []).append(row)
    found = set(proposed)
    for line in lines.values():
        line.sort(key=lambda row: (row.seq, row.id))
        for at, row in enumerate(line):
            if row.id in proposed:
                found |= {beside.id for beside in line[max(0, at - _NEAR) : at + _NEAR + 1]}
    return frozenset(found)
