"""Facts as a model is shown them, in a prompt and in a context."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from llama_index_memory_tiers.blocks.facts.changes import moment
from llama_index_memory_tiers.budget import Item
from llama_index_memory_tiers.instructions import NOT_AN_INSTRUCTION
from llama_index_memory_tiers.records import Record
from llama_index_memory_tiers.storage import Hit
from llama_index_memory_tiers.text import escape


def with_key(record: Record) -> str:
    """A known fact as the model is shown it: with what another one must share to take its place."""
    subject, relation = record.data.get("subject"), record.data.get("relation")
    since = moment(record.data, "valid_from") or record.said_at
    if not subject or not relation or since is None:
        return record.text
    return f"{record.text} ({subject} / {relation}, since {since:%Y-%m-%d})"


def fact_item(record: Record, now: datetime) -> Item:
    """A fact for a context, with the time for which it holds when that is not simply now."""
    when = record.said_at or record.created_at
    since, until = moment(record.data, "valid_from"), moment(record.data, "valid_until")
    return Item(
        written_fact(
            record.text,
            suspect=bool(record.data.get("suspect")),
            since=since if since is not None and since > now else None,
            until=until,
        ),
        order=(1.0, when.timestamp()),
        sources=frozenset(record.sources),
        record_id=record.id,
    )


def scored(item: Item, hit: Hit | None) -> Item:
    """An item with what search found out about it."""
    return item if hit is None else replace(item, score=hit.score, legs=hit.legs)


def written_fact(text: str, *, suspect: bool, since: datetime | None = None, until: datetime | None = None) -> str:
    """A fact as a context shows it: inert, and marked when it reads like an instruction."""
    mark = f' note="{NOT_AN_INSTRUCTION}"' if suspect else ""
    mark += f' from="{since:%Y-%m-%d}"' if since is not None else ""
    mark += f' until="{until:%Y-%m-%d}"' if until is not None else ""
    return f"<fact{mark}>{escape(text)}</fact>"
