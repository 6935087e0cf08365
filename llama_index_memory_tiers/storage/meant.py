"""Meant: the statements that find what a selection means, before it is forgotten and when one looks again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from sqlalchemy import exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.owner_keys import owner_keys, session_keys, user_key
from llama_index_memory_tiers.storage.rows import GONE, chunks
from llama_index_memory_tiers.storage.schema import Tables
from llama_index_memory_tiers.storage.selection import Selection

_PAGE_ROWS = 200


class Meant:
    """Finds messages and records that a selection means, page by page.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._t = tables

    async def sessions(self, connection: AsyncConnection, selection: Selection) -> dict[int, int]:
        """Private row → newest sequence number of the sessions that may hold what is meant."""
        s, m = self._t.sessions, self._t.messages
        query = select(s.c.sid, s.c.head_seq).where(s.c.user_id == selection.user_id)
        queries = [query]
        if selection.session_id is not None:
            queries = [query.where(s.c.session_id == selection.session_id)]
        elif selection.ids is not None:  # of a person's thousand sessions the few that are meant
            meant = [exists().where(m.c.sid == s.c.sid, m.c.uid.in_(part)) for part in chunks(selection.ids)]
            queries = [query.where(one) for one in meant]
        return {row.sid: row.head_seq for one in queries for row in await connection.execute(one)}

    async def messages(self, selection: Selection, sid: int) -> AsyncIterator[list[Any]]:
        """Messages of a session that are meant and still leave a trace, page by page."""
        m, s = self._t.messages, self._t.sources
        trace = or_(m.c.status != GONE, exists().where(s.c.sid == m.c.sid, s.c.seq == m.c.seq))
        columns = (m.c.seq, m.c.uid) if selection.filter is None else (m.c.seq, m.c.uid, m.c.role, m.c.data, m.c.meta)
        base = select(*columns).where(m.c.sid == sid, m.c.seq <= selection.heads[sid], trace)
        if selection.before is not None:
            base = base.where(m.c.created_at < selection.before)
        for part in chunks(selection.ids) if selection.ids is not None else [None]:
            query = base if part is None else base.where(m.c.uid.in_(part))
            after = 0
            while True:
                rows = await self._read(query.where(m.c.seq > after).order_by(m.c.seq).limit(_PAGE_ROWS))
                yield [row for row in rows if _means(selection, row)]
                if len(rows) < _PAGE_ROWS:
                    break
                after = rows[-1].seq

    def _owners(self, selection: Selection) -> set[str]:
        """Whose records may be meant: a session's own, and a person's when not only a session is meant."""
        user = selection.user_id if selection.session_id is None else ""
        return owner_keys(user, selection.heads)

    def record_queries(self, selection: Selection) -> list[Any]:
        """Statements that find records which are meant themselves: named, or without any source."""
        r, s = self._t.records, self._t.sources
        base = select(r.c.id, r.c.uid, r.c.owner, r.c.block, r.c.superseded_by, r.c.text, r.c.data, r.c.speaker)
        if selection.before is not None:
            base = base.where(func.coalesce(r.c.said_at, r.c.created_at) < selection.before)
        if not selection.names_records:
            base = base.where(~exists().where(s.c.record_id == r.c.id))
        named = [base] if selection.ids is None else [base.where(r.c.uid.in_(part)) for part in chunks(selection.ids)]
        if selection.ids is not None and selection.session_id is None:
            return [query.where(self._of_person(selection.user_id)) for query in named]
        owners = sorted(self._owners(selection))
        found = [query.where(r.c.owner.in_(part)) for query in named for part in chunks(owners)]
        if selection.session_id is not None and selection.user_id and selection.names_records:
            # Of what is known about the person, what came from this session.
            here = exists().where(s.c.record_id == r.c.id, s.c.sid.in_(list(selection.heads)))
            found += [query.where(r.c.owner == user_key(selection.user_id), here) for query in named]
        return found

    def _of_person(self, user_id: str) -> Any:
        r, s = self._t.records, self._t.sessions
        own = select(session_keys(s.c.sid)).where(s.c.user_id == user_id)
        return or_(r.c.owner == user_key(user_id), r.c.owner.in_(own))

    async def records(self, selection: Selection, query: Any, until: int) -> AsyncIterator[list[Any]]:
        """Records that a statement of `record_queries` finds, up to a row, page by page."""
        r = self._t.records
        after = 0
        while True:
            rows = await self._read(query.where(r.c.id > after, r.c.id <= until).order_by(r.c.id).limit(_PAGE_ROWS))
            wanted = selection.filter
            yield [row for row in rows if wanted is None or wanted.matches_record(row.text, row.data, row.speaker)]
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].id

    async def _read(self, query: Any) -> Sequence[Any]:
        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query)).all()

        return await self._database.read(work)


def _means(selection: Selection, row: Any) -> bool:
    if selection.filter is None:
        return True
    return row.data is not None and selection.filter.matches_message(row.role, row.data, row.meta)
