"""How far an index outside the database has followed each owner, and what it has yet to be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, bindparam, delete, func, literal, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.record_rows import indexed
from llama_index_memory_tiers.storage.rows import chunks
from llama_index_memory_tiers.storage.schema import UNFINISHED, Tables

PAGE_ROWS = 500


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an owner is, and where the index has got to with one model's vectors.

    Args:
        epoch: The owner's epoch.
        rev: The owner's revision.
        space: Name of the collection that holds the points, '' before the first.
        seen_epoch: Epoch that the index has followed; -1 before the first.
        seen_rev: Everything up to this revision is in the index.
        busy: Who is at it, or was when it died.
    """

    epoch: int
    rev: int
    space: str = ""
    seen_epoch: int = -1
    seen_rev: int = 0
    busy: str | None = None

    @property
    def behind(self) -> bool:
        """Whether the index has yet to be told something."""
        return self.seen_epoch != self.epoch or self.seen_rev < self.rev or self.busy is not None


@dataclass(frozen=True, slots=True)
class IndexState:
    """How an index outside the database stands.

    Args:
        attached: Whether this storage has one.
        pending: Records that it has yet to be told of.
        owners: Owners of whom it has yet to be told something.
        error: Kind of its last failure since it last worked, or `None`.
    """

    attached: bool = False
    pending: int = 0
    owners: int = 0
    error: str | None = None

    @property
    def in_step(self) -> bool:
        """Whether it knows all there is."""
        return self.owners == 0 and self.error is None


class MarkStore:
    """Statements over marks, and over rows as an index is told of them.

    An owner's revision is the queue: what has a higher one than the mark is still to be told. It needs no row per
    change, no second write in a merge, and holds for processes that do not know of the index.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._t = tables
        r, e, t = tables.records, tables.embeddings, tables.terms
        self._indexed = and_(r.c.superseded_by.is_(None), r.c.archived_at.is_(None), indexed(r))
        self._rows = (
            # In the order that `index_columns` wants; the first two stand for the owner's.
            select(
                literal(0), literal(0),
                r.c.id, r.c.rev, r.c.kind, r.c.block, r.c.superseded_by, r.c.archived_at,
                r.c.said_at, r.c.created_at, r.c.expires_at, r.c.sid, r.c.seq, r.c.speaker, r.c.tokens,
                e.c.vec, t.c.ids, t.c.counts,
            )
            .select_from(
                r.outerjoin(e, and_(e.c.record_id == r.c.id, e.c.model == bindparam("model")))
                .outerjoin(t, t.c.record_id == r.c.id)
            )
            .where(func.coalesce(r.c.owner, "") == bindparam("owner"), indexed(r))
        )  # fmt: skip
        marks = ".".join(f'"{part}"' for part in tables.marks.fullname.split("."))
        self._begin = text(
            f"INSERT INTO {marks} (owner, model, space, epoch, rev, busy) "
            "VALUES (:owner, :model, :space, -1, 0, :busy) "
            "ON CONFLICT (owner, model) DO UPDATE SET busy = excluded.busy, space = excluded.space"
        )

    # -- marks -----------------------------------------------------------------------------------------------

    async def standing(self, owner: str, model: str) -> Standing | None:
        """Where an owner is and the index; `None` for an owner that has nothing yet."""
        o, k = self._t.owners, self._t.marks
        query = (
            select(o.c.epoch, o.c.rev, k.c.space, k.c.epoch, k.c.rev, k.c.busy)
            .select_from(o.outerjoin(k, and_(k.c.owner == o.c.owner, k.c.model == model)))
            .where(o.c.owner == owner)
        )
        rows = await self._read(query, {})
        if not rows:
            return None
        epoch, rev, *seen = rows[0]
        return Standing(epoch, rev) if seen[0] is None else Standing(epoch, rev, *seen)

    async def begin(self, owner: str, model: str, space: str, busy: str) -> None:
        """Write down who begins to tell the index, before the first word."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(self._begin, {"owner": owner, "model": model, "space": space, "busy": busy})

        await self._database.write(work)

    async def finish(self, owner: str, model: str, standing: Standing, busy: str) -> None:
        """Write down how far the index is, unless somebody else has begun since."""
        k = self._t.marks
        mine = and_(k.c.owner == owner, k.c.model == model, k.c.busy == busy)

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(update(k).where(mine).values(epoch=standing.epoch, rev=standing.rev, busy=None))

        await self._database.write(work)

    async def models_of(self, owner: str) -> list[str]:
        """Models whose vectors of an owner the index has been told of."""
        k = self._t.marks
        return [row.model for row in await self._read(select(k.c.model).where(k.c.owner == owner), {})]

    async def asked_models(self) -> list[str]:
        """Models whose vectors the index has been told of."""
        k = self._t.marks
        return [row.model for row in await self._read(select(k.c.model).distinct(), {})]

    async def stored_models(self) -> list[str]:
        """Models that records were embedded with; reads all vectors' names."""
        e = self._t.embeddings
        query = select(e.c.model).distinct().where(~e.c.model.startswith(UNFINISHED, autoescape=True))
        return [row.model for row in await self._read(query, {})]

    async def clear(self) -> None:
        """Take no index for told of anything, now or ever."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(self._t.marks))

        await self._database.write(work)

    async def reset(self) -> None:
        """Take nothing for told any more."""
        k = self._t.marks

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(update(k).values(epoch=-1, rev=0))

        await self._database.write(work)

    async def behind(self, model: str, limit: int, *, after: str = "") -> list[str]:
        """Owners of whom the index has yet to be told something, for one model's vectors; a page by their keys."""
        o, k = self._t.owners, self._t.marks
        query = (
            select(o.c.owner)
            .select_from(o.outerjoin(k, and_(k.c.owner == o.c.owner, k.c.model == model)))
            .where(self._lag(), o.c.owner > after)
            .order_by(o.c.owner)
            .limit(limit)
        )
        return [row.owner for row in await self._read(query, {})]

    def _lag(self) -> Any:
        o, k = self._t.owners, self._t.marks
        return or_(k.c.rev.is_(None), k.c.rev < o.c.rev, k.c.epoch != o.c.epoch, k.c.busy.is_not(None))

    async def waiting(self, model: str) -> tuple[int, int]:
        """How many owners and how many records the index has yet to be told of."""
        o, k, r = self._t.owners, self._t.marks, self._t.records
        both = o.outerjoin(k, and_(k.c.owner == o.c.owner, k.c.model == model))
        owners = select(func.count()).select_from(both).where(self._lag()).scalar_subquery()
        newer = and_(r.c.owner == o.c.owner, r.c.rev > func.coalesce(k.c.rev, 0), indexed(r))
        records = select(func.count(r.c.id)).select_from(both.join(r, newer)).scalar_subquery()
        row = (await self._read(select(owners, records), {}))[0]
        return int(row[0]), int(row[1])

    # -- rows ------------------------------------------------------------------------------------------------

    async def changed(
        self, owner: str, model: str, since: int, until: int, after: int
    ) -> tuple[list[Any], dict[int, str]]:
        """Records with a revision above one and up to another, a page by id; their rows and their public ids."""
        r = self._t.records
        among = and_(r.c.owner == owner, r.c.rev > since, r.c.rev <= until, r.c.id > after)
        query = self._rows.where(among).order_by(r.c.id).limit(PAGE_ROWS)
        rows = list(await self._read(query, {"owner": owner, "model": model}))
        return rows, await self.alive(owner, [row.id for row in rows], among_live=False)

    async def alive(self, owner: str, records: Sequence[int], *, among_live: bool = True) -> dict[int, str]:
        """Those records that are still there, with their public ids."""
        r = self._t.records
        found: dict[int, str] = {}
        for part in chunks(records):
            query = select(r.c.id, r.c.uid).where(r.c.id.in_(part), r.c.owner == owner)
            if among_live:
                query = query.where(r.c.superseded_by.is_(None), r.c.archived_at.is_(None))
            found |= {row.id: row.uid for row in await self._read(query, {})}
        return found

    async def live(self, owner: str, after: int) -> list[tuple[int, str]]:
        """Live records of an owner, a page by id: row id and public id."""
        r = self._t.records
        query = (
            select(r.c.id, r.c.uid)
            .where(r.c.owner == owner, r.c.id > after, self._indexed)
            .order_by(r.c.id)
            .limit(PAGE_ROWS)
        )
        return [(row.id, row.uid) for row in await self._read(query, {})]

    async def pending(self, owner: str, rev: int, limit: int) -> list[int]:
        """Row ids of records with a higher revision."""
        r = self._t.records
        query = select(r.c.id).where(r.c.owner == owner, r.c.rev > rev, indexed(r)).limit(limit)
        return [row.id for row in await self._read(query, {})]

    async def rows(self, owner: str, model: str, records: Sequence[int]) -> list[Any]:
        """Rows of these records of this owner; those of others are missing."""
        found: list[Any] = []
        for part in chunks(records):
            query = self._rows.where(self._t.records.c.id.in_(part))
            found += await self._read(query, {"owner": owner, "model": model})
        return found

    async def around(self, owner: str, model: str, ranges: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Rows of messages in ranges of sessions: session row, first and last position."""
        r, s = self._t.records, self._t.sources
        found: dict[int, Any] = {}
        for at in range(0, len(ranges), 100):
            inside = or_(*(and_(s.c.sid == sid, s.c.seq.between(lo, hi)) for sid, lo, hi in ranges[at : at + 100]))
            # Through the sources, as their places are indexed.
            near = select(s.c.record_id).where(inside)
            query = self._rows.where(r.c.id.in_(near), r.c.sid.is_not(None))
            found |= {row.id: row for row in await self._read(query, {"owner": owner, "model": model})}
        return list(found.values())

    async def vectors(self, owner: str, model: str, after: int) -> list[Any]:
        """Vectors of live records with their speakers, a page by id."""
        r, e = self._t.records, self._t.embeddings
        query = (
            select(r.c.id, r.c.speaker, e.c.vec)
            .join_from(r, e, and_(e.c.record_id == r.c.id, e.c.model == model))
            .where(r.c.owner == owner, r.c.id > after, self._indexed)
            .order_by(r.c.id)
            .limit(4 * PAGE_ROWS)
        )
        return list(await self._read(query, {}))

    async def dimensions(self, owner: str, model: str) -> int:
        """Size of an owner's newest vectors of a model, that of most of three as one may be damaged; 0 without any."""
        r, e = self._t.records, self._t.embeddings
        query = (
            select(func.length(e.c.vec))
            .join_from(r, e, and_(e.c.record_id == r.c.id, e.c.model == model))
            .where(r.c.owner == owner)
            .order_by(r.c.rev.desc(), r.c.id.desc())
            .limit(3)
        )
        sizes = Counter(int(row[0]) // 2 for row in await self._read(query, {}))
        return sizes.most_common(1)[0][0] if sizes else 0

    async def _read(self, query: Any, values: dict[str, Any]) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query, values)).all()

        return await self._database.read(work)
