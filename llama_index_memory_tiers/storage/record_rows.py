"""Rows of long-term memories as values."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Table, and_, func, not_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.moments import from_microseconds
from llama_index_memory_tiers.records import Place, Record
from llama_index_memory_tiers.storage.rows import chunks

PAGE = "page"
"""Kind of records without a text of their own: it is what was said in the messages that they come from."""

_logger = logging.getLogger(__name__)


def owned(records: Table, owner: Any) -> Any:
    """Condition that rows which are found by their ids are this owner's.

    Behind coalesce the owner is a check, not a way in: SQLite else reads all rows of the owner for thirty ids.
    """
    return func.coalesce(records.c.owner, "") == owner


def is_page(records: FromClause) -> ColumnElement[bool]:
    """Condition that a row is a page."""
    return and_(records.c.kind == PAGE, records.c.text == "")


def indexed(records: Table) -> ColumnElement[bool]:
    """Condition that an index knows a row: pages are found through their topics, and would move others' scores."""
    return not_(is_page(records))


def _record(row: Any, sources: tuple[Place, ...]) -> Record:
    data = json.loads(row.data)
    if not isinstance(data, dict):
        raise TypeError("no fields")
    return Record(
        id=row.uid,
        kind=row.kind,
        block=row.block,
        text=row.text,
        data=data,
        created_at=from_microseconds(row.created_at),
        said_at=_moment(row.said_at),
        expires_at=_moment(row.expires_at),
        superseded_by=row.superseded_by,
        archived_at=_moment(row.archived_at),
        sources=sources,
        parent=row.parent,
        tokens=row.tokens,
    )


async def places_of(connection: AsyncConnection, sources: Table, ids: Sequence[int]) -> dict[int, tuple[Place, ...]]:
    """Read where records come from.

    Args:
        connection: Where.
        sources: The table of sources.
        ids: Rows of records.

    Returns:
        The places of each record in the order of the log; records without any are missing.
    """
    found: dict[int, list[Place]] = {}
    for part in chunks(ids):
        query = (
            select(sources.c.record_id, sources.c.sid, sources.c.seq)
            .where(sources.c.record_id.in_(part))
            .order_by(sources.c.sid, sources.c.seq)
        )
        for number, sid, seq in await connection.execute(query):
            found.setdefault(number, []).append((sid, seq))
    # Made once: a tuple that grows is copied for each of a long session's messages.
    return {number: tuple(places) for number, places in found.items()}


def readable(rows: Iterable[Any], places: Mapping[int, tuple[Place, ...]]) -> dict[int, Record]:
    """Records by row; a damaged one must not hide the others."""
    found = {row.id: _read(row, places.get(row.id, ())) for row in rows}
    return {number: record for number, record in found.items() if record is not None}


def _read(row: Any, sources: tuple[Place, ...]) -> Record | None:
    try:
        return _record(row, sources)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        about = {"record": row.uid, "error": type(error).__name__}
        _logger.error("damaged record skipped", extra=about)  # noqa: TRY400  # the error's text quotes the row
        return None


def _moment(count: int | None) -> datetime | None:
    return None if count is None else from_microseconds(count)
