"""Importer: an export becomes rows again, in one transaction: all of it or nothing."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, BinaryIO

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.exporting import MESSAGE_FIELDS, RECORD_FIELDS, Exporter, message_line
from llama_index_memory_tiers.storage.owner_keys import session_key, user_key
from llama_index_memory_tiers.storage.rows import chunks
from llama_index_memory_tiers.storage.schema import Tables, owner_touch
from llama_index_memory_tiers.storage.transfer import Progress, TransferReport, check_file, damaged, rows_of

_BATCH_ROWS = 500


@dataclass(slots=True)
class _Import:
    """What one try of an import has met so far.

    Args:
        user_id: Whose.
        session_id: The only session that may be in the file; `None` for any.
        redactor: Takes secrets out, or `None`.
        sids: Private row of each session, by the file's number.
        known: Numbers of sessions that were there already, with what is left to compare.
        revisions: The owners' new revisions.
    """

    user_id: str
    session_id: str | None
    redactor: Redactor | None
    sids: dict[int, int] = field(default_factory=dict)
    known: dict[int, AsyncGenerator[Any, None]] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    records: int = 0


class Importer:
    """Writes what `Exporter` has read.

    Args:
        database: Where.
        tables: The tables.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._t = tables
        self._exporter = Exporter(database, tables)
        self._touch = owner_touch(tables)

    async def load(
        self,
        file: BinaryIO,
        user_id: str,
        session_id: str | None,
        progress: Progress | None,
        redactor: Redactor | None,
    ) -> TransferReport:
        """Take an export in.

        Args:
            file: At its beginning; read twice.
            user_id: Whose it has to be, or ''.
            session_id: The only session that may be in it; `None` for any.
            progress: Told after each batch.
            redactor: Takes secrets out, or `None`.

        Returns:
            What was stored.

        Raises:
            ConfigurationError: It is not whole, or a session of it holds something else here; nothing was stored.
        """
        counts = await asyncio.to_thread(check_file, file, user_id)
        total = sum(counts.values())

        async def work(connection: AsyncConnection) -> TransferReport:
            state = _Import(user_id, session_id, redactor)
            rows, done = (_clean(redactor, kind, fields) for kind, fields in rows_of(file)), 0
            while batch := await asyncio.to_thread(lambda: list(islice(rows, _BATCH_ROWS))):
                for kind, group in groupby(batch, key=lambda row: row[0]):
                    await self._take(connection, state, kind, [fields for _, fields in group])
                done += len(batch)
                if progress is not None:
                    progress(done, total)
            await self._check_rest(state)
            return TransferReport(
                len(state.sids) - len(state.known), state.messages, state.records, skipped=len(state.known)
            )

        try:
            return await self._database.write(work)
        except IntegrityError as error:
            raise _taken("something in it") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise damaged(f"a line lacks what it needs ({type(error).__name__})") from error

    async def _take(self, connection: AsyncConnection, state: _Import, kind: str, rows: Sequence[Any]) -> None:
        if kind == "session":
            for fields in rows:
                await self._take_session(connection, state, fields)
        elif kind == "message":
            await self._take_messages(connection, state, rows)
        elif kind == "record":
            await self._take_records(connection, state, rows)
        else:
            table = self._t.cursors if kind == "cursor" else self._t.dead
            new = [_placed(fields, state.sids) for fields in rows if fields["n"] not in state.known]
            if kind == "cursor":
                new = [{**fields, "claim_until": 0} for fields in new]
            if new:
                await connection.execute(insert(table), new)

    async def _take_session(self, connection: AsyncConnection, state: _Import, fields: Mapping[str, Any]) -> None:
        s = self._t.sessions
        number, name = fields["n"], Scope(fields["session_id"]).session_id
        if state.session_id not in {None, name}:
            raise ConfigurationError(
                f"An export with the session {name!r:.100} was given to another session's memory.",
                allowed="A memory without user_id takes in its own session.",
                remedy="Make the memory with that session_id; nothing was stored.",
            )
        mine = select(s.c.sid).where(s.c.user_id == state.user_id, s.c.session_id == name).with_for_update()
        found = (await connection.execute(mine)).scalar()
        if found is not None:
            state.sids[number], state.known[number] = found, self._lines(connection, number, found)
            return
        values = {key: fields[key] for key in ("session_id", "head_seq", "active_tokens", "last_put_at")}
        made = insert(s).values(user_id=state.user_id, window_rev=0, **values).returning(s.c.sid)
        state.sids[number] = (await connection.execute(made)).scalar_one()

    async def _take_messages(self, connection: AsyncConnection, state: _Import, rows: Sequence[Any]) -> None:
        new = []
        for fields in rows:
            here = state.known.get(fields["n"])
            if here is None:
                new.append({"sid": state.sids[fields["n"]], **{name: fields[name] for name in MESSAGE_FIELDS}})
            else:
                found = await anext(here, None)
                # What is here may have been stored with its secrets, by a memory without redaction.
                if found is None or _said(_clean(state.redactor, "message", found)[1]) != _said(fields):
                    raise _taken("a session of it")
        if new:
            await connection.execute(insert(self._t.messages), new)
            state.messages += len(new)

    async def _lines(self, connection: AsyncConnection, number: int, sid: int) -> AsyncGenerator[Any, None]:
        """Messages of a session that is here, as they would stand in the file."""
        async for page in self._exporter.messages(connection, sid):
            for row in page:
                yield message_line(number, row)

    @staticmethod
    async def _check_rest(state: _Import) -> None:
        """Nothing may stand behind what was compared."""
        for here in state.known.values():
            if await anext(here, None) is not None:
                raise _taken("a session of it")

    # -- records ---------------------------------------------------------------------------------------------

    async def _take_records(self, connection: AsyncConnection, state: _Import, rows: Sequence[Any]) -> None:
        r = self._t.records
        here: dict[str, str] = {}
        for part in chunks([fields["uid"] for fields in rows]):
            found = await connection.execute(select(r.c.uid, r.c.owner).where(r.c.uid.in_(part)))
            here |= {row.uid: row.owner for row in found}
        if any(self._owner(state, fields) != here.get(fields["uid"], self._owner(state, fields)) for fields in rows):
            raise _taken("a record of it")
        new = [fields for fields in rows if fields["uid"] not in here and not self._is_known(state, fields)]
        if not new:
            return
        await connection.execute(insert(r), [await self._row(connection, state, fields) for fields in new])
        ids: dict[str, int] = {}
        for part in chunks([fields["uid"] for fields in new]):
            ids |= {
                row.uid: row.id for row in await connection.execute(select(r.c.uid, r.c.id).where(r.c.uid.in_(part)))
            }
        await self._project(connection, state, [(ids[fields["uid"]], fields) for fields in new])
        state.records += len(new)

    @staticmethod
    def _is_known(state: _Import, fields: Mapping[str, Any]) -> bool:
        """Whether a record came with a session that is here already; without any, whether all sessions are."""
        numbers = {number for number, _ in fields["sources"]}
        if fields["owner"] is not None:
            numbers.add(fields["owner"])
        return bool(state.known) and (numbers or set(state.sids)) <= set(state.known)

    @staticmethod
    def _owner(state: _Import, fields: Mapping[str, Any]) -> str:
        if fields["owner"] is not None:
            return session_key(state.sids[fields["owner"]])
        if not state.user_id:
            raise damaged("a record belongs to no one")
        return user_key(state.user_id)

    async def _row(self, connection: AsyncConnection, state: _Import, fields: Mapping[str, Any]) -> dict[str, Any]:
        owner = self._owner(state, fields)
        if owner not in state.revisions:
            row = (await connection.execute(self._touch, {"owner": owner, "raise_epoch": 0})).one()
            state.revisions[owner] = row[1]
        place = fields["place"]
        return {
            **{name: fields[name] for name in RECORD_FIELDS},
            "owner": owner,
            "parent": fields.get("parent"),
            "rev": state.revisions[owner],
            "sid": None if place is None else state.sids[place[0]],
            "seq": None if place is None else place[1],
        }

    async def _project(
        self, connection: AsyncConnection, state: _Import, records: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> None:
        t = self._t
        sources = [
            {"record_id": row, "sid": state.sids[number], "seq": seq}
            for row, fields in records
            for number, seq in fields["sources"]
        ]
        vectors = [
            {"record_id": row, "model": model, "vec": base64.b64decode(vector)}
            for row, fields in records
            for model, vector in fields["vectors"].items()
        ]
        terms = [
            {"record_id": row, **dict(zip(("ids", "counts"), map(base64.b64decode, fields["terms"]), strict=True))}
            for row, fields in records
            if fields["terms"] is not None
        ]
        visits = [
            {"record_id": row, "n": fields["visits"][0], "last_at": fields["visits"][1]}
            for row, fields in records
            if "visits" in fields
        ]
        for table, rows in ((t.sources, sources), (t.embeddings, vectors), (t.terms, terms), (t.visits, visits)):
            if rows:
                await connection.execute(insert(table), rows)


def _clean(redactor: Redactor | None, kind: str, fields: Any) -> tuple[str, Any]:
    """A row without secrets; vectors and terms stay, which hold no word."""
    if redactor is None or kind not in {"message", "record"}:
        return kind, fields
    names = ("meta",) if kind == "message" else ("text", "data", "speaker")
    cleaned = {**fields, **{name: redactor.value(fields[name]) for name in names}}
    if kind == "message" and isinstance(fields["data"], str):
        data = _clean_message(redactor, fields["data"])
        if data != fields["data"]:  # no counter: the tokens are counted by the first memory that reads the window
            cleaned |= {"data": data, "hash": codec.content_hash(data), "counter": ""}
    return kind, cleaned


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the count of its tokens, which changes when a memory with another counter reads it."""
    return {name: value for name, value in fields.items() if name not in {"tokens", "counter"}}


def _clean_message(redactor: Redactor, data: str) -> str:
    try:
        message = codec.decode_message(data)
        kept = redactor.message(message)
        return data if kept is message else codec.encode_message(kept)
    except Exception:  # noqa: BLE001  # damaged: pydantic, json and base64 each raise their own
        return str(redactor.value(data))


def _placed(fields: Mapping[str, Any], sids: Mapping[int, int]) -> dict[str, Any]:
    return {"sid": sids[fields["n"]], **{name: value for name, value in fields.items() if name != "n"}}


def _taken(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"An export was given, but {what} is here already with other content.",
        allowed="A session that is imported does not exist yet, or is the same word for word.",
        remedy="Import into another database or table_name, as what was forgotten here is not brought back; "
        "nothing was stored.",
    )
