"""The message log as it is written: messages at the end of a session, numbered under its lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from sqlalchemy import and_, bindparam, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.roles import SYSTEM_ROLES
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.alignment import LogRow, plan_alignment
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.log_moving import LogMover
from llama_index_memory_tiers.storage.rows import (
    ACTIVE,
    ARCHIVED,
    Entry,
    PutResult,
    Session,
    chunks,
)
from llama_index_memory_tiers.storage.schema import Tables

_LEADING_ROWS = 20
_ALIGNED_ROWS = 1000  # how far back an alignment looks beyond twice the length of what is wanted


class MessageLog(LogMover):
    """Statements over sessions and messages.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        super().__init__(database, tables)
        s = tables.sessions
        # Lock the session row first: its lock makes commit order equal sequence order.
        self._bump = (
            update(s)
            .where(s.c.user_id == bindparam("u"), s.c.session_id == bindparam("s"))
            .values(
                head_seq=s.c.head_seq + bindparam("n"),
                active_tokens=s.c.active_tokens + bindparam("t"),
                last_put_at=bindparam("now"),
            )
            .returning(s.c.sid, s.c.head_seq, s.c.active_tokens)
        )
        self._insert = insert(tables.messages)

    async def append(
        self,
        user_id: str,
        session_id: str,
        entries: Sequence[Entry],
        *,
        now: int,
        consumers: Iterable[str] = (),
        distinct: bool = False,
    ) -> PutResult:
        """Store messages at the end of a session: two statements, whatever the session's length.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation; made when it does not exist.
            entries: At least one message; uids that are already there are left as they are.
            now: Clock, microseconds since 1970.
            consumers: Keys of the blocks that read a new session from its beginning.
            distinct: Leave out messages with the content and the metadata of one that is there.

        Returns:
            Where the session stands now.
        """
        names = tuple(consumers)
        tries = 0

        async def work(connection: AsyncConnection) -> PutResult:
            nonlocal tries
            tries += 1
            fresh = entries
            if tries > 1:
                # A lost commit reply may hide a put that was made: keep what is new only.
                fresh = await self._unknown(connection, user_id, session_id, entries, now)
            if distinct:
                fresh = await self._distinct(connection, user_id, session_id, fresh, now)
            return await self._append(connection, user_id, session_id, fresh, now, names)

        try:
            return await self._database.write(work)
        except IntegrityError:
            tries = 1
            return await self._database.write(work)

    async def open_session(self, user_id: str, session_id: str, *, now: int, consumers: Iterable[str] = ()) -> Session:
        """Find a session's row, and make it when there is none; see `append` for the arguments."""
        names = tuple(consumers)

        async def work(connection: AsyncConnection) -> Session:
            known = {"u": user_id, "s": session_id}
            row = (await connection.execute(self._find, known)).first()
            if row is None:
                await self._make_session(connection, user_id, session_id, now, names)
                row = (await connection.execute(self._find, known)).one()
            return Session(*row)

        found = await self.session(user_id, session_id)
        if found is not None:
            return found
        try:
            return await self._database.write(work)
        except IntegrityError:
            return await self._database.write(work)  # another worker was first

    async def _unknown(
        self, connection: AsyncConnection, user_id: str, session_id: str, entries: Sequence[Entry], now: int
    ) -> list[Entry]:
        locked = (
            await connection.execute(self._bump, {"u": user_id, "s": session_id, "n": 0, "t": 0, "now": now})
        ).first()
        known: set[str] = set()
        if locked is not None:
            for part in chunks([entry.uid for entry in entries]):
                rows = await connection.execute(
                    select(self._m.c.uid).where(self._m.c.sid == locked.sid, self._m.c.uid.in_(part))
                )
                known.update(rows.scalars())
        return list({entry.uid: entry for entry in entries if entry.uid not in known}.values())

    async def _distinct(
        self, connection: AsyncConnection, user_id: str, session_id: str, entries: Sequence[Entry], now: int
    ) -> list[Entry]:
        """Those whose content and metadata are neither in the session's history nor among those before them."""
        values = {"u": user_id, "s": session_id, "n": 0, "t": 0, "now": now}
        locked = (await connection.execute(self._bump, values)).first()
        m = self._m
        known: set[tuple[str, str | None]] = set()
        sid = None if locked is None else locked.sid
        for part in chunks([entry.hash for entry in entries]):
            which = and_(m.c.sid == sid, m.c.status.in_((ACTIVE, ARCHIVED)), m.c.hash.in_(part))
            rows = await connection.execute(select(m.c.hash, m.c.meta).where(which))
            known.update((row.hash, row.meta) for row in rows)
        fresh = []
        for entry in entries:
            if (entry.hash, entry.meta) not in known:
                known.add((entry.hash, entry.meta))
                fresh.append(entry)
        return fresh

    async def _append(
        self,
        connection: AsyncConnection,
        user_id: str,
        session_id: str,
        entries: Sequence[Entry],
        now: int,
        consumers: tuple[str, ...],
    ) -> PutResult:
        tokens = sum(entry.tokens for entry in entries)
        values = {"u": user_id, "s": session_id, "n": len(entries), "t": tokens, "now": now}
        row = (await connection.execute(self._bump, values)).first()
        if row is None:
            await self._make_session(connection, user_id, session_id, now, consumers)
            row = (await connection.execute(self._bump, values)).first()
            assert row is not None  # noqa: S101  # it was inserted in this transaction
        if entries:
            await connection.execute(self._insert, _rows(row.sid, row.head_seq - len(entries) + 1, entries))
            failpoints.reach("put.inserted")
        return PutResult(row.sid, row.head_seq, row.active_tokens, len(entries))

    async def _make_session(
        self, connection: AsyncConnection, user_id: str, session_id: str, now: int, consumers: tuple[str, ...]
    ) -> None:
        made = await connection.execute(
            insert(self._s)
            .values(
                user_id=user_id,
                session_id=session_id,
                head_seq=0,
                active_tokens=0,
                window_rev=0,
                last_put_at=now,
            )
            .returning(self._s.c.sid)
        )
        sid = made.scalar_one()
        if consumers:
            # Born with the session: a consumer without a cursor was attached later, so a crash between the first
            # put and the first delivery cannot be mistaken for that.
            await connection.execute(
                insert(self._c),
                [{"sid": sid, "consumer": name, "pos": 0, "claim_until": 0, "attempts": 0} for name in consumers],
            )

    async def align(
        self,
        user_id: str,
        session_id: str,
        entries: Sequence[Entry],
        *,
        now: int,
        room_tokens: int | None,
        consumers: Iterable[str] = (),
    ) -> PutResult:
        """Make the window hold these messages, in one transaction: what matches stays in its place.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation; made when it does not exist.
            entries: The wanted window, oldest first; compared by content with active and archived messages.
            now: Clock, microseconds since 1970.
            room_tokens: What the window may hold with what comes back from the archive; `None` brings all back.
            consumers: See `append`.

        Returns:
            Where the session stands now; `stored` counts the messages that were new.
        """
        names = tuple(consumers)
        m = self._m

        async def work(connection: AsyncConnection) -> PutResult:
            found = await self._append(connection, user_id, session_id, [], now, names)
            sid = found.sid
            near = m.c.seq > found.head_seq - 2 * len(entries) - _ALIGNED_ROWS
            rows = (
                await connection.execute(
                    select(m.c.seq, m.c.status, m.c.hash, m.c.tokens)
                    .where(m.c.sid == sid, or_(m.c.status == ACTIVE, and_(m.c.status == ARCHIVED, near)))
                    .order_by(m.c.seq)
                )
            ).all()
            wanted = [entry.hash for entry in entries]
            lead = await self._lead(connection, sid)
            # A context comes back with its leading system messages in one: it means those that are there.
            split = len(lead) > 1 and bool(wanted) and _in_one(lead) == wanted[0]
            plan = plan_alignment(
                [LogRow(row.seq, row.status == ACTIVE, row.hash, row.tokens) for row in rows],
                [*(row.hash for row in lead), *wanted[1:]] if split else wanted,
                room_tokens=room_tokens,
            )
            kept = plan.kept - (len(lead) - 1 if split else 0)
            await self._set_status(connection, sid, plan.archive, ARCHIVED)
            await self._set_status(connection, sid, plan.restore, ACTIVE, only=(ARCHIVED,))
            return await self._append(connection, user_id, session_id, entries[kept:], now, names)

        return await self._database.write(work)

    async def _lead(self, connection: AsyncConnection, sid: int) -> list[Any]:
        """System messages that lead the window."""
        m = self._m
        active = select(m.c.role, m.c.hash, m.c.data).where(m.c.sid == sid, m.c.status == ACTIVE)
        rows = (await connection.execute(active.order_by(m.c.seq).limit(_LEADING_ROWS))).all()
        return list(takewhile(lambda row: row.role in SYSTEM_ROLES, rows))


def _rows(sid: int, first_seq: int, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "sid": sid,
            "seq": seq,
            "uid": entry.uid,
            "status": ACTIVE,
            "role": entry.role,
            "tokens": entry.tokens,
            "counter": entry.counter,
            "created_at": entry.created_at,
            "hash": entry.hash,
            "data": entry.data,
            "meta": entry.meta,
        }
        for seq, entry in enumerate(entries, first_seq)
    ]


def _in_one(rows: Sequence[Any]) -> str:
    """Name of the content of several messages in one."""
    return codec.content_hash(codec.merge_messages([row.data for row in rows]))
