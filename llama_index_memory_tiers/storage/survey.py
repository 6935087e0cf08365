"""Survey: what a whole storage holds, for whoever runs it: counts, what waits, and rows page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, case, func, literal, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.moments import from_microseconds
from llama_index_memory_tiers.records import Place, Record, StoredMessage
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.owner_keys import session_keys, user_key, user_of
from llama_index_memory_tiers.storage.record_rows import places_of, readable
from llama_index_memory_tiers.storage.rows import GONE, Session, decode_rows, storable_ids
from llama_index_memory_tiers.storage.schema import VERSION, Tables

_PAGE_ROWS = 500


@dataclass(frozen=True, slots=True)
class Person:
    """One person's share of a storage.

    Args:
        user_id: Who; '' for the sessions of nobody.
        sessions: How many.
        messages: How many, forgotten ones left out.
        newest: When the newest message came.
    """

    user_id: str
    sessions: int
    messages: int
    newest: datetime


@dataclass(frozen=True, slots=True)
class Kept:
    """How many rows of one kind there are.

    Args:
        place: `window`, `archive` or `cleared` for messages, else the key of the block.
        kind: `message`, or the kind of the records.
        state: `live`, `superseded`, `put aside` or `expired`.
        count: How many.
        tokens: Their size.
    """

    place: str
    kind: str
    state: str
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a block has not absorbed.

    Args:
        block: Its key.
        sessions: Sessions in which it is behind.
        messages: Messages that wait.
        failing: Sessions in which its newest try failed.
        errors: Kinds of these failures.
        stale_claims: Sessions claimed by a worker that did not come back in time.
        dead_letters: Ranges put aside.
    """

    block: str
    sessions: int = 0
    messages: int = 0
    failing: int = 0
    errors: tuple[str, ...] = ()
    stale_claims: int = 0
    dead_letters: int = 0


@dataclass(frozen=True, slots=True)
class StoredText:
    """A text as it stands in a table.

    Args:
        kind: `message`, or the kind of the record.
        id: Public id.
        user_id: Whose session or records; '' for nobody's.
        text: All that stands in the row: JSON of a message, text and fields of a record.
        said: What of it people wrote or read.
        damaged: It cannot be read.
    """

    kind: str
    id: str
    user_id: str
    text: str
    said: str = ""
    damaged: bool = False


class Survey:
    """Statements that read across owners; nothing here is on the way into a context.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._t = tables

    # -- who -------------------------------------------------------------------------------------------------

    async def people(self) -> list[Person]:
        """Everybody who has a session, the one who spoke last first."""
        s, m = self._t.sessions, self._t.messages
        messages = (
            select(s.c.user_id, func.count().label("n"))
            .select_from(s.join(m, m.c.sid == s.c.sid))
            .where(m.c.status != GONE)
            .group_by(s.c.user_id)
            .subquery()
        )
        newest = func.max(s.c.last_put_at)
        query = (
            select(s.c.user_id, func.count(), func.coalesce(func.max(messages.c.n), 0), newest)
            .select_from(s.outerjoin(messages, messages.c.user_id == s.c.user_id))
            .group_by(s.c.user_id)
            .order_by(newest.desc(), s.c.user_id)
        )
        rows = await self._read(query)
        return [Person(user, int(n), int(said), from_microseconds(int(at))) for user, n, said, at in rows]

    async def due(self, consumers: Collection[str]) -> list[Session]:
        """Everybody's sessions in which not every consumer has absorbed everything, the oldest put first."""
        c, s = self._t.cursors, self._t.sessions
        columns = (
            s.c.sid, s.c.user_id, s.c.session_id, s.c.head_seq, s.c.active_tokens, s.c.window_rev, s.c.last_put_at
        )  # fmt: skip
        done = select(func.count()).where(
            c.c.sid == s.c.sid, c.c.consumer.in_(list(consumers)), c.c.pos >= s.c.head_seq
        )
        query = select(*columns).where(done.scalar_subquery() < len(consumers)).order_by(s.c.last_put_at, s.c.sid)
        return [Session(*row) for row in await self._read(query)]

    # -- how much --------------------------------------------------------------------------------------------

    async def kept(self, user_id: str | None = None, session_id: str | None = None, *, now: int) -> list[Kept]:
        """Count what is stored.

        Args:
            user_id: Of one person, '' for nobody's; `None` counts everybody's.
            session_id: Of one of the person's sessions.
            now: Clock, microseconds since 1970.

        Returns:
            Messages first, then records by block and kind.
        """
        m, s, r = self._t.messages, self._t.sessions, self._t.records
        places = case(
            (m.c.status == "active", "window"), (m.c.status == "archived", "archive"), else_=m.c.status
        ).label("place")
        messages = (
            select(places, func.count(), func.coalesce(func.sum(m.c.tokens), 0))
            .select_from(m.join(s, s.c.sid == m.c.sid))
            .where(m.c.status != GONE, *self._sessions_of(user_id, session_id))
            .group_by(places)
            .order_by(places.desc())
        )
        state = case(
            (r.c.superseded_by.is_not(None), "superseded"),
            (r.c.archived_at.is_not(None), "put aside"),
            (r.c.expires_at <= now, "expired"),
            else_="live",
        ).label("state")
        records = (
            select(r.c.block, r.c.kind, state, func.count(), func.coalesce(func.sum(r.c.tokens), 0))
            .where(*self._records_of(user_id, session_id))
            .group_by(r.c.block, r.c.kind, state)
            .order_by(r.c.block, r.c.kind, state)
        )
        found = [Kept(place, "message", "live", int(n), int(size)) for place, n, size in await self._read(messages)]
        return found + [Kept(row[0], row[1], row[2], int(row[3]), int(row[4])) for row in await self._read(records)]

    async def embeddings(self) -> dict[str, int]:
        """How many embeddings each model made."""
        e = self._t.embeddings
        query = select(e.c.model, func.count()).group_by(e.c.model).order_by(e.c.model)
        return {str(model): int(n) for model, n in await self._read(query)}

    async def waiting(self, *, now: int) -> list[Waiting]:
        """What each block has not absorbed.

        Args:
            now: Clock, microseconds since 1970.

        Returns:
            One entry per block that has ever read.
        """
        c, s, d = self._t.cursors, self._t.sessions, self._t.dead
        rows = await self._read(
            select(c.c.consumer, s.c.head_seq - c.c.pos, c.c.error, and_(c.c.claim.is_not(None), c.c.claim_until < now))
            .select_from(c.join(s, s.c.sid == c.c.sid))
        )  # fmt: skip
        counted = await self._read(select(d.c.consumer, func.count()).group_by(d.c.consumer))
        letters = {str(block): int(n) for block, n in counted}
        names = sorted({row[0] for row in rows} | set(letters))
        return [_waiting(name, [row for row in rows if row[0] == name], letters.get(name, 0)) for name in names]

    async def unfinished_forgetting(self) -> int:
        """Orders to forget that no start has finished yet."""
        j = self._t.forgetting
        return int((await self._read(select(func.count()).where(j.c.finished_at.is_(None))))[0][0])

    async def schema_version(self) -> tuple[int, int]:
        """Version of the tables, and the one that this release writes."""
        found = await self._read(select(func.max(self._t.versions.c.version)))
        return int(found[0][0] or 0), VERSION

    async def faults(self) -> list[str]:
        """What the database's own quick check finds wrong; only SQLite has one."""
        if not self._database.sqlite:
            return []
        found = [str(row[0]) for row in await self._read(text("PRAGMA quick_check(20)"))]
        return [] if found == ["ok"] else found

    # -- what ------------------------------------------------------------------------------------------------

    async def texts(self) -> AsyncIterator[list[StoredText]]:
        """Everything that is stored as text, page by page."""
        m, s, r = self._t.messages, self._t.sessions, self._t.records
        joined = m.join(s, s.c.sid == m.c.sid)
        messages = select(m.c.sid, m.c.seq, s.c.session_id, s.c.user_id, *self._raw()).select_from(joined)
        after = (0, 0)
        while True:
            beyond = or_(m.c.sid > after[0], and_(m.c.sid == after[0], m.c.seq > after[1]))
            query = messages.where(m.c.status != GONE, beyond).order_by(m.c.sid, m.c.seq).limit(_PAGE_ROWS)
            rows = await self._read(query)
            if rows:
                yield await _message_texts(rows)
                after = (rows[-1][0], rows[-1][1])
            if len(rows) < _PAGE_ROWS:
                break
        last = 0
        while True:
            query = select(r).where(r.c.id > last).order_by(r.c.id).limit(_PAGE_ROWS)
            rows = await self._read(query)
            if rows:
                yield _record_texts(rows)
                last = rows[-1].id
            if len(rows) < _PAGE_ROWS:
                return

    async def messages(
        self, user_id: str, session_id: str | None = None, ids: Collection[str] | None = None
    ) -> list[StoredMessage]:
        """A person's messages, session by session, also those that `areset` took out of the history.

        Args:
            user_id: Who; '' for nobody's.
            session_id: In this session only.
            ids: Only these.

        Returns:
            Those that can be read.
        """
        m, s = self._t.messages, self._t.sessions
        query = (
            select(m.c.sid, m.c.seq, s.c.session_id, s.c.user_id, *self._raw())
            .select_from(m.join(s, s.c.sid == m.c.sid))
            .where(m.c.status != GONE, *self._sessions_of(user_id, session_id))
            .order_by(m.c.sid, m.c.seq)
        )
        if ids is not None:
            query = query.where(m.c.uid.in_(storable_ids(ids)))
        return [message for message in await _decoded(await self._read(query)) if isinstance(message, StoredMessage)]

    async def records(
        self, user_id: str, session_id: str | None = None, ids: Collection[str] | None = None
    ) -> list[tuple[str, Record]]:
        """A person's records with their owners, oldest first, whatever became of them.

        Args:
            user_id: Who; '' for nobody's.
            session_id: Only what this session owns.
            ids: Only these.

        Returns:
            Those that can be read.
        """
        r = self._t.records
        query = select(r).where(*self._records_of(user_id, session_id)).order_by(r.c.id)
        if ids is not None:
            query = query.where(r.c.uid.in_(storable_ids(ids)))
        return await self._told(await self._read(query))

    async def beginning(
        self, prefix: str, user_id: str, session_id: str | None = None, *, at_most: int
    ) -> list[tuple[str, str]]:
        """Public ids of a person that begin with a text, for whoever typed only the first characters.

        Args:
            prefix: The beginning, letter by letter.
            user_id: Who; '' for nobody's.
            session_id: In this session only.
            at_most: So many messages, and so many records.

        Returns:
            Ids with their kinds, `message` or that of the record; an id that is the whole text is among them.
        """
        m, s, r = self._t.messages, self._t.sessions, self._t.records
        if not storable_ids([prefix]):
            return []
        messages = (
            select(m.c.uid, literal("message"))
            .select_from(m.join(s, s.c.sid == m.c.sid))
            .where(
                m.c.status != GONE,
                func.substr(m.c.uid, 1, len(prefix)) == prefix,
                *self._sessions_of(user_id, session_id),
            )
            .distinct()
            .order_by(m.c.uid)
        )
        records = (
            select(r.c.uid, r.c.kind)
            .where(func.substr(r.c.uid, 1, len(prefix)) == prefix, *self._records_of(user_id, session_id))
            .order_by(r.c.uid)
        )
        found = [*await self._read(messages.limit(at_most)), *await self._read(records.limit(at_most))]
        return [(uid, kind) for uid, kind in found]

    async def derived(self, user_id: str, place: tuple[int, int]) -> list[tuple[str, Record]]:
        """A person's records that came from one message, with their owners."""
        r, s = self._t.records, self._t.sources
        from_it = select(s.c.record_id).where(s.c.sid == place[0], s.c.seq == place[1])
        query = select(r).where(*self._records_of(user_id, None), r.c.id.in_(from_it)).order_by(r.c.id)
        return await self._told(await self._read(query))

    async def _told(self, rows: Sequence[Any]) -> list[tuple[str, Record]]:
        async def work(connection: AsyncConnection) -> dict[int, tuple[Place, ...]]:
            return await places_of(connection, self._t.sources, [row.id for row in rows])

        found = readable(rows, await self._database.read(work) if rows else {})
        return [(row.owner, found[row.id]) for row in rows if row.id in found]

    # -- inside ----------------------------------------------------------------------------------------------

    def _raw(self) -> tuple[Any, ...]:
        m = self._t.messages
        return m.c.seq, m.c.uid, m.c.status, m.c.tokens, m.c.counter, m.c.created_at, m.c.data, m.c.meta

    def _sessions_of(self, user_id: str | None, session_id: str | None) -> list[Any]:
        s = self._t.sessions
        found = [] if user_id is None else [s.c.user_id == user_id]
        return found if session_id is None else [*found, s.c.session_id == session_id]

    def _records_of(self, user_id: str | None, session_id: str | None) -> list[Any]:
        if user_id is None and session_id is None:
            return []
        r, s = self._t.records, self._t.sessions
        own = select(session_keys(s.c.sid)).where(*self._sessions_of(user_id, session_id))
        mine = r.c.owner.in_(own)
        return [or_(r.c.owner == user_key(user_id), mine) if user_id and session_id is None else mine]

    async def _read(self, query: Any) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query)).all()

        return await self._database.read(work)


def _waiting(block: str, rows: Sequence[Any], letters: int) -> Waiting:
    return Waiting(
        block,
        sessions=sum(left > 0 for _, left, _, _ in rows),
        messages=sum(max(0, left) for _, left, _, _ in rows),
        failing=sum(error is not None for _, _, error, _ in rows),
        errors=tuple(sorted({error for _, _, error, _ in rows if error is not None})),
        stale_claims=sum(bool(stale) for _, _, _, stale in rows),
        dead_letters=letters,
    )


async def _decoded(rows: Sequence[Any]) -> list[StoredMessage | Exception]:
    return await decode_rows([row[4:] for row in rows], (row[0] for row in rows), (row[2] for row in rows))


async def _message_texts(rows: Sequence[Any]) -> list[StoredText]:
    found = []
    for row, message in zip(rows, await _decoded(rows), strict=True):
        said = message.text if isinstance(message, StoredMessage) else None
        found.append(StoredText("message", row.uid, row.user_id, row.data or "", said or "", damaged=said is None))
    return found


def _record_texts(rows: Sequence[Any]) -> list[StoredText]:
    found = readable(rows, {})
    users = [user_of(row.owner) or "" for row in rows]
    return [
        StoredText(row.kind, row.uid, user, f"{row.text}\n{row.data}", row.text, damaged=row.id not in found)
        for row, user in zip(rows, users, strict=True)
    ]
