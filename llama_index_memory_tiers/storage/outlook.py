"""Outlook: what a selection would take, counted before anything is forgotten."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers.storage.database import Database
from llama_index_memory_tiers.storage.erasing import Eraser
from llama_index_memory_tiers.storage.meant import Meant
from llama_index_memory_tiers.storage.selection import Selection

_ANY_ROW = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would go.

    Args:
        messages: How many messages.
        records: How many records: those that are meant, that came from the messages, and the parts of both.
        message: Id of the first message.
        record: Id of the first record.
    """

    messages: int = 0
    records: int = 0
    message: str | None = None
    record: str | None = None


async def foresee(database: Database, meant: Meant, eraser: Eraser, selection: Selection) -> Outlook:
    """Count what a selection would take; nothing is changed.

    Args:
        database: Where.
        meant: Finds what is meant.
        eraser: Finds what goes along.
        selection: What; its heads are read anew.

    Returns:
        The counts.
    """
    heads = await database.read(lambda connection: meant.sessions(connection, selection))
    whole = replace(selection, heads=heads)
    messages: list[str] = []
    records: dict[int, Any] = {}
    for sid in heads:
        async for page in meant.messages(whole, sid):
            messages += [row.uid for row in page]
            seqs = [row.seq for row in page]

            async def derived(connection: AsyncConnection, sid: int = sid, seqs: list[int] = seqs) -> dict[int, Any]:
                return await eraser.derived(connection, sid, seqs)

            records |= await database.read(derived)
    for query in meant.record_queries(whole):
        async for page in meant.records(whole, query, _ANY_ROW):
            records |= {row.id: row for row in page}
    records |= await database.read(lambda connection: eraser.parts_of(connection, list(records.values())))
    return Outlook(
        messages=len(messages),
        records=len(records),
        message=next(iter(messages), None),
        record=next((row.uid for row in records.values()), None),
    )
