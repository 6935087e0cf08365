"""Exporter: one person's or one session's rows as lines, from one moment, page by page."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, BinaryIO

from sqlalchemy import Select, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.owner_keys import session_key, session_of, user_key
from llama_index_memory_tiers.storage.rows import chunks
from llama_index_memory_tiers.storage.schema import UNFINISHED, Tables
from llama_index_memory_tiers.storage.transfer import LineWriter, Progress

_PAGE_ROWS = 500

MESSAGE_FIELDS = ("seq", "uid", "status", "role", "tokens", "counter", "created_at", "hash", "data", "meta")
RECORD_FIELDS = (
    "uid", "kind", "block", "text", "data", "said_at", "created_at", "expires_at", "superseded_by", "archived_at",
    "speaker", "tokens",
)  # fmt: skip


class Exporter:
    """Reads rows; private numbers become the file's own, so that two databases write the same bytes.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._t = tables

    async def export(
        self, file: BinaryIO, user_id: str, session_id: str | None, progress: Progress | None
    ) -> dict[str, int]:
        """Write an export.

        Args:
            file: Where to; begun anew when the database asks for another try.
            user_id: Whose, or ''.
            session_id: This session only; `None` for all of the person's.
            progress: Told after each page.

        Returns:
            How many rows of each kind were written.
        """

        async def work(connection: AsyncConnection) -> dict[str, int]:
            file.seek(0)
            file.truncate()
            writer = LineWriter(file)
            # All pages from one moment: a message and what was learnt from it are both there, or neither is.
            if self._database.sqlite:
                await connection.exec_driver_sql("BEGIN")
            else:
                await connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            try:
                await self._write(connection, writer, user_id, session_id, progress)
            finally:
                if self._database.sqlite:
                    await connection.exec_driver_sql("ROLLBACK")
            return writer.counts

        return await self._database.read(work)

    async def _write(
        self,
        connection: AsyncConnection,
        writer: LineWriter,
        user_id: str,
        session_id: str | None,
        progress: Progress | None,
    ) -> None:
        s = self._t.sessions
        query = select(s).where(s.c.user_id == user_id).order_by(s.c.sid)
        if session_id is not None:
            query = query.where(s.c.session_id == session_id)
        sessions = (await connection.execute(query)).all()
        numbers = {row.sid: number for number, row in enumerate(sessions, 1)}
        records = self._records_of(user_id, numbers, whole=session_id is None)
        total = await self._total(connection, numbers, records) if progress is not None else 0
        writer.header(user_id)
        for row in sessions:
            fields = {name: getattr(row, name) for name in ("session_id", "head_seq", "active_tokens", "last_put_at")}
            writer.row("session", {"n": numbers[row.sid], **fields})
            async for page in self.messages(connection, row.sid):
                await asyncio.to_thread(_write_messages, writer, numbers[row.sid], page)
                _tell(progress, writer, total)
            await self._write_cursors(connection, writer, row.sid, numbers[row.sid])
        for query in records:
            await self._write_records(connection, writer, query, numbers, progress, total)
        writer.end()
        _tell(progress, writer, total)

    async def _total(
        self, connection: AsyncConnection, numbers: Mapping[int, int], records: Sequence[Select[Any]]
    ) -> int:
        t = self._t
        counts = [select(func.count()).select_from(query.subquery()) for query in records]
        for part in chunks(list(numbers)):
            tables = (t.messages, t.cursors, t.dead)
            counts += [select(func.count()).select_from(table).where(table.c.sid.in_(part)) for table in tables]
        return len(numbers) + sum([(await connection.execute(query)).scalar_one() for query in counts])

    async def messages(self, connection: AsyncConnection, sid: int) -> AsyncIterator[Sequence[Any]]:
        """All rows of a session, in pages of the columns `MESSAGE_FIELDS`."""
        m = self._t.messages
        query = select(*(m.c[name] for name in MESSAGE_FIELDS)).where(m.c.sid == sid).order_by(m.c.seq)
        after = 0
        while True:
            rows = (await connection.execute(query.where(m.c.seq > after).limit(_PAGE_ROWS))).all()
            if rows:
                yield rows
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].seq

    async def _write_cursors(self, connection: AsyncConnection, writer: LineWriter, sid: int, number: int) -> None:
        c, d = self._t.cursors, self._t.dead
        cursors = await connection.execute(select(c.c.consumer, c.c.pos, c.c.attempts, c.c.error).where(c.c.sid == sid))
        # Sorted here: databases sort texts by rules of their own.
        for row in sorted(cursors, key=lambda row: str(row.consumer)):
            writer.row("cursor", {"n": number, **row._mapping})  # noqa: SLF001  # SQLAlchemy's public name for it
        columns = (d.c.consumer, d.c.lo, d.c.hi, d.c.error, d.c.at)
        for letter in await connection.execute(select(*columns).where(d.c.sid == sid).order_by(d.c.id)):
            writer.row("dead", {"n": number, **letter._mapping})  # noqa: SLF001  # SQLAlchemy's public name for it

    # -- records ---------------------------------------------------------------------------------------------

    def _records_of(self, user_id: str, numbers: Mapping[int, int], *, whole: bool) -> list[Select[Any]]:
        """Statements for all records of these owners; of a person's, when only a session is meant, its share."""
        r, s = self._t.records, self._t.sources
        columns = (r.c.id, r.c.owner, r.c.sid, r.c.seq, r.c.parent, *(r.c[name] for name in RECORD_FIELDS))
        person = r.c.owner == user_key(user_id)
        if not whole:
            person = and_(person, exists().where(s.c.record_id == r.c.id, s.c.sid.in_(list(numbers))))
        own = [r.c.owner.in_([session_key(sid) for sid in part]) for part in chunks(list(numbers))]
        if len(own) <= 1:
            mine = [*own, *([person] if user_id else [])]
            return [select(*columns).where(or_(*mine))] if mine else []
        return [select(*columns).where(one) for one in ([*own, person] if user_id else own)]

    async def _write_records(
        self,
        connection: AsyncConnection,
        writer: LineWriter,
        query: Select[Any],
        numbers: Mapping[int, int],
        progress: Progress | None,
        total: int,
    ) -> None:
        r = self._t.records
        after = 0
        while True:
            rows = (await connection.execute(query.where(r.c.id > after).order_by(r.c.id).limit(_PAGE_ROWS))).all()
            found = await self._projections(connection, [row.id for row in rows])
            await asyncio.to_thread(_write_page, writer, rows, found, numbers)
            _tell(progress, writer, total)
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].id

    async def _projections(self, connection: AsyncConnection, ids: Collection[int]) -> dict[str, dict[int, Any]]:
        """What belongs to records, by row."""
        t = self._t
        found: dict[str, dict[int, Any]] = {"sources": {}, "vectors": {}, "terms": {}, "visits": {}}
        for part in chunks(list(ids)):
            for row in await connection.execute(select(t.sources).where(t.sources.c.record_id.in_(part))):
                found["sources"].setdefault(row.record_id, []).append((row.sid, row.seq))
            finished = ~t.embeddings.c.model.startswith(UNFINISHED, autoescape=True)
            for row in await connection.execute(
                select(t.embeddings).where(t.embeddings.c.record_id.in_(part), finished)
            ):
                found["vectors"].setdefault(row.record_id, {})[row.model] = _text(row.vec)
            for row in await connection.execute(select(t.terms).where(t.terms.c.record_id.in_(part))):
                found["terms"][row.record_id] = [_text(row.ids), _text(row.counts)]
            for row in await connection.execute(select(t.visits).where(t.visits.c.record_id.in_(part))):
                found["visits"][row.record_id] = [row.n, row.last_at]
        return found


def message_line(number: int, row: Any) -> dict[str, Any]:
    """One message as it stands in the file."""
    return {"n": number, **dict(zip(MESSAGE_FIELDS, row, strict=True))}


def _write_messages(writer: LineWriter, number: int, rows: Sequence[Any]) -> None:
    for row in rows:
        writer.row("message", message_line(number, row))


def _write_page(
    writer: LineWriter, rows: Sequence[Any], found: Mapping[str, Mapping[int, Any]], numbers: Mapping[int, int]
) -> None:
    for row in rows:
        session = session_of(row.owner)
        vectors = found["vectors"].get(row.id, {})
        sources = sorted((numbers[sid], seq) for sid, seq in found["sources"].get(row.id, ()) if sid in numbers)
        fields = {
            **{name: getattr(row, name) for name in RECORD_FIELDS},
            "owner": None if session is None else numbers[session],
            "place": [numbers[row.sid], row.seq] if row.sid in numbers else None,
            "sources": sources,
            "vectors": {model: vectors[model] for model in sorted(vectors)},
            "terms": found["terms"].get(row.id),
        }
        # Left out where there is none, as files of the first version did not know them.
        rare = {"parent": row.parent, "visits": found["visits"].get(row.id)}
        fields |= {name: value for name, value in rare.items() if value is not None}
        writer.row("record", fields)


def _text(value: bytes) -> str:
    return base64.b64encode(bytes(value)).decode()


def _tell(progress: Progress | None, writer: LineWriter, total: int) -> None:
    if progress is not None:
        progress(sum(writer.counts.values()), total)
