"""The owner indexes in RAM: unpacked, brought up to date by the owner's revision, and packed again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.copies import many_objects
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.index import (
    IndexCache,
    IndexColumns,
    OwnerIndex,
)
from llama_index_memory_tiers.storage.packs import Pack, PackStore
from llama_index_memory_tiers.storage.record_rows import indexed
from llama_index_memory_tiers.storage.schema import Tables

_logger = logging.getLogger(__name__)

_PAGE_ROWS = 4000
# Beyond this an index is brought up to date in a thread.
_THREAD_ROWS = 500
# An index is packed when so many rows of it, and a quarter of all, were read one by one.
_PACKED_ROWS = 2000
_LAST_ID = 2**63 - 1


class OwnerIndexes:
    """One index per owner and embedding model, as new as the database.

    Args:
        database: Where.
        tables: The tables.
        cache: Those kept in RAM.
        packs: The same on disk.
    """

    def __init__(self, database: Database, tables: Tables, cache: IndexCache, packs: PackStore) -> None:
        self._database = database
        self._tables = tables
        self._cache = cache
        self._packs = packs
        self._packing: set[asyncio.Task[None]] = set()
        self._catch_up = self._catch_up_query()

    def drop(self, owners: Collection[str]) -> None:
        """Let the indexes of owners go."""
        for key in self._cache.held():
            if isinstance(key, tuple) and key[0] in owners:
                self._cache.drop(key)

    def held(self, owners: Collection[str]) -> int:
        """How many indexes of these owners are held."""
        return sum(isinstance(key, tuple) and key[0] in owners for key in self._cache.held())

    def known(self, owner: str, model: str) -> OwnerIndex | None:
        """The index as it was last used, if it is held."""
        return self._cache.get((owner, model))

    async def up_to_date(self, owner: str, model: str) -> OwnerIndex:
        """The index of one owner with all that is committed.

        Args:
            owner: Whose.
            model: Name of the embedding model whose vectors count; '' for none.

        Returns:
            The index; shared, to be searched only.
        """
        key = (owner, model)
        index = self._cache.get(key)
        if index is None:  # an empty one is not missing
            index = await self._unpacked(owner, model)
        caught_up = await self._caught_up(index, owner, model)
        if caught_up is None:
            return OwnerIndex()  # nothing was ever learnt about this owner
        index, fresh = caught_up
        self._cache.put(key, index)
        failpoints.reach("index.updated")
        if fresh >= max(_PACKED_ROWS, len(index) // 4):
            self._pack_soon(index, owner, model)
        return index

    async def _unpacked(self, owner: str, model: str) -> OwnerIndex:
        pack = await self._packs.read(owner, model)
        if pack is not None:
            try:
                return await asyncio.to_thread(OwnerIndex.unpacked, pack.epoch, pack.rev, pack.body)
            except ValueError:
                _logger.error("damaged pack skipped", extra={"rev": pack.rev})  # noqa: TRY400  # nothing to trace
        return OwnerIndex()

    async def _caught_up(self, index: OwnerIndex, owner: str, model: str) -> tuple[OwnerIndex, int] | None:
        """Take in what has changed; the index, a new one when the owner was forgotten, and the number of rows."""
        epoch = index.epoch if index.rev else None
        after = {"rev": index.rev, "id": _LAST_ID}
        found: list[Any] = []
        while True:
            rows = await self._page({"owner": owner, "model": model, "limit": _PAGE_ROWS, **after})
            if not rows:
                return None
            if epoch not in (None, rows[0].owner_epoch):
                # Forgotten: load anew.
                index, epoch, after, found = OwnerIndex(), None, {"rev": 0, "id": _LAST_ID}, []
                continue
            index.epoch = epoch = rows[0].owner_epoch
            page = [row for row in rows if row.id is not None]
            found += page
            if len(page) < _PAGE_ROWS:
                break
            after = {"rev": page[-1].rev, "id": page[-1].id}
        failpoints.reach("index.read")
        if len(found) > _THREAD_ROWS:
            await asyncio.to_thread(_take_in, index, found)
        elif found:
            _take_in(index, found)
        # The last statement saw every change up to the revision that it read with them.
        index.rev = max(index.rev, rows[0].owner_rev)
        return index, len(found)

    def _pack_soon(self, index: OwnerIndex, owner: str, model: str) -> None:
        async def work() -> None:
            packed = await asyncio.to_thread(index.packed)
            await self._packs.write(owner, model, Pack(*packed))

        task = asyncio.get_running_loop().create_task(work())
        self._packing.add(task)
        task.add_done_callback(self._packing.discard)

    async def settle(self) -> None:
        """Wait until what is being packed on this loop is kept."""
        here = asyncio.get_running_loop()
        mine = [task for task in self._packing if task.get_loop() is here]
        await asyncio.gather(*mine, return_exceptions=True)

    async def _page(self, values: Mapping[str, Any]) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            found = await connection.execute(self._catch_up, dict(values))
            with many_objects():
                return found.all()

        return await self._database.read(work)

    def _catch_up_query(self) -> Any:
        s = self._tables
        o, r, e, t = s.owners, s.records, s.embeddings, s.terms
        newer = and_(r.c.rev >= bindparam("rev"), or_(r.c.rev > bindparam("rev"), r.c.id > bindparam("id")))
        return (
            select(
                o.c.epoch.label("owner_epoch"), o.c.rev.label("owner_rev"),
                r.c.id, r.c.rev, r.c.kind, r.c.block, r.c.superseded_by, r.c.archived_at,
                r.c.said_at, r.c.created_at, r.c.expires_at, r.c.sid, r.c.seq, r.c.speaker, r.c.tokens,
                e.c.vec, t.c.ids, t.c.counts,
            )
            .select_from(
                o.outerjoin(r, and_(r.c.owner == o.c.owner, newer, indexed(r)))
                .outerjoin(e, and_(e.c.record_id == r.c.id, e.c.model == bindparam("model")))
                .outerjoin(t, t.c.record_id == r.c.id)
            )
            .where(o.c.owner == bindparam("owner"))
            .order_by(r.c.rev, r.c.id)
            .limit(bindparam("limit"))
        )  # fmt: skip


def _take_in(index: OwnerIndex, rows: Sequence[Any]) -> None:
    with many_objects():
        index.take(index_columns(rows))


def index_columns(rows: Sequence[Any]) -> IndexColumns:
    """Rows of the catch-up statement, in the order of its columns, as the index wants them."""
    (
        _, _, ids, revs, kinds, blocks, superseded, archived, said, created, expires, sids, seqs, speakers, tokens,
        *projections,
    ) = zip(*rows, strict=True)  # fmt: skip
    # Column by column: a loop over 10 000 rows takes twice the time.
    vectors, terms, counts = zip(*map(_projections, ids, *projections), strict=True)
    return {
        "id": ids,
        "rev": revs,
        "kind": kinds,
        "block": blocks,
        "live": [by is None and at is None for by, at in zip(superseded, archived, strict=True)],
        "said_at": [(at if when is None else when) / 1e6 for when, at in zip(said, created, strict=True)],
        "expires_at": [None if when is None else when / 1e6 for when in expires],
        "sid": sids,
        "seq": seqs,
        "speaker": speakers,
        "tokens": tokens,
        "vector": vectors,
        "terms": terms,
        "counts": counts,
    }


def _projections(
    record: int, vector: bytes | None, terms: bytes | None, counts: bytes | None
) -> tuple[bytes | None, bytes, bytes]:
    """What the record is found by; a damaged part is left out, as the text is still there."""
    if vector is not None and (not vector or len(vector) % 2):
        _logger.error("damaged embedding skipped", extra={"record": record})
        vector = None
    if terms is None or counts is None:
        return vector, b"", b""
    if len(terms) % 4 or len(terms) != 2 * len(counts):
        _logger.error("damaged terms skipped", extra={"record": record})
        return vector, b"", b""
    return vector, terms, counts
