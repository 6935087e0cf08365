"""Take over the table of LlamaIndex's own chat store."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.log import MessageLog
from llama_index_memory_tiers.storage.rows import ACTIVE, Entry
from llama_index_memory_tiers.storage.schema import is_stock

_logger = logging.getLogger(__name__)
_MOST_NAMES = 10


async def adopt_stock_table(
    database: Database,
    log: MessageLog,
    table: str,
    schema: str | None,
    *,
    user_id: str,
    redactor: Redactor | None,
    now: int,
) -> int:
    """Copy every message of a stock table into the log, session by session.

    Args:
        database: Holds both.
        log: Where to write.
        table: Name of the stock table, a plain identifier.
        schema: Its database schema.
        user_id: Whose sessions they become, or '' for nobody's.
        redactor: Takes secrets out, or `None`.
        now: Clock, microseconds since 1970.

    Returns:
        How many messages were new; the row number makes their uid, so that repeating is harmless.

    Raises:
        ConfigurationError: There is no such table, or it is not one of LlamaIndex's.
    """
    name = f'"{schema}"."{table}"' if schema else f'"{table}"'
    query = text(f"SELECT id, key, timestamp, role, status, data FROM {name} ORDER BY key, timestamp, id")

    async def work(connection: AsyncConnection) -> Sequence[Row[Any]]:
        await connection.run_sync(_check_stock, table, schema)
        return (await connection.execute(query)).all()

    stored = 0
    for key, rows in groupby(await database.read(work), key=lambda row: row.key):
        kept = [(row, entry) for row in rows if (entry := _entry(row, table, redactor)) is not None]
        if not kept:
            continue
        result = await log.append(user_id, key, [entry for _, entry in kept], now=now)
        stored += result.stored
        # All that stand archived there, not the new ones alone: a crash may have come between append and archive.
        gone = {entry.uid for row, entry in kept if row.status != ACTIVE}
        found, _ = await log.read(result.sid, key, statuses=(ACTIVE,))
        await log.archive(user_id, key, [message.seq for message in found if message.id in gone])
    return stored


def _check_stock(connection: Connection, table: str, schema: str | None) -> None:
    if inspect(connection).has_table(table, schema=schema) and is_stock(connection, table, schema):
        return
    names = inspect(connection).get_table_names(schema=schema)
    known = [name for name in names if is_stock(connection, name, schema)]
    raise ConfigurationError(
        f"stock_table={table!r} was given.",
        allowed="It is a table of LlamaIndex's SQLAlchemyChatStore in this storage's database, which holds "
        f"{', '.join(known[:_MOST_NAMES]) or 'none'}.",
        remedy="Correct stock_table, the storage's address or db_schema; nothing was taken over.",
    )


def _entry(row: Any, table: str, redactor: Redactor | None) -> Entry | None:
    try:
        data = row.data if isinstance(row.data, dict) else json.loads(row.data)
        written = codec.to_json(data)
        message = codec.decode_message(written)
        kept = message if redactor is None else redactor.message(message)
        if kept is not message:
            written = codec.encode_message(kept)
    except Exception as error:  # noqa: BLE001  # pydantic, json and base64 each raise their own
        # Their texts quote the row, so that only the kind is logged.
        _logger.error("damaged message left behind", extra={"row": row.id, "error": type(error).__name__})  # noqa: TRY400
        return None
    # No counter: the tokens are counted by the first memory that reads the window.
    return Entry(f"{table}:{row.id}", row.role, 0, "", row.timestamp // 1000, written)
