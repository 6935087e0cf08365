"""Records: merged by blocks in one transaction, read again by owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ARRAY, and_, any_, bindparam, or_, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.records import (
    Changes,
    Place,
    Reads,
    Record,
    StoredMessage,
    nothing,
)
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.catch_up import OwnerIndexes
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.index import (
    Hit,
    IndexQuery,
)
from llama_index_memory_tiers.storage.made import Made
from llama_index_memory_tiers.storage.parts import PartReader
from llama_index_memory_tiers.storage.record_rows import owned, readable
from llama_index_memory_tiers.storage.record_writing import RecordWriter
from llama_index_memory_tiers.storage.rows import GONE, chunks, decode_rows, storable_ids
from llama_index_memory_tiers.storage.schema import Tables, owner_touch
from llama_index_memory_tiers.storage.search import OwnerSearch

Fence = Callable[[AsyncConnection], Awaitable[bool]]
Merge = Callable[[Sequence[Record]], Changes]


class _RolledBackError(Exception):
    """Leaves a transaction without a trace."""


@dataclass(frozen=True, slots=True)
class RecalledMessage:
    """A message that recall found, with what the index and its record know about it."""

    record_id: str
    message: StoredMessage
    hit: Hit
    data: Mapping[str, Any] = field(default_factory=nothing)


class RecordStore:
    """Statements over owners, records and their projections.

    Args:
        database: Where.
        tables: The tables.
        indexes: The owner indexes.
        now: Clock in microseconds since 1970.
    """

    def __init__(self, database: Database, tables: Tables, indexes: OwnerIndexes, *, now: Callable[[], int]) -> None:
        self._database = database
        self.indexes = indexes
        self.finder = OwnerSearch(database, tables, indexes)
        self._writer = RecordWriter(tables)
        self._now = now
        self._t = tables
        self._r = tables.records
        self._touch = owner_touch(tables)
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
        by_id = and_(self._among(r.c.id), mine)
        self._whole = select(r).where(by_id)
        self._hits = select(r.c.uid, r.c.id, r.c.sid, r.c.seq, r.c.tokens, r.c.said_at, r.c.speaker).where(
            self._among(r.c.uid), mine
        )
        self._messages = (
            select(
                r.c.id, r.c.uid, r.c.data.label("about"), m.c.sid, s.c.session_id,
                m.c.seq, m.c.uid, m.c.status, m.c.tokens, m.c.counter, m.c.created_at, m.c.data, m.c.meta,
            )
            .select_from(r.join(m, and_(m.c.sid == r.c.sid, m.c.seq == r.c.seq)).join(s, s.c.sid == m.c.sid))
            .where(by_id, m.c.status != GONE)
        )  # fmt: skip

    def _among(self, column: Any) -> Any:
        """Whether a column is one of `ids`."""
        if self._database.sqlite:
            return column.in_(bindparam("ids", expanding=True))
        # One parameter: a list of another length would be another statement, which the server has to be told first.
        return column == any_(bindparam("ids", type_=ARRAY(column.type)))

    def drop_cached(self, owners: Collection[str]) -> None:
        """Let the indexes of owners go, and what blocks made of their records."""
        self.finder.drop(owners)
        self.made.drop(owners)

    def cached(self, owners: Collection[str]) -> int:
        """How many indexes of these owners are held, and other things that were made of their records."""
        return self.indexes.held(owners) + self.made.count(owners)

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
            await self._writer.write(connection, owner, block, rev, changes, now=self._now())
            failpoints.reach("merge.written")
            return changes

        try:
            changes = await self._database.write(work)
        except _RolledBackError:
            return None
        failpoints.reach("merge.committed")
        self.finder.tell(owner)
        return changes

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
            await self._writer.write(connection, owner, block, rev, changes, now=self._now())
            return changes

        written = await self._database.write(work)
        self.finder.tell(owner)
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
        places = await self._writer.sources(connection, [row.id for row in rows])
        return list(readable(rows, places).values())

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
        """Several searches of one state of the records; see `OwnerSearch.search_all`."""
        return await self.finder.search_all(owner, model, queries)

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
        messages = await decode_rows([row[5:] for row in rows], (row[3] for row in rows), (row[4] for row in rows))
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
            return await self._writer.sources(connection, [row.id for row in rows])

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


def _seconds(count: int | None) -> float | None:
    return None if count is None else count / 1e6
