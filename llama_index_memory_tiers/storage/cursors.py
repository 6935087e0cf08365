"""How far each consumer has read each session: claims, outcomes and dead letters."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, bindparam, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.schema import Tables

_SKEW = 60_000_000  # microseconds by which clocks of hosts may differ


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a consumer stands in a session.

    Args:
        consumer: Key of the block.
        pos: Everything up to this sequence number has been absorbed.
        attempts: Failed tries at what comes next.
        error: Kind of the newest failure; never a text of a message.
        claimed_until: When the claim of a worker ends, microseconds since 1970; 0 for none.
    """

    consumer: str
    pos: int
    attempts: int
    error: str | None
    claimed_until: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A range that a block could not absorb, put aside so that the rest goes on.

    Args:
        id: Number of the letter.
        session_id: The session.
        block: Key of the block.
        lo: Sequence number before the range.
        hi: Last sequence number of the range.
        error: Kind of the failure.
        at: When it was put aside, microseconds since 1970.
    """

    id: int
    session_id: str
    block: str
    lo: int
    hi: int
    error: str
    at: int


_Turns = weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]


class CursorStore:
    """Statements over cursors and dead letters.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._c = c = tables.cursors
        self._d = tables.dead
        self._s = tables.sessions
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()
        mine = and_(c.c.sid == bindparam("b_sid"), c.c.consumer == bindparam("b_consumer"))
        self._fence = (
            update(c)
            .where(mine, c.c.pos == bindparam("b_lo"), c.c.claim == bindparam("b_me"))
            .values(pos=bindparam("b_hi"), claim=None, claim_until=0, attempts=0, error=None)
        )

    def turn(self, sid: int, consumer: str) -> asyncio.Lock:
        """A lock under which the workers of this loop take turns; claims are for all others.

        Args:
            sid: Private row of the session.
            consumer: Key of the block.

        Returns:
            The lock, the same for all who hold or await it.
        """
        turns = self._turns.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
        lock = turns.get((sid, consumer))
        if lock is None:
            lock = turns[sid, consumer] = asyncio.Lock()
        return lock

    async def all(self, sid: int) -> dict[str, Cursor]:
        """Every consumer's cursor in a session, by key."""
        c = self._c

        async def work(connection: AsyncConnection) -> dict[str, Cursor]:
            rows = await connection.execute(
                select(c.c.consumer, c.c.pos, c.c.attempts, c.c.error, c.c.claim_until).where(c.c.sid == sid)
            )
            return {row.consumer: Cursor(*row) for row in rows}

        return await self._database.read(work)

    async def add(self, sid: int, starts: Sequence[tuple[str, int]]) -> None:
        """Give consumers that were attached later their first cursor; those that have one keep it.

        Args:
            sid: Private row of the session.
            starts: Consumer and position to start from.
        """

        async def work(connection: AsyncConnection) -> None:
            known = set((await connection.execute(select(self._c.c.consumer).where(self._c.c.sid == sid))).scalars())
            rows = [
                {"sid": sid, "consumer": name, "pos": pos, "claim_until": 0, "attempts": 0}
                for name, pos in starts
                if name not in known
            ]
            if rows:
                await connection.execute(insert(self._c), rows)

        try:
            await self._database.write(work)
        except IntegrityError:
            await self._database.write(work)  # another worker was first

    async def claim(self, sid: int, consumer: str, me: str, *, now: int, until: int) -> int | None:
        """Reserve what comes next for one worker.

        Args:
            sid: Private row of the session.
            consumer: Key of the block.
            me: Name of this attempt, never used before.
            now: Clock, microseconds since 1970.
            until: When others may take over.

        Returns:
            The position to read from, or `None` when another worker holds the claim.
        """
        c = self._c
        claim = (
            update(c)
            .where(
                c.c.sid == sid,
                c.c.consumer == consumer,
                # One that ends later than one made now could: the clock was set back since.
                or_(c.c.claim.is_(None), c.c.claim_until < now, c.c.claim_until > 2 * until - now + _SKEW),
            )
            .values(claim=me, claim_until=until)
            .returning(c.c.pos)
        )

        async def work(connection: AsyncConnection) -> int | None:
            row = (await connection.execute(claim)).first()
            return None if row is None else int(row.pos)

        return await self._database.write(work)

    async def renew(self, sid: int, consumer: str, me: str, *, until: int) -> None:
        """Hold a claim for longer."""
        c = self._c
        statement = update(c).where(c.c.sid == sid, c.c.consumer == consumer, c.c.claim == me).values(claim_until=until)
        await self._run(statement)

    async def release(self, sid: int, consumer: str, me: str, *, error: str | None = None, counts: bool = True) -> int:
        """Give a claim back without having absorbed anything.

        Args:
            sid: Private row of the session.
            consumer: Key of the block.
            me: Name of the attempt.
            error: Kind of the failure; `None` when there was nothing to do.
            counts: Whether the failure counts against the batch; an outage does not.

        Returns:
            How many tries have failed now.
        """
        c = self._c
        values: dict[str, Any] = {"claim": None, "claim_until": 0}
        if error is not None:
            values |= {"attempts": c.c.attempts + int(counts), "error": error}
        statement = (
            update(c)
            .where(c.c.sid == sid, c.c.consumer == consumer, c.c.claim == me)
            .values(**values)
            .returning(c.c.attempts)
        )

        async def work(connection: AsyncConnection) -> int:
            row = (await connection.execute(statement)).first()
            return 0 if row is None else int(row.attempts)

        return await self._database.write(work)

    async def fence(self, connection: AsyncConnection, sid: int, consumer: str, me: str, lo: int, hi: int) -> bool:
        """Move the cursor if nobody else has; part of the transaction that writes what was absorbed.

        Args:
            connection: In a transaction.
            sid: Private row of the session.
            consumer: Key of the block.
            me: Name of the attempt that claimed.
            lo: Position that was claimed.
            hi: New position.

        Returns:
            Whether exactly this attempt moved it; when not, roll back.
        """
        values = {"b_sid": sid, "b_consumer": consumer, "b_me": me, "b_lo": lo, "b_hi": hi}
        return (await connection.execute(self._fence, values)).rowcount == 1

    async def advance(self, sid: int, consumer: str, me: str, lo: int, hi: int) -> bool:
        """Move a cursor for which nothing else is written; see `fence` for the arguments and the answer."""

        async def work(connection: AsyncConnection) -> bool:
            return await self.fence(connection, sid, consumer, me, lo, hi)

        return await self._database.write(work)

    async def park(self, sid: int, consumer: str, me: str, *, lo: int, hi: int, error: str, now: int) -> bool:
        """Put a range aside as a dead letter and go on behind it.

        Args:
            sid: Private row of the session.
            consumer: Key of the block.
            me: Name of the attempt that claimed.
            lo: Position that was claimed.
            hi: End of the range.
            error: Kind of the failure.
            now: Clock, microseconds since 1970.

        Returns:
            Whether this attempt still held the claim.
        """

        async def work(connection: AsyncConnection) -> bool:
            if not await self.fence(connection, sid, consumer, me, lo, hi):
                return False
            await connection.execute(
                insert(self._d).values(sid=sid, consumer=consumer, lo=lo, hi=hi, error=error, at=now)
            )
            return True

        return await self._database.write(work)

    async def dead(self, user_id: str, session_id: str | None = None) -> list[DeadLetter]:
        """Dead letters of a person's sessions, oldest first."""
        d, s = self._d, self._s
        query = (
            select(d.c.id, s.c.session_id, d.c.consumer, d.c.lo, d.c.hi, d.c.error, d.c.at)
            .join(s, s.c.sid == d.c.sid)
            .where(s.c.user_id == user_id)
            .order_by(d.c.id)
        )
        if session_id is not None:
            query = query.where(s.c.session_id == session_id)

        async def work(connection: AsyncConnection) -> list[DeadLetter]:
            return [DeadLetter(*row) for row in await connection.execute(query)]

        return await self._database.read(work)

    async def bury(self, connection: AsyncConnection, letter: int) -> bool:
        """Remove a dead letter in the transaction that absorbs its range; false when somebody else did."""
        return (await connection.execute(delete(self._d).where(self._d.c.id == letter))).rowcount == 1

    async def _run(self, statement: Any) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement)

        await self._database.write(work)
