"""The message log: sessions, their numbered messages, and the window of active ones."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import Any

from sqlalchemy import String, and_, bindparam, case, cast, func, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.records import Place, StoredMessage
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.alignment import LogRow, plan_alignment
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.erasing import Eraser
from llama_index_memory_tiers.storage.packs import raise_epoch
from llama_index_memory_tiers.storage.rows import (
    ACTIVE,
    ARCHIVED,
    CLEARED,
    GONE,
    Entry,
    PutResult,
    RawMessage,
    Session,
    Window,
    chunks,
    decode_rows,
)
from llama_index_memory_tiers.storage.schema import Tables

_logger = logging.getLogger(__name__)

CACHED_WINDOWS = 256
_LEADING_ROWS = 20
_ALIGNED_ROWS = 1000  # how far back an alignment looks beyond twice the length of what is wanted


@dataclass(slots=True)
class _Cache:
    """The newest windows that were read, decoded, least recently used first."""

    windows: OrderedDict[tuple[str, str], Window] = field(default_factory=OrderedDict)

    def get(self, key: tuple[str, str]) -> Window:
        found = self.windows.get(key)
        if found is None:
            return Window()
        self.windows.move_to_end(key)
        return found

    def put(self, key: tuple[str, str], window: Window) -> None:
        self.windows[key] = window
        self.windows.move_to_end(key)
        while len(self.windows) > CACHED_WINDOWS:
            self.windows.popitem(last=False)


class MessageLog:
    """Statements over sessions and messages.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._cache = _Cache()
        self._tables = tables
        self._eraser = Eraser(tables)
        self._s = s = tables.sessions
        self._m = m = tables.messages
        self._c = tables.cursors
        o = tables.owners
        alone = tables.owners.alias()
        mine = and_(s.c.user_id == bindparam("u"), s.c.session_id == bindparam("s"))
        session = (
            s.c.sid, s.c.user_id, s.c.session_id, s.c.head_seq, s.c.active_tokens, s.c.window_rev, s.c.last_put_at
        )  # fmt: skip
        # Lock the session row first: its lock makes commit order equal sequence order.
        self._bump = (
            update(s)
            .where(mine)
            .values(
                head_seq=s.c.head_seq + bindparam("n"),
                active_tokens=s.c.active_tokens + bindparam("t"),
                last_put_at=bindparam("now"),
            )
            .returning(s.c.sid, s.c.head_seq, s.c.active_tokens)
        )
        self._find = select(*session).where(mine)
        self._of_user = select(*session).where(s.c.user_id == bindparam("u")).order_by(s.c.sid)
        self._columns = (
            m.c.seq,
            m.c.uid,
            m.c.status,
            m.c.tokens,
            m.c.counter,
            m.c.created_at,
            m.c.data,
            m.c.meta,
        )
        rev = func.coalesce(o.c.rev, 0) + func.coalesce(alone.c.rev, 0)
        self._window = (
            select(s.c.sid, s.c.head_seq, s.c.window_rev, rev.label("owner_rev"), *self._columns)
            .select_from(
                s.outerjoin(m, and_(m.c.sid == s.c.sid, m.c.status == ACTIVE, m.c.seq > bindparam("after")))
                # Come along to tell whether a remembered recall is still the newest.
                .outerjoin(o, o.c.owner == bindparam("owner"))
                .outerjoin(alone, alone.c.owner == literal("s:") + cast(s.c.sid, String))
            )
            .where(mine)
            .order_by(m.c.seq)
        )
        self._insert = insert(m)

    # -- writing ---------------------------------------------------------------------------------------------

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
        return list(takewhile(lambda row: row.role in {"system", "developer"}, rows))

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

        return await self._database.write(work)

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
        found, _ = self._decode(rows, sid, session_id)
        return [message for message, _ in found]

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

        return await self._database.write(work)

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
        return [message for message, _ in self._decode(rows, sid, session_id)[0]]

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
        return await self._set_status(connection, sid, seqs, GONE, only=(ACTIVE, ARCHIVED, CLEARED))

    def drop_cached(self, user_id: str, session_id: str | None = None) -> None:
        """Let decoded windows go: of one session, or of all of a person."""
        for key in list(self._cache.windows):
            if key[0] == user_id and session_id in (None, key[1]):
                self._cache.windows.pop(key, None)

    def cached(self, user_id: str, session_id: str | None = None) -> int:
        """How many decoded windows are held; see `drop_cached`."""
        return sum(key[0] == user_id and session_id in (None, key[1]) for key in list(self._cache.windows))

    async def _set_status(
        self,
        connection: AsyncConnection,
        sid: int,
        seqs: Sequence[int],
        status: str,
        *,
        only: tuple[str, ...] = (ACTIVE,),
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
            await self._forget(connection, user_id, sid, seqs)
        return moved

    async def _forget(self, connection: AsyncConnection, user_id: str, sid: int, seqs: Sequence[int]) -> None:
        """Delete what messages are found by, and void what blocks prepare from their session right now."""
        owners = (f"u:{user_id}", f"s:{sid}") if user_id else (f"s:{sid}",)
        revisions = {owner: await raise_epoch(connection, self._tables, owner) for owner in owners}
        found = await self._eraser.derived(connection, sid, seqs, kinds=("message",))
        await self._eraser.delete(connection, found.values(), revisions)

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

    # -- reading ---------------------------------------------------------------------------------------------

    async def session(self, user_id: str, session_id: str) -> Session | None:
        """Find a session's row."""

        async def work(connection: AsyncConnection) -> Session | None:
            row = (await connection.execute(self._find, {"u": user_id, "s": session_id})).first()
            return None if row is None else Session(*row)

        return await self._database.read(work)

    async def sessions(self, user_id: str) -> list[Session]:
        """All sessions of one person, oldest first; '' lists those without a person."""

        async def work(connection: AsyncConnection) -> list[Session]:
            return [Session(*row) for row in await connection.execute(self._of_user, {"u": user_id})]

        return await self._database.read(work)

    async def behind(self, user_id: str, consumers: Collection[str], *, asking: str | None = None) -> list[Session]:
        """A person's sessions in which not every consumer has absorbed everything, newest first.

        Args:
            user_id: The person; '' means nobody, whose sessions have nothing in common.
            consumers: Keys of blocks.
            asking: The session that asks: of it only what has left the window matters.

        Returns:
            The sessions.
        """
        c, m, s = self._c, self._m, self._s
        in_window = select(func.min(m.c.seq)).where(
            m.c.sid == s.c.sid, m.c.status == ACTIVE, m.c.role.not_in(("system", "developer"))
        )
        left = func.coalesce(in_window.scalar_subquery() - 1, s.c.head_seq)
        wanted = s.c.head_seq if asking is None else case((s.c.session_id == asking, left), else_=s.c.head_seq)
        done = select(func.count()).where(c.c.sid == s.c.sid, c.c.consumer.in_(list(consumers)), c.c.pos >= wanted)
        query = self._of_user.where(done.scalar_subquery() < len(consumers)).order_by(None).order_by(s.c.sid.desc())
        if asking is not None and not user_id:
            query = query.where(s.c.session_id == asking)

        async def work(connection: AsyncConnection) -> list[Session]:
            return [Session(*row) for row in await connection.execute(query, {"u": user_id})]

        return await self._database.read(work)

    async def window(self, user_id: str, session_id: str) -> Window:
        """Read the active messages: one statement, and only rows that are new since the last time.

        Args:
            user_id: The person, or '' for none.
            session_id: The conversation.

        Returns:
            The window, its messages shared with the cache.
        """
        key = (user_id, session_id)
        known = self._cache.get(key)
        rows = await self._read_window(user_id, session_id, known.head_seq)
        if rows and known.sid and (rows[0].sid, rows[0].window_rev) != (known.sid, known.window_rev):
            known = Window()
            rows = await self._read_window(user_id, session_id, 0)
        if not rows:
            return Window()
        first = rows[0]
        if (first.sid, first.head_seq, first.owner_rev) == (known.sid, known.head_seq, known.owner_rev):
            return known
        new, damaged = self._decode([row[4:] for row in rows], first.sid, session_id)
        window = Window(
            sid=first.sid,
            head_seq=first.head_seq,
            window_rev=first.window_rev,
            owner_rev=first.owner_rev,
            messages=known.messages + tuple(message for message, _ in new),
            counters=known.counters + tuple(counter for _, counter in new),
            damaged=known.damaged + damaged,
        )
        self._cache.put(key, window)
        return window

    async def _read_window(self, user_id: str, session_id: str, after: int) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            values = {"u": user_id, "s": session_id, "after": after, "owner": f"u:{user_id}"}
            return (await connection.execute(self._window, values)).all()

        return await self._database.read(work)

    async def read(
        self,
        sid: int,
        session_id: str,
        *,
        after: int = 0,
        until: int | None = None,
        limit: int | None = None,
        offset: int | None = None,
        statuses: Sequence[str] | None = None,
        newest: bool = False,
        tombstones: bool = False,
    ) -> tuple[list[StoredMessage], int]:
        """Read a range of a session.

        Args:
            sid: Private row of the session.
            session_id: Its public id.
            after: Only messages beyond this sequence number.
            until: Only messages up to this one.
            limit: At most so many rows.
            offset: Skip so many rows first.
            statuses: Only these; default all but tombstones.
            newest: Take the limit from the end instead of the beginning.
            tombstones: Count forgotten messages among the rows, so that a cursor can pass them.

        Returns:
            Messages in order, and the sequence number of the last row that was read, damaged or not
            (0 when there was none).
        """
        m = self._m
        query = select(*self._columns).where(m.c.sid == sid, m.c.seq > after)
        if statuses is not None:
            query = query.where(m.c.status.in_(statuses))
        elif not tombstones:
            query = query.where(m.c.status != GONE)
        if until is not None:
            query = query.where(m.c.seq <= until)
        query = query.order_by(m.c.seq.desc() if newest else m.c.seq).limit(limit).offset(offset)

        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query)).all()

        rows = list(await self._database.read(work))
        if newest:
            rows.reverse()
        found, _ = self._decode(rows, sid, session_id)
        return [message for message, _ in found], rows[-1].seq if rows else 0

    async def at(self, owner: str, places: Collection[Place]) -> list[StoredMessage]:
        """Messages at known places of one owner's sessions, in order; forgotten ones are missing.

        Args:
            owner: Key of the owner; places in sessions of others are passed over.
            places: Where they stand.

        Returns:
            The messages.
        """
        m, s = self._m, self._s
        kind, _, name = owner.partition(":")
        mine = s.c.user_id == name if kind == "u" else s.c.sid == int(name)
        found: list[StoredMessage] = []
        for sid in sorted({place[0] for place in places}):
            seqs = sorted({seq for place, seq in places if place == sid})

            async def work(connection: AsyncConnection, sid: int = sid, seqs: list[int] = seqs) -> list[Any]:
                rows: list[Any] = []
                for part in chunks(seqs):
                    query = select(s.c.session_id, *self._columns).select_from(m.join(s, s.c.sid == m.c.sid))
                    query = query.where(mine, m.c.sid == sid, m.c.seq.in_(part)).order_by(m.c.seq)
                    rows += (await connection.execute(query)).all()
                return rows

            rows = await self._database.read(work)
            if rows:
                found += [message for message, _ in self._decode([row[1:] for row in rows], sid, rows[0][0])[0]]
        return found

    async def flushed_until(self, sid: int) -> int:
        """The last sequence number that has left the window for good: system messages in it do not count."""
        m = self._m
        first = select(func.min(m.c.seq)).where(
            m.c.sid == sid, m.c.status == ACTIVE, m.c.role.not_in(("system", "developer"))
        )
        head = select(self._s.c.head_seq).where(self._s.c.sid == sid)

        async def work(connection: AsyncConnection) -> int:
            found = (await connection.execute(select(first.scalar_subquery(), head.scalar_subquery()))).one()
            return int(found[0] - 1 if found[0] is not None else found[1] or 0)

        return await self._database.read(work)

    async def count(self, sid: int, statuses: Sequence[str]) -> int:
        """Count messages of a session."""
        query = select(func.count()).where(self._m.c.sid == sid, self._m.c.status.in_(statuses))

        async def work(connection: AsyncConnection) -> int:
            return int((await connection.execute(query)).scalar_one())

        return await self._database.read(work)

    def _decode(
        self, rows: Sequence[RawMessage], sid: int, session_id: str
    ) -> tuple[list[tuple[StoredMessage, str]], tuple[int, ...]]:
        # The session's row without any message, and tombstones, are no messages.
        told = [row for row in rows if row[0] is not None and row[2] != GONE]
        found, damaged = [], []
        for row, message in zip(told, decode_rows(told, repeat(sid), repeat(session_id)), strict=True):
            if isinstance(message, StoredMessage):
                found.append((message, row[4]))
                continue
            # One damaged row must not close the session. The error's text quotes the row: only its kind is logged.
            about = {"session_id": session_id, "seq": row[0], "error": type(message).__name__}
            _logger.error("damaged message skipped", extra=about)
            damaged.append(row[0])
        return found, tuple(damaged)


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
