"""Owners and their records: merges, catch-up of the index, and recall of texts."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import and_, bindparam, delete, func, insert, or_, select, union, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.copies import many_objects
from llama_index_memory_tiers.errors import embedding_mismatch
from llama_index_memory_tiers.events import EmbeddingMismatch, emit
from llama_index_memory_tiers.records import (
    Changes,
    NewRecord,
    Place,
    Reads,
    Record,
    Scope,
    StoredMessage,
    nothing,
)
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.index import (
    Hit,
    IndexCache,
    IndexColumns,
    IndexQuery,
    OwnerIndex,
    encode_terms,
    encode_vector,
)
from llama_index_memory_tiers.storage.made import Made, Take
from llama_index_memory_tiers.storage.packs import Pack, PackStore
from llama_index_memory_tiers.storage.parts import SHARED, PartReader, Vector, Visits
from llama_index_memory_tiers.storage.record_rows import owned, readable
from llama_index_memory_tiers.storage.rows import GONE, chunks, decode_rows, storable_ids
from llama_index_memory_tiers.storage.schema import UNFINISHED, Tables, owner_touch

_logger = logging.getLogger(__name__)

# Rows of a catch-up per statement: keeps the loop free, as 4 000 rows take about 10 ms to fetch.
_PAGE_ROWS = 4000
# Beyond this an index is brought up to date in a thread.
_THREAD_ROWS = 500
# An index is packed when so many rows of it, and a quarter of all, were read one by one.
_PACKED_ROWS = 2000
_LAST_ID = 2**63 - 1

Fence = Callable[[AsyncConnection], Awaitable[bool]]
Merge = Callable[[Sequence[Record]], Changes]


class Outside(Protocol):
    """An index outside the database; see `OutsideSearch`."""

    async def search(self, owner: str, model: str, query: IndexQuery) -> list[Hit] | None:
        """Candidates, or `None` when the owner index is to answer."""
        ...

    def soon(self, owner: str) -> None:
        """Something about this owner has changed."""
        ...


class _RolledBackError(Exception):
    """Leaves a transaction without a trace."""


def owner_key(scope: Scope, sid: int, *, per_session: bool = False) -> str:
    """Name the owner of what is learnt in a session.

    Args:
        scope: Whose session.
        sid: Its private row.
        per_session: Keep it to this session even though there is a user.

    Returns:
        `u:<user>` or `s:<session row>`; equal text means equal owner, character by character.
    """
    return f"u:{scope.user_id}" if scope.user_id is not None and not per_session else f"s:{sid}"


def agent_key(agent_id: str) -> str:
    """Name the owner of what an agent may tell all its users: `a:<agent>`."""
    return f"a:{agent_id}"


@dataclass(frozen=True, slots=True)
class RecalledMessage:
    """A message that recall found, with what the index and its record know about it."""

    record_id: str
    message: StoredMessage
    hit: Hit
    data: Mapping[str, Any] = field(default_factory=nothing)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An embedding model as its vectors show it: name and dimensions."""

    model: str
    dimensions: int


class RecordStore:
    """Statements over owners, records and their projections.

    Args:
        database: Where.
        tables: The tables.
        cache: Owner indexes kept in RAM.
        packs: The same on disk.
        now: Clock in microseconds since 1970.
    """

    def __init__(
        self, database: Database, tables: Tables, cache: IndexCache, packs: PackStore, *, now: Callable[[], int]
    ) -> None:
        self._database = database
        self._packs = packs
        self._packing: set[asyncio.Task[None]] = set()
        self._cache = cache
        self.outside: Outside | None = None
        self._now = now
        self._t = tables
        self._r = tables.records
        self._touch = owner_touch(tables)
        self._catch_up = self._catch_up_query()
        r = self._r
        self._live = and_(
            r.c.superseded_by.is_(None),
            r.c.archived_at.is_(None),
            or_(r.c.expires_at.is_(None), r.c.expires_at > bindparam("now")),
        )
        self._prepare_lookups()
        self.parts = PartReader(database, tables, self._live, now)
        self.made = Made(database, tables, self.parts)

    def _prepare_lookups(self) -> None:
        # Made once: making and hashing such a statement takes longer than running it.
        r, m, s = self._r, self._t.messages, self._t.sessions
        mine = and_(owned(r, bindparam("owner")), self._live)
        by_id = and_(r.c.id.in_(bindparam("ids", expanding=True)), mine)
        self._whole = select(r).where(by_id)
        self._hits = select(r.c.uid, r.c.id, r.c.sid, r.c.seq, r.c.tokens, r.c.said_at, r.c.speaker).where(
            r.c.uid.in_(bindparam("ids", expanding=True)), mine
        )
        self._messages = (
            select(
                r.c.id, r.c.uid, r.c.data.label("about"), m.c.sid, s.c.session_id,
                m.c.seq, m.c.uid, m.c.status, m.c.tokens, m.c.counter, m.c.created_at, m.c.data, m.c.meta,
            )
            .select_from(r.join(m, and_(m.c.sid == r.c.sid, m.c.seq == r.c.seq)).join(s, s.c.sid == m.c.sid))
            .where(by_id, m.c.status != GONE)
        )  # fmt: skip

    def drop_cached(self, owners: Collection[str]) -> None:
        """Let the indexes of owners go, and what blocks made of their records."""
        for key in self._cache.held():
            if isinstance(key, tuple) and key[0] in owners:
                self._cache.drop(key)
        self.made.drop(owners)

    def cached(self, owners: Collection[str]) -> int:
        """How many indexes of these owners are held, and other things that were made of their records."""
        held = sum(isinstance(key, tuple) and key[0] in owners for key in self._cache.held())
        return held + self.made.count(owners)

    def now(self) -> int:
        """The clock in microseconds since 1970."""
        return self._now()

    async def epoch(self, owner: str) -> int:
        """The owner's epoch: only a deletion raises it. 0 for an owner that has nothing yet."""
        o = self._t.owners

        async def work(connection: AsyncConnection) -> int:
            found = (await connection.execute(select(o.c.epoch).where(o.c.owner == owner))).scalar()
            return int(found or 0)

        return await self._database.read(work)

    # -- writing ---------------------------------------------------------------------------------------------

    async def commit(
        self, owner: str, block: str, *, epoch: int, fence: Fence, reads: Reads, merge: Merge
    ) -> Changes | None:
        """Merge what a block prepared, in the one transaction that also moves its cursor.

        Args:
            owner: Whose records change; its row is locked first, so that merges of one owner follow each other.
            block: Key of the block.
            epoch: The owner's epoch when the batch was read.
            fence: Moves the cursor; says whether this attempt was still the one to do so.
            reads: What `merge` is to be given.
            merge: Pure: records as they are now → changes. It may be called again when the database asks for it.

        Returns:
            What was written, or `None` when the owner was forgotten meanwhile or another worker was faster;
            then nothing was written.
        """

        async def work(connection: AsyncConnection) -> Changes:
            now_epoch, rev = (await connection.execute(self._touch, {"owner": owner, "raise_epoch": 0})).one()
            if now_epoch != epoch or not await fence(connection):
                raise _RolledBackError
            failpoints.reach("merge.fenced")
            changes = merge(await self._read_for_merge(connection, owner, block, reads))
            await self._write(connection, owner, block, rev, changes)
            failpoints.reach("merge.written")
            return changes

        try:
            changes = await self._database.write(work)
        except _RolledBackError:
            return None
        failpoints.reach("merge.committed")
        self._tell(owner)
        return changes

    def _tell(self, owner: str) -> None:
        if self.outside is not None:
            self.outside.soon(owner)

    async def change(self, owner: str, block: str, *, reads: Reads, merge: Merge) -> Changes:
        """Change an owner's records by hand: what no message of the log made.

        Args:
            owner: Whose; its row is locked first, as in `commit`.
            block: Key of the block.
            reads: What `merge` is to be given.
            merge: Pure: records as they are now → changes. It may be called again when the database asks for it.

        Returns:
            What was written.
        """

        async def work(connection: AsyncConnection) -> Changes:
            rev = (await connection.execute(self._touch, {"owner": owner, "raise_epoch": 0})).one()[1]
            changes = merge(await self._read_for_merge(connection, owner, block, reads))
            await self._write(connection, owner, block, rev, changes)
            return changes

        written = await self._database.write(work)
        self._tell(owner)
        return written

    async def _read_for_merge(self, connection: AsyncConnection, owner: str, block: str, reads: Reads) -> list[Record]:
        r = self._r
        if not reads.kinds and not reads.ids:
            return []
        own = and_(r.c.owner == owner, r.c.kind.in_(reads.kinds), r.c.block == block)
        # Each way in alone: SQLite reads all rows of the owner to answer both at once.
        wanted = union(
            select(r.c.id).where(own if reads.past else and_(own, self._live)),
            select(r.c.id).where(r.c.uid.in_(storable_ids(reads.ids)), owned(r, owner)),
        )
        return await self._records(
            connection,
            select(r).where(r.c.id.in_(wanted)).order_by(r.c.id),
            {} if reads.past else {"now": self._now()},
        )

    async def _records(self, connection: AsyncConnection, query: Any, values: Mapping[str, Any]) -> list[Record]:
        rows = (await connection.execute(query, values)).all()
        places = await self._sources(connection, [row.id for row in rows])
        return list(readable(rows, places).values())

    async def _sources(self, connection: AsyncConnection, ids: Sequence[int]) -> dict[int, tuple[Place, ...]]:
        s = self._t.sources
        found: dict[int, tuple[Place, ...]] = {}
        for part in chunks(ids):
            rows = await connection.execute(
                select(s.c.record_id, s.c.sid, s.c.seq).where(s.c.record_id.in_(part)).order_by(s.c.sid, s.c.seq)
            )
            for row in rows:
                found[row.record_id] = (*found.get(row.record_id, ()), (row.sid, row.seq))
        return found

    async def _write(self, connection: AsyncConnection, owner: str, block: str, rev: int, changes: Changes) -> None:
        r = self._r
        now = self._now()
        if changes.add:  # first, as what is new may be superseded or put aside at once
            await self._add(connection, owner, block, rev, changes.add, now)
        for old, new in changes.supersede.items():
            await connection.execute(
                update(r).where(r.c.uid == old, r.c.owner == owner).values(superseded_by=new, rev=rev)
            )
        for ids, archived_at in ((changes.archive, now), (changes.restore, None)):
            for part in chunks(ids):
                await connection.execute(
                    update(r).where(r.c.uid.in_(part), owned(r, owner)).values(archived_at=archived_at, rev=rev)
                )
        for record in changes.revise:
            await self._revise(connection, owner, record, rev)
        for uid, amendment in changes.amend.items():
            amended = {
                "data": codec.to_json(dict(amendment.data)),
                "expires_at": _microseconds(amendment.expires_at),
                "rev": rev,
            }
            await connection.execute(update(r).where(r.c.uid == uid, r.c.owner == owner).values(amended))
        grants = [
            _row_of(_grant(uid), agent_key(agent), block, rev, now)
            for agent, ids in changes.share.items()
            for uid in ids
        ]
        if grants:
            await connection.execute(insert(r), grants)

    async def _revise(self, connection: AsyncConnection, owner: str, record: NewRecord, rev: int) -> None:
        r, t = self._r, self._t
        values = _contents(record) | {"kind": record.kind, "rev": rev}
        revised = update(r).where(r.c.uid == record.id, r.c.owner == owner).values(values).returning(r.c.id)
        number = (await connection.execute(revised)).scalar()
        if number is None:
            return  # forgotten meanwhile
        known = (await self._sources(connection, [number])).get(number, ())
        for table in (t.embeddings, t.terms):
            await connection.execute(delete(table).where(table.c.record_id == number))
        await self._project(connection, [(number, record)], skip=frozenset(known))

    async def _add(
        self,
        connection: AsyncConnection,
        owner: str,
        block: str,
        rev: int,
        records: Sequence[NewRecord],
        now: int,
    ) -> None:
        await connection.execute(insert(self._r), [_row_of(record, owner, block, rev, now) for record in records])
        found = await connection.execute(
            select(self._r.c.uid, self._r.c.id).where(self._r.c.owner == owner, self._r.c.rev == rev)
        )
        ids = {row.uid: row.id for row in found}
        await self._project(connection, [(ids[record.id], record) for record in records])

    async def _project(
        self,
        connection: AsyncConnection,
        records: Sequence[tuple[int, NewRecord]],
        skip: frozenset[Place] = frozenset(),
    ) -> None:
        """Write what records come from and what they are found by."""
        t = self._t
        sources = [
            {"record_id": number, "sid": sid, "seq": seq}
            for number, record in records
            for sid, seq in dict.fromkeys(record.sources)
            if (sid, seq) not in skip
        ]
        vectors = [
            {"record_id": number, "model": record.model, "vec": encode_vector(record.vector)}
            for number, record in records
            if record.vector is not None
        ]
        terms = []
        for number, record in records:
            if record.terms:
                hashes, counts = encode_terms(record.terms)
                terms.append({"record_id": number, "ids": hashes, "counts": counts})
        for table, rows in ((t.sources, sources), (t.embeddings, vectors), (t.terms, terms)):
            if rows:
                await connection.execute(insert(table), rows)

    # -- reading ---------------------------------------------------------------------------------------------

    async def records(
        self,
        owner: str,
        *,
        kinds: Iterable[str],
        block: str | None = None,
        limit: int | None = None,
        past: bool = False,
    ) -> list[Record]:
        """Live records of one owner, oldest first; with a limit the newest of them.

        Args:
            owner: Whose.
            kinds: Of which kinds.
            block: Written by this block only.
            limit: At most so many.
            past: Also what was superseded, put aside, or has expired.

        Returns:
            The records.
        """
        r = self._r
        query = select(r).where(r.c.owner == owner, r.c.kind.in_(list(kinds)))
        if not past:
            query = query.where(self._live)
        if block is not None:
            query = query.where(r.c.block == block)
        query = query.order_by(r.c.id.desc()).limit(limit)

        async def work(connection: AsyncConnection) -> list[Record]:
            return await self._records(connection, query, {} if past else {"now": self._now()})

        found = await self._database.read(work)
        return found[::-1]

    async def search(self, owner: str, model: str, query: IndexQuery) -> list[Hit]:
        """Find candidates among one owner's records, best first.

        Args:
            owner: Whose; nobody else's rows are near.
            model: Name of the embedding model whose vectors count; '' for none.
            query: What to look for.

        Returns:
            Ids and scores; texts come from `records_of` and `messages_of`.

        Raises:
            EmbeddingMismatchError: The records were embedded with another model.
        """
        return (await self.search_all(owner, model, [query]))[0]

    async def search_all(self, owner: str, model: str, queries: Iterable[IndexQuery]) -> list[list[Hit]]:
        """Several searches of one state of the records, which is looked up once; see `search`."""
        found: list[list[Hit]] = []
        index: OwnerIndex | None = None
        for query in queries:
            hits = None if self.outside is None else await self.outside.search(owner, model, query)
            if hits is None:
                index = await self._up_to_date(owner, model) if index is None else index
                if query.vector is not None and index.embedded < len(index) and not index.compared:
                    await self._compare(index, owner, model, query)
                hits = index.search(query)
            found.append(hits)
        return found

    async def _compare(self, index: OwnerIndex, owner: str, model: str, query: IndexQuery) -> None:
        """Find out at the first question whether records were embedded with another model.

        Raises:
            EmbeddingMismatchError: All that were embedded.
        """
        other = await self.stored_with(owner, blocks=query.blocks, but=model)
        if other is not None:
            size = len(query.vector or ())
            mismatch = embedding_mismatch(
                stored_dimensions=other.dimensions,
                asked_dimensions=size,
                stored_model=other.model,
                asked_model=model,
            )
            _logger.warning("embeddings of another model", extra={"stored": other.model, "asked": model})
            if not index.embedded:
                raise mismatch
            emit(
                EmbeddingMismatch(
                    block=next(iter(query.blocks or ()), ""),
                    error=type(mismatch).__name__,
                    stored_dimensions=other.dimensions,
                    asked_dimensions=size,
                    stored_model=other.model,
                    asked_model=model,
                    remedy=mismatch.remedy,
                )
            )
        index.compared = True

    async def stored_with(
        self, owner: str, *, blocks: frozenset[str] | None = None, but: str | None = None
    ) -> StoredModel | None:
        """The embedding model of an owner's newest embedded record.

        Args:
            owner: Whose.
            blocks: Of these blocks' records, `None` for all.
            but: Look for any other model than this one.

        Returns:
            Name and size, or `None`.
        """
        r, e = self._r, self._t.embeddings
        query = (
            select(e.c.model, func.length(e.c.vec).label("bytes"))
            .join_from(e, r, r.c.id == e.c.record_id)
            .where(r.c.owner == owner, ~e.c.model.startswith(UNFINISHED, autoescape=True))
            .order_by(r.c.rev.desc())
            .limit(1)
        )
        if blocks is not None:
            query = query.where(r.c.block.in_(sorted(blocks)))
        if but is not None:
            query = query.where(e.c.model != but)

        async def work(connection: AsyncConnection) -> StoredModel | None:
            row = (await connection.execute(query)).first()
            return None if row is None else StoredModel(row.model, row.bytes // 2)

        return await self._database.read(work)

    async def _up_to_date(self, owner: str, model: str) -> OwnerIndex:
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
        o, r, e, t = self._t.owners, self._r, self._t.embeddings, self._t.terms
        newer = and_(r.c.rev >= bindparam("rev"), or_(r.c.rev > bindparam("rev"), r.c.id > bindparam("id")))
        return (
            select(
                o.c.epoch.label("owner_epoch"), o.c.rev.label("owner_rev"),
                r.c.id, r.c.rev, r.c.kind, r.c.block, r.c.superseded_by, r.c.archived_at,
                r.c.said_at, r.c.created_at, r.c.expires_at, r.c.sid, r.c.seq, r.c.speaker, r.c.tokens,
                e.c.vec, t.c.ids, t.c.counts,
            )
            .select_from(
                o.outerjoin(r, and_(r.c.owner == o.c.owner, newer))
                .outerjoin(e, and_(e.c.record_id == r.c.id, e.c.model == bindparam("model")))
                .outerjoin(t, t.c.record_id == r.c.id)
            )
            .where(o.c.owner == bindparam("owner"))
            .order_by(r.c.rev, r.c.id)
            .limit(bindparam("limit"))
        )  # fmt: skip

    async def messages_of(self, owner: str, hits: Sequence[Hit]) -> list[RecalledMessage]:
        """Texts of the messages that recall found, in the order of the hits.

        Args:
            owner: Whose; a stale index can neither leak nor resurrect, as SQL decides again.
            hits: From `search`.

        Returns:
            The messages that are still there.
        """
        by_id = {hit.id: hit for hit in hits}
        rows = await self._of(self._messages, owner, list(by_id))
        messages = decode_rows([row[5:] for row in rows], (row[3] for row in rows), (row[4] for row in rows))
        found = {
            row[0]: RecalledMessage(row[1], message, by_id[row[0]], codec.read_json(row[2]))
            for row, message in zip(rows, messages, strict=True)
            if isinstance(message, StoredMessage)  # the log reports damaged rows
        }
        return [found[hit.id] for hit in hits if hit.id in found]

    async def hits_of(self, owner: str, scores: Mapping[str, float]) -> list[Hit]:
        """Candidates that another index found, known by their public ids.

        Args:
            owner: Whose; ids of others are dropped.
            scores: Public id → score.

        Returns:
            Candidates, best first.
        """
        rows = await self._of(self._hits, owner, list(scores))
        hits = [
            Hit(
                id=row.id,
                score=scores[row.uid],
                legs={"store": scores[row.uid]},
                place=None if row.sid is None else (row.sid, row.seq),
                tokens=row.tokens,
                said_at=_seconds(row.said_at),
                speaker=row.speaker,
            )
            for row in rows
        ]
        return sorted(hits, key=lambda hit: (-hit.score, hit.id))

    async def records_of(self, owner: str, hits: Sequence[Hit]) -> list[Record]:
        """The records that recall found, in the order of the hits; those no longer live are missing."""
        found = await self.records_by_hit(owner, hits)
        return [found[hit.id] for hit in hits if hit.id in found]

    async def records_by_hit(self, owner: str, hits: Sequence[Hit]) -> dict[int, Record]:
        """The same by the id of the hit, so that one knows whose score is whose."""
        rows = await self._of(self._whole, owner, [hit.id for hit in hits])

        async def work(connection: AsyncConnection) -> dict[int, tuple[Place, ...]]:
            return await self._sources(connection, [row.id for row in rows])

        return readable(rows, await self._database.read(work)) if rows else {}

    async def _of(self, query: Any, owner: str, values: Sequence[Any]) -> list[Any]:
        """Rows of a prepared query for these ids."""

        async def work(connection: AsyncConnection) -> list[Any]:
            rows: list[Any] = []
            for part in chunks(values):
                asked = {"ids": part, "owner": owner, "now": self._now()}
                rows += (await connection.execute(query, asked)).all()
            return rows

        return await self._database.read(work) if values else []


class OwnerReader:
    """Read-only view of one owner's memories, as blocks are given it.

    Args:
        store: Where.
        owner: Whose.
        block: Key of the block that reads.
    """

    def __init__(self, store: RecordStore, owner: str, block: str) -> None:
        self._store = store
        self.owner = owner
        self._block = block

    async def records(self, *kinds: str, limit: int | None = None, past: bool = False) -> list[Record]:
        """Live records that this block wrote, oldest first; with a limit the newest of them, with `past` all."""
        return await self._store.records(self.owner, kinds=kinds, block=self._block, limit=limit, past=past)

    async def search(self, query: IndexQuery, *, model: str = "") -> list[Hit]:
        """Candidates, best first; see `RecordStore.search`."""
        return await self._store.search(self.owner, model, query)

    async def search_all(self, queries: Iterable[IndexQuery], *, model: str = "") -> list[list[Hit]]:
        """Several searches of one state of the records; see `RecordStore.search_all`."""
        return await self._store.search_all(self.owner, model, queries)

    async def hits_of(self, scores: Mapping[str, float]) -> list[Hit]:
        """Candidates of another index; see `RecordStore.hits_of`."""
        return await self._store.hits_of(self.owner, scores)

    async def messages_of(self, hits: Sequence[Hit]) -> list[RecalledMessage]:
        """Messages behind candidates; see `RecordStore.messages_of`."""
        return await self._store.messages_of(self.owner, hits)

    async def records_of(self, hits: Sequence[Hit]) -> list[Record]:
        """Records behind candidates; see `RecordStore.records_of`."""
        return await self._store.records_of(self.owner, hits)

    async def records_by_hit(self, hits: Sequence[Hit]) -> dict[int, Record]:
        """Records behind candidates by the id of the hit; see `RecordStore.records_by_hit`."""
        return await self._store.records_by_hit(self.owner, hits)

    async def remembered(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """What was made from the owner's records, made anew whenever they have changed.

        Args:
            name: What it is.
            make: Makes it by reading this owner's records only.

        Returns:
            The newest one; shared, so not to be changed by its readers but in ways that all of them may see.
        """
        return await self._store.made.remembered((self.owner, self._block, name), make)

    async def followed(self, name: str, kinds: Sequence[str], take: Take) -> Any:
        """What was made from the owner's records, brought up to date with those that have changed.

        Args:
            name: What it is.
            kinds: The kinds of records that it is made from; none of them may expire.
            take: Gets the value so far, or `None`, and the records that have changed since, those that left among
                them, oldest first and without their sources; answers a new value.

        Returns:
            The newest one; shared, so not to be changed.
        """
        return await self._store.made.followed((self.owner, self._block, name), kinds, take)

    def now(self) -> datetime:
        """The storage's clock."""
        return codec.from_microseconds(self._store.now())

    async def light(self, *kinds: str) -> list[Record]:
        """Live records that this block wrote, oldest first, without their sources."""
        return await self._store.parts.of_kinds(self.owner, self._block, kinds)

    async def history(self, *kinds: str) -> list[Record]:
        """All records that this block wrote, superseded and put aside ones too, oldest first, without their sources."""
        return await self._store.parts.of_kinds(self.owner, self._block, kinds, live=False)

    async def by_ids(self, ids: Sequence[str]) -> list[Record]:
        """Records of this owner, whatever became of them, with their sources."""
        return await self._store.parts.by_ids(self.owner, ids)

    async def parts_of(self, ids: Sequence[str], kind: str) -> list[Record]:
        """Live parts of records, such as the pages of segments, oldest first, without their sources."""
        return await self._store.parts.parts_of(self.owner, ids, kind)

    async def shared(self, agent_id: str, model: str, limit: int) -> list[tuple[Record, Vector | None]]:
        """What an agent may tell of what others taught it: the newest live records of this block, with embeddings."""
        return await self._store.parts.shared(agent_key(agent_id), self.owner, self._block, model, limit)

    async def latest(self, kind: str, sid: int, upto: int) -> Record | None:
        """The record of this block and kind that knows the newest message of a session up to a place."""
        return await self._store.parts.latest(self.owner, self._block, kind, sid, upto)

    async def vectors(self, ids: Sequence[str], model: str) -> dict[str, Any]:
        """Embeddings of records, shape (dimensions,) each; those without one are missing."""
        return await self._store.parts.vectors(self.owner, ids, model)

    async def messages_behind(self, ids: Sequence[str]) -> dict[str, list[StoredMessage]]:
        """The messages that records come from, in the order of the log."""
        return await self._store.parts.messages_behind(self.owner, ids)

    async def visits(self, kind: str) -> dict[str, Visits]:
        """How often records of a kind were shown; those that never were are missing."""
        return await self._store.parts.visits(self.owner, kind)


def _grant(uid: str) -> NewRecord:
    """What lets an agent tell a record: a part of it without a word, so that it is forgotten with it."""
    return NewRecord(str(uuid.uuid5(uuid.NAMESPACE_OID, f"{uid}/shared")), SHARED, parent=uid)


def _row_of(record: NewRecord, owner: str, block: str, rev: int, now: int) -> dict[str, Any]:
    place: Place | tuple[None, None] = record.sources[0] if record.kind == "message" else (None, None)
    return _contents(record) | {
        "uid": record.id,
        "owner": owner,
        "rev": rev,
        "kind": record.kind,
        "block": block,
        "created_at": now,
        "sid": place[0],
        "seq": place[1],
    }


def _contents(record: NewRecord) -> dict[str, Any]:
    return {
        "text": codec.storable(record.text),
        "data": codec.to_json(dict(record.data)),
        "said_at": _microseconds(record.said_at),
        "expires_at": _microseconds(record.expires_at),
        "speaker": codec.storable(record.speaker),
        "tokens": record.tokens,
        "parent": record.parent,
    }


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


def _seconds(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else codec.to_microseconds(time)
