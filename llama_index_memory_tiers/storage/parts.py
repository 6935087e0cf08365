"""Statements over what belongs to records: their parts, their embeddings, the messages behind them, their visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import and_, bindparam, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.moments import from_microseconds
from llama_index_memory_tiers.records import Record, StoredMessage
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.record_rows import owned, places_of, readable
from llama_index_memory_tiers.storage.rows import GONE, chunks, decode_rows
from llama_index_memory_tiers.storage.schema import Tables

Vector = NDArray[np.float32]

SUM = "total"
"""Under this name a record's data keeps the sum of its pages' embeddings."""
# So many records' parts are summed up at a time, so that the loop stays free.
_SUMMED = 50

SHARED = "shared"
"""Kind of the record under an agent's owner that lets it tell a record of somebody; its parent is that record."""


@dataclass(frozen=True, slots=True)
class Visits:
    """How often a record was shown.

    Args:
        count: Turns in which it was.
        last_at: The newest of them.
    """

    count: int
    last_at: datetime


class PartReader:
    """Reads by one owner; and the one write that recall makes.

    Args:
        database: Where.
        tables: The tables.
        live: Condition on records; takes `now`.
        now: Clock in microseconds since 1970.
    """

    def __init__(self, database: Database, tables: Tables, live: Any, now: Callable[[], int]) -> None:
        self._database = database
        self._t = tables
        self._r = tables.records
        self._live = live
        self._now = now
        records, visits = (
            ".".join(f'"{part}"' for part in table.fullname.split(".")) for table in (tables.records, tables.visits)
        )
        self._visit = text(
            f"INSERT INTO {visits} AS v (record_id, n, last_at) "
            f"SELECT r.id, 1, CAST(:now AS BIGINT) FROM {records} r "
            "WHERE COALESCE(r.owner, '') = :owner AND r.uid IN :ids "  # as in `owned`
            "ON CONFLICT (record_id) DO UPDATE SET n = v.n + 1, "
            "last_at = CASE WHEN excluded.last_at > v.last_at THEN excluded.last_at ELSE v.last_at END"
        ).bindparams(bindparam("ids", expanding=True))

    async def of_kinds(self, owner: str, block: str, kinds: Sequence[str], *, live: bool = True) -> list[Record]:
        """Records that a block wrote, oldest first, without their sources.

        Args:
            owner: Whose.
            block: Key of the block.
            kinds: Of which kinds.
            live: Leave out what was superseded, put aside or has expired.

        Returns:
            The records.
        """
        r = self._r
        query = select(r).where(r.c.owner == owner, r.c.kind.in_(list(kinds)), r.c.block == block)
        return await self._read((query.where(self._live) if live else query).order_by(r.c.id))

    async def changed(self, owner: str, block: str, kinds: Sequence[str], since: int) -> list[Record]:
        """What a block wrote or put aside after a revision of its owner, oldest first, without sources."""
        r = self._r
        query = select(r).where(r.c.owner == owner, r.c.rev > since, r.c.kind.in_(list(kinds)), r.c.block == block)
        return await self._read(query.order_by(r.c.id))

    async def of_block(self, owner: str, block: str) -> list[Record]:
        """All live records that a block wrote, oldest first, without their sources."""
        r = self._r
        return await self._read(select(r).where(r.c.owner == owner, r.c.block == block, self._live).order_by(r.c.id))

    async def by_ids(self, owner: str, ids: Sequence[str]) -> list[Record]:
        """Records of an owner, whatever became of them, oldest first, with their sources."""
        r = self._r

        async def work(connection: AsyncConnection) -> list[Record]:
            rows: list[Any] = []
            for part in chunks(ids):
                found = await connection.execute(select(r).where(owned(r, owner), r.c.uid.in_(part)))
                rows += found.all()
            places = await places_of(connection, self._t.sources, [row.id for row in rows])
            rows.sort(key=lambda row: int(row.id))
            return list(readable(rows, places).values())

        return await self._database.read(work) if ids else []

    async def parts_of(self, owner: str, ids: Sequence[str], kind: str) -> list[Record]:
        """Live parts of records, oldest first, without their sources."""
        if not ids:
            return []
        r = self._r
        return await self._read(
            select(r).where(r.c.parent.in_(list(ids)), owned(r, owner), r.c.kind == kind, self._live).order_by(r.c.id)
        )

    async def shared(
        self, agent: str, asking: str, block: str, model: str, limit: int
    ) -> list[tuple[Record, Vector | None]]:
        """Live records of others that an agent may tell, oldest first, without their sources.

        Args:
            agent: Owner key of the agent.
            asking: Owner who asks; their own records are left out.
            block: Key of the block that wrote them.
            model: Name of the embedding model.
            limit: The newest so many.

        Returns:
            Records, each with its embedding if it has one.
        """
        r, e, grant = self._r, self._t.embeddings, self._r.alias("granted")
        query = (
            select(r, e.c.vec)
            .select_from(
                grant.join(r, r.c.uid == grant.c.parent).outerjoin(e, and_(e.c.record_id == r.c.id, e.c.model == model))
            )
            .where(grant.c.owner == agent, grant.c.kind == SHARED, grant.c.superseded_by.is_(None))
            .where(grant.c.block == block, r.c.owner != asking, self._live)
            .order_by(grant.c.id.desc())
            .limit(limit)
        )

        async def work(connection: AsyncConnection) -> list[tuple[Record, Vector | None]]:
            rows = (await connection.execute(query, {"now": self._now()})).all()
            found = readable(rows, {})
            return [(found[row.id], _vector(row.vec)) for row in reversed(rows) if row.id in found]

        return await self._database.read(work)

    async def latest(self, owner: str, block: str, kind: str, sid: int, upto: int) -> Record | None:
        """The record of a block and kind that knows the newest message of a session up to a sequence number."""
        r, s = self._r, self._t.sources
        query = (
            select(r)
            .join(s, s.c.record_id == r.c.id)
            .where(
                s.c.sid == sid, s.c.seq <= upto, r.c.owner == owner, r.c.block == block, r.c.kind == kind, self._live
            )
            .order_by(s.c.seq.desc(), r.c.id.desc())
            .limit(1)
        )
        found = await self._read(query)
        return found[0] if found else None

    async def _read(self, query: Any) -> list[Record]:
        async def work(connection: AsyncConnection) -> list[Record]:
            rows = (await connection.execute(query, {"now": self._now()})).all()
            return list(readable(rows, {}).values())

        return await self._database.read(work)

    async def vectors(self, owner: str, ids: Sequence[str], model: str) -> dict[str, Vector]:
        """Embeddings of records by one model; those without one, or with a damaged one, are missing."""
        r, e = self._r, self._t.embeddings

        async def work(connection: AsyncConnection) -> dict[str, Vector]:
            found: dict[str, Vector] = {}
            for part in chunks(ids):
                query = (
                    select(r.c.uid, e.c.vec)
                    .join(e, and_(e.c.record_id == r.c.id, e.c.model == model))
                    .where(r.c.uid.in_(part), owned(r, owner))
                )
                for uid, stored in await connection.execute(query):
                    if (vector := _vector(stored)) is not None:
                        found[uid] = vector
            return found

        return await self._database.read(work) if ids and model else {}

    async def means(self, owner: str, ids: Sequence[str], kind: str, model: str) -> dict[str, Vector]:
        """The mean embedding of the live parts of records; those of which a part has none by this model are missing."""
        r, e = self._r, self._t.embeddings
        query = (
            select(r.c.parent, e.c.vec)
            .select_from(r.outerjoin(e, and_(e.c.record_id == r.c.id, e.c.model == model)))
            .where(r.c.parent.in_(bindparam("ids", expanding=True)), owned(r, owner), r.c.kind == kind, self._live)
        )

        async def work(connection: AsyncConnection, part: Sequence[str]) -> Sequence[Any]:
            return (await connection.execute(query, {"ids": list(part), "now": self._now()})).all()

        found: dict[str, Vector] = {}
        for at in range(0, len(ids) if model else 0, _SUMMED):
            stored: dict[str, list[Vector | None]] = {}
            for parent, vec in await self._database.read(partial(work, part=ids[at : at + _SUMMED])):
                stored.setdefault(parent, []).append(_vector(vec))
            for parent, vectors in stored.items():
                whole = [vector for vector in vectors if vector is not None]
                if len(whole) == len(vectors) and len({vector.shape for vector in whole}) == 1:
                    found[parent] = np.mean(whole, axis=0, dtype=np.float32)
        return found

    async def messages_behind(
        self, owner: str, ids: Sequence[str], *, live: bool = True
    ) -> dict[str, list[StoredMessage]]:
        """The messages that records, or live ones, come from, in the order of the log; forgotten ones are missing."""
        r, p, m, s = self._r, self._t.sources, self._t.messages, self._t.sessions
        query = (
            select(
                r.c.uid, m.c.sid, s.c.session_id,
                m.c.seq, m.c.uid, m.c.status, m.c.tokens, m.c.counter, m.c.created_at, m.c.data, m.c.meta,
            )
            .select_from(
                r.join(p, p.c.record_id == r.c.id)
                .join(m, and_(m.c.sid == p.c.sid, m.c.seq == p.c.seq))
                .join(s, s.c.sid == m.c.sid)
            )
            .where(r.c.uid.in_(bindparam("ids", expanding=True)), owned(r, owner), m.c.status != GONE)
            .order_by(m.c.sid, m.c.seq)
        )  # fmt: skip
        query = query.where(self._live) if live else query

        async def work(connection: AsyncConnection) -> list[Any]:
            rows: list[Any] = []
            for part in chunks(ids):
                rows += (await connection.execute(query, {"ids": list(part), "now": self._now()})).all()
            return rows

        rows = await self._database.read(work) if ids else []
        messages = await decode_rows([row[3:] for row in rows], (row[1] for row in rows), (row[2] for row in rows))
        found: dict[str, list[StoredMessage]] = {}
        for row, message in zip(rows, messages, strict=True):
            if isinstance(message, StoredMessage):  # the log reports damaged rows
                found.setdefault(row[0], []).append(message)
        return found

    async def visits(self, owner: str, kind: str | None = None, ids: Sequence[str] | None = None) -> dict[str, Visits]:
        """How often records, those of a kind, or these, were shown; those that never were are missing."""
        r, v = self._r, self._t.visits
        query = (
            select(r.c.uid, v.c.n, v.c.last_at)
            .join(v, v.c.record_id == r.c.id)
            .where(r.c.owner == owner, r.c.superseded_by.is_(None))
        )
        if kind is not None:
            query = query.where(r.c.kind == kind)

        async def work(connection: AsyncConnection) -> Sequence[Any]:
            if ids is None:
                return (await connection.execute(query)).all()
            few = select(r.c.uid, v.c.n, v.c.last_at).join(v, v.c.record_id == r.c.id).where(owned(r, owner))
            return [row for part in chunks(ids) for row in await connection.execute(few.where(r.c.uid.in_(part)))]

        rows = await self._database.read(work)
        return {uid: Visits(int(n), from_microseconds(last_at)) for uid, n, last_at in rows}

    async def visit(self, owner: str, ids: Sequence[str]) -> None:
        """Count one visit of each of these records of an owner, now."""

        async def work(connection: AsyncConnection) -> None:
            for part in chunks(ids):
                values = {"ids": list(part), "owner": owner, "now": self._now()}
                await connection.execute(self._visit, values)

        if ids:
            await self._database.write(work)


def _vector(stored: bytes | None) -> Vector | None:
    """An embedding as it was stored; `None` for none, and for a damaged one."""
    return np.frombuffer(stored, "<f2").astype(np.float32) if stored and len(stored) % 2 == 0 else None
