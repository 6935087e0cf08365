"""The message log as it is sorted: what leaves the window, comes back, is cleared, or is forgotten."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, case, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.records import Forgotten, StoredMessage
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.erasing import Eraser
from llama_index_memory_tiers.storage.log_reading import LogReader
from llama_index_memory_tiers.storage.owner_keys import owner_keys
from llama_index_memory_tiers.storage.rows import (
    ACTIVE,
    ARCHIVED,
    CLEARED,
    GONE,
    chunks,
)
from llama_index_memory_tiers.storage.schema import Tables


class LogMover(LogReader):
    """Changes the status of messages, and what is known about them; takes what `LogReader` takes."""

    def __init__(self, database: Database, tables: Tables) -> None:
        super().__init__(database, tables)
        self._tables = tables
        self._eraser = Eraser(tables)
        self.elsewhere: set[str] = set()  # keys of the blocks in this process that hold data outside the storage
        self.noted = 0  # how often notes for them may have been written

    async def archive(self, user_id: str, session_id: str, seqs: Sequence[int], *, status: str = ARCHIVED) -> int:
        """Move active messages out of the window.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation.
            seqs: Which; those that are no longer active are left alone, whoever moved them.
            status: `archived`, `cleared` or `gone`.

        Returns:
            How many were moved.
        """

        async def work(connection: AsyncConnection) -> int:
            locked = (await connection.execute(self._find.with_for_update(), {"u": user_id, "s": session_id})).first()
            if locked is None:
                return 0
            only = (ACTIVE,) if status == ARCHIVED else (ACTIVE, ARCHIVED)
            return await self._set_status(connection, locked.sid, seqs, status, only=only)

        moved = await self._database.write(work)
        self.noted += status == GONE
        return moved

    async def move_oldest(
        self, user_id: str, session_id: str, count: int, *, status: str = ARCHIVED
    ) -> list[StoredMessage]:
        """Move the oldest active messages out of the window; of several callers at once each moves others.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation.
            count: How many; damaged rows count and move as well.
            status: `archived`, `cleared` or `gone`.

        Returns:
            The messages that were moved, as they were before.
        """
        m = self._m

        async def work(connection: AsyncConnection) -> tuple[int, Sequence[Any]]:
            locked = (await connection.execute(self._find.with_for_update(), {"u": user_id, "s": session_id})).first()
            if locked is None:
                return 0, ()
            query = select(*self._columns).where(m.c.sid == locked.sid, m.c.status == ACTIVE)
            rows = (await connection.execute(query.order_by(m.c.seq).limit(count))).all()
            await self._set_status(connection, locked.sid, [row.seq for row in rows], status)
            return locked.sid, rows

        sid, rows = await self._database.write(work)
        self.noted += status == GONE
        return (await self._decode(rows, sid, session_id)).messages

    async def clear(self, user_id: str, session_id: str, statuses: Sequence[str], *, gone: bool = False) -> int:
        """Take messages out of the session's history.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation.
            statuses: Which ones: `active`, `archived` or both.
            gone: Remove the text as well and leave a tombstone.

        Returns:
            How many there were.
        """

        async def work(connection: AsyncConnection) -> int:
            locked = (await connection.execute(self._find.with_for_update(), {"u": user_id, "s": session_id})).first()
            if locked is None:
                return 0
            rows = (
                await connection.execute(
                    select(self._m.c.seq).where(self._m.c.sid == locked.sid, self._m.c.status.in_(statuses))
                )
            ).scalars()
            return await self._set_status(
                connection, locked.sid, list(rows), GONE if gone else CLEARED, only=tuple(statuses)
            )

        moved = await self._database.write(work)
        self.noted += gone
        return moved

    async def delete(self, user_id: str, session_id: str, uids: Sequence[str]) -> list[StoredMessage]:
        """Delete messages by their ids: their text goes, and a tombstone stays.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation.
            uids: Public ids; those that are not there are passed over.

        Returns:
            The messages that were deleted, as they were, in order.
        """
        m = self._m

        async def work(connection: AsyncConnection) -> tuple[int, list[Any]]:
            locked = (await connection.execute(self._find.with_for_update(), {"u": user_id, "s": session_id})).first()
            if locked is None:
                return 0, []
            rows: list[Any] = []
            for part in chunks(uids):
                query = select(*self._columns).where(m.c.sid == locked.sid, m.c.uid.in_(part), m.c.status != GONE)
                rows += (await connection.execute(query)).all()
            kinds = (ACTIVE, ARCHIVED, CLEARED)
            await self._set_status(connection, locked.sid, [row.seq for row in rows], GONE, only=kinds)
            return locked.sid, sorted(rows, key=lambda row: row.seq)

        sid, rows = await self._database.write(work)
        self.noted += 1
        return (await self._decode(rows, sid, session_id)).messages

    async def describe(self, sid: int, metas: Mapping[int, str | None]) -> None:
        """Write what became known about messages after they were put.

        Args:
            sid: Private row of the session.
            metas: Sequence number → JSON of the metadata.
        """
        m, s = self._m, self._s

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(update(s).where(s.c.sid == sid).values(window_rev=s.c.window_rev + 1))
            for seq, meta in metas.items():
                which = and_(m.c.sid == sid, m.c.seq == seq, m.c.status != GONE)
                await connection.execute(update(m).where(which).values(meta=meta))

        if metas:
            await self._database.write(work)

    async def tombstone(self, connection: AsyncConnection, sid: int, seqs: Sequence[int]) -> int:
        """Take the texts of messages away, whatever their status; part of the transaction that forgets.

        Args:
            connection: In a transaction that has locked the session's row.
            sid: Private row of the session.
            seqs: Which messages.

        Returns:
            How many still had a text.
        """
        kinds = (ACTIVE, ARCHIVED, CLEARED)
        return await self._set_status(connection, sid, seqs, GONE, only=kinds, note=False)  # the job writes notes

    async def _set_status(
        self,
        connection: AsyncConnection,
        sid: int,
        seqs: Sequence[int],
        status: str,
        *,
        only: tuple[str, ...] = (ACTIVE,),
        note: bool = True,
    ) -> int:
        if not seqs:
            return 0
        values: dict[str, Any] = {"status": status}
        if status == GONE:
            values |= {"data": None, "meta": None, "hash": None}
        moved = released = 0
        for part in chunks(seqs):
            which = and_(self._m.c.sid == sid, self._m.c.seq.in_(part), self._m.c.status.in_(only))
            leaving = case((self._m.c.status == ACTIVE, self._m.c.tokens), else_=0)
            entering = self._m.c.tokens if status == ACTIVE else 0
            found = (
                await connection.execute(
                    select(func.count(), func.coalesce(func.sum(leaving - entering), 0)).where(which)
                )
            ).one()
            moved, released = moved + found[0], released + int(found[1])
            await connection.execute(update(self._m).where(which).values(**values))
        session = await connection.execute(
            update(self._s)
            .where(self._s.c.sid == sid)
            .values(window_rev=self._s.c.window_rev + 1, active_tokens=self._s.c.active_tokens - released)
            .returning(self._s.c.user_id)
        )
        user_id = session.scalar_one()
        if status == GONE and moved:
            records = await self._forget(connection, user_id, sid, seqs)
            if note and self.elsewhere:
                await self._note(connection, user_id, sid, seqs, records)
        return moved

    async def _forget(
        self, connection: AsyncConnection, user_id: str, sid: int, seqs: Sequence[int]
    ) -> Collection[Any]:
        """Delete what messages are found by, and void what blocks prepare from their session right now."""
        revisions = await self._eraser.touch(connection, owner_keys(user_id, [sid]))
        found = await self._eraser.derived(connection, sid, seqs, kinds=("message",))
        await self._eraser.delete(connection, found.values(), revisions)
        return found.values()

    async def _note(
        self, connection: AsyncConnection, user_id: str, sid: int, seqs: Sequence[int], records: Collection[Any]
    ) -> None:
        """Write down what blocks are to delete elsewhere: of messages as well whose records were never merged."""
        m = self._m
        messages: list[tuple[int, int, str]] = []
        for part in chunks(seqs):
            which = and_(m.c.sid == sid, m.c.seq.in_(part), m.c.status == GONE)
            found = await connection.execute(select(m.c.seq, m.c.uid).where(which).order_by(m.c.seq))
            messages += [(sid, row.seq, row.uid) for row in found]
        for block in sorted(self.elsewhere):
            mine = tuple(row.uid for row in records if row.block == block)
            await self._eraser.note(connection, block, user_id, Forgotten(mine, tuple(messages)))

    async def recount(self, sid: int, counts: Mapping[int, int], counter: str) -> None:
        """Write token counts that another counter made.

        Args:
            sid: Private row of the session.
            counts: Sequence number → tokens.
            counter: Name of the counter.
        """

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(
                update(self._s).where(self._s.c.sid == sid).values(window_rev=self._s.c.window_rev + 1)
            )
            await connection.execute(
                update(self._m)
                .where(self._m.c.sid == bindparam("b_sid"), self._m.c.seq == bindparam("b_seq"))
                .values(tokens=bindparam("b_tokens"), counter=counter),
                [{"b_sid": sid, "b_seq": seq, "b_tokens": tokens} for seq, tokens in counts.items()],
            )
            total = (
                select(func.coalesce(func.sum(self._m.c.tokens), 0))
                .where(self._m.c.sid == sid, self._m.c.status == ACTIVE)
                .scalar_subquery()
            )
            await connection.execute(update(self._s).where(self._s.c.sid == sid).values(active_tokens=total))

        await self._database.write(work)
