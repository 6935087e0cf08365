"""The message log as it is read: sessions, the window of active messages, ranges, single places."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, String, and_, bindparam, case, cast, func, literal, null, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.records import Place, StoredMessage
from llama_index_memory_tiers.roles import SYSTEM_ROLES
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.owner_keys import session_keys, session_of, user_key, user_of
from llama_index_memory_tiers.storage.rows import (
    ACTIVE,
    GONE,
    RawMessage,
    Session,
    Window,
    chunks,
    decode_rows,
)
from llama_index_memory_tiers.storage.schema import Tables

_logger = logging.getLogger(__name__)

CACHED_WINDOWS = 256
_SYSTEM = tuple(role.value for role in SYSTEM_ROLES)


@dataclass(slots=True)
class _Cache:
    """The newest windows that were read, decoded, least recently used first."""

    windows: OrderedDict[tuple[str, str], Window] = field(default_factory=OrderedDict)
    dropped: int = 0  # how often some were let go: what was read before that is not kept

    def get(self, key: tuple[str, str]) -> Window:
        found = self.windows.get(key)
        if found is None:
            return Window()
        self.windows.move_to_end(key)
        return found

    def put(self, key: tuple[str, str], window: Window, *, dropped: int) -> None:
        if dropped != self.dropped:
            return
        self.windows[key] = window
        self.windows.move_to_end(key)
        while len(self.windows) > CACHED_WINDOWS:
            self.windows.popitem(last=False)


class _Standing(NamedTuple):
    """Where a session stands: see `Session`, and `Window.owner_rev`."""

    sid: int
    head_seq: int
    window_rev: int
    owner_rev: int


@dataclass(slots=True)
class _Decoded:
    """Rows that were read: the messages, the counter's name of each, and the places of those that are damaged."""

    messages: list[StoredMessage] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


class LogReader:
    """Reads sessions and messages; decoded windows are kept.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._cache = _Cache()
        self._s = s = tables.sessions
        self._m = m = tables.messages
        self._c = tables.cursors
        o = tables.owners
        alone = tables.owners.alias()
        mine = and_(s.c.user_id == bindparam("u"), s.c.session_id == bindparam("s"))
        session = (
            s.c.sid, s.c.user_id, s.c.session_id, s.c.head_seq, s.c.active_tokens, s.c.window_rev, s.c.last_put_at
        )  # fmt: skip
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
        standing = (
            # As a first row, its numbers where those of a message are, as text where a message has text: in columns of
            # their own they would be read again with each message, which takes a fifth longer. The revision tells
            # whether a remembered recall is still the newest.
            select(
                literal(0).label("seq"), cast(s.c.sid, String), null(), s.c.head_seq,
                cast(cast(rev, BigInteger), String), s.c.window_rev, null(), null(),
            )
            .select_from(
                s.outerjoin(o, o.c.owner == bindparam("owner"))
                .outerjoin(alone, alone.c.owner == session_keys(s.c.sid))
            )
            .where(mine)
        )  # fmt: skip
        active = and_(m.c.sid == s.c.sid, m.c.status == ACTIVE, m.c.seq > bindparam("after"))
        messages = select(*self._columns).select_from(s.join(m, active)).where(mine)
        self._window = standing.union_all(messages).order_by("seq")

    def drop_cached(self, user_id: str, session_id: str | None = None) -> None:
        """Let decoded windows go: of one session, or of all of a person."""
        self._cache.dropped += 1
        for key in list(self._cache.windows):
            if key[0] == user_id and session_id in (None, key[1]):
                self._cache.windows.pop(key, None)

    def cached(self, user_id: str, session_id: str | None = None) -> int:
        """How many decoded windows are held; see `drop_cached`."""
        return sum(key[0] == user_id and session_id in (None, key[1]) for key in list(self._cache.windows))

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
        in_window = select(func.min(m.c.seq)).where(m.c.sid == s.c.sid, m.c.status == ACTIVE, m.c.role.not_in(_SYSTEM))
        # Two levels down nothing is correlated by itself: it would be the window of everybody.
        left = func.coalesce(in_window.correlate(s).scalar_subquery() - 1, s.c.head_seq)
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
        known, dropped = self._cache.get(key), self._cache.dropped
        standing, rows = await self._read_window(user_id, session_id, known.head_seq)
        if standing is None:
            return Window()
        if known.sid and (standing.sid, standing.window_rev) != (known.sid, known.window_rev):
            known = Window()
            standing, rows = await self._read_window(user_id, session_id, 0)
            if standing is None:
                return Window()
        sid, head_seq, window_rev, owner_rev = standing
        if (sid, head_seq, owner_rev) == (known.sid, known.head_seq, known.owner_rev):
            return known
        new = await self._decode(rows, sid, session_id)
        window = Window(
            sid=sid,
            head_seq=head_seq,
            window_rev=window_rev,
            owner_rev=owner_rev,
            messages=(*known.messages, *new.messages),
            counters=(*known.counters, *new.counters),
            damaged=(*known.damaged, *new.damaged),
        )
        self._cache.put(key, window, dropped=dropped)
        return window

    async def _read_window(
        self, user_id: str, session_id: str, after: int
    ) -> tuple[_Standing | None, Sequence[RawMessage]]:
        async def work(connection: AsyncConnection) -> Sequence[RawMessage]:
            values = {"u": user_id, "s": session_id, "after": after, "owner": user_key(user_id)}
            found = await connection.execute(self._window, values)
            # As the driver brought them: SQLAlchemy's own rows take as long to make as SQLite takes to read these.
            return found.cursor.fetchall()

        rows = await self._database.read(work)
        if not rows:
            return None, ()
        _, sid, _, head_seq, owner_rev, window_rev, *_ = rows[0]
        return _Standing(int(sid), head_seq, window_rev, int(owner_rev)), rows[1:]

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
        return (await self._decode(rows, sid, session_id)).messages, rows[-1].seq if rows else 0

    async def at(self, owner: str, places: Collection[Place]) -> list[StoredMessage]:
        """Messages at known places of one owner's sessions, in order; forgotten ones are missing.

        Args:
            owner: Key of the owner; places in sessions of others are passed over.
            places: Where they stand.

        Returns:
            The messages.
        """
        m, s = self._m, self._s
        user_id = user_of(owner)
        mine = s.c.sid == session_of(owner) if user_id is None else s.c.user_id == user_id
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
                found += (await self._decode([row[1:] for row in rows], sid, rows[0][0])).messages
        return found

    async def flushed_until(self, sid: int) -> int:
        """The last sequence number that has left the window for good: system messages in it do not count."""
        m = self._m
        first = select(func.min(m.c.seq)).where(m.c.sid == sid, m.c.status == ACTIVE, m.c.role.not_in(_SYSTEM))
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

    async def _decode(self, rows: Sequence[RawMessage], sid: int, session_id: str) -> _Decoded:
        told = [row for row in rows if row[2] != GONE]  # a tombstone is no message
        found = _Decoded()
        for row, message in zip(told, await decode_rows(told, repeat(sid), repeat(session_id)), strict=True):
            if isinstance(message, StoredMessage):
                found.messages.append(message)
                found.counters.append(row[4])
                continue
            # One damaged row must not close the session. The error's text quotes the row: only its kind is logged.
            about = {"session_id": session_id, "seq": row[0], "error": type(message).__name__}
            _logger.error("damaged message skipped", extra=about)
            found.damaged.append(row[0])
        return found
