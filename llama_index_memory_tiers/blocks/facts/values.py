"""Facts as values: what a record says, for which time it holds, and what stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from llama_index_memory_tiers.blocks.facts.changes import moment
from llama_index_memory_tiers.records import Record, StoredMessage


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact with the time for which it holds.

    Args:
        id: Public id.
        text: The sentence.
        subject: Whom or what it is about; '' when nobody said.
        relation: How subject and value belong together, or ''.
        value: The rest, or ''.
        said_at: When the newest of its sources was said.
        valid_from: Since when it holds: when it was said, unless a day was named.
        valid_until: When it ends or ended; `None` when nothing is known of an end.
        current: Whether it is on the list now: neither over, nor in other words in another fact, nor put aside.
        replaced_by: Id of the fact that holds instead.
        retracted: Whether somebody said that it no longer holds.
        pinned: Whether it stays whatever a model proposes and however many facts there are.
        confirmed_at: When it was last said or confirmed.
        suspect: Whether it reads like an instruction to a model.
    """

    id: str
    text: str
    subject: str
    relation: str
    value: str
    said_at: datetime
    valid_from: datetime
    valid_until: datetime | None = None
    current: bool = True
    replaced_by: str | None = None
    retracted: bool = False
    pinned: bool = False
    confirmed_at: datetime | None = None
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class FactOrigin:
    """Why a fact is known, and why it ended.

    Args:
        fact: The fact.
        messages: What it comes from, oldest first; messages that were forgotten are missing.
        ended_by: What ended it, likewise.
        model: Name of the model that wrote it; '' for an extractor of yours or a person.
        prompt: Version of the prompt; `custom`, `extractor` or `by hand`.
    """

    fact: Fact
    messages: tuple[StoredMessage, ...]
    ended_by: tuple[StoredMessage, ...]
    model: str
    prompt: str


def confirmed(fact: Fact) -> datetime:
    """When a fact was last said or confirmed."""
    return max(fact.confirmed_at or fact.said_at, fact.said_at)


def links(record: Record) -> list[tuple[str, str]]:
    """The facts that stand in this one's place."""
    heirs = {record.data.get("ended_by"), record.superseded_by} - {None}
    return [(record.id, str(heir)) for heir in heirs]


def holds(fact: Fact, records: Mapping[str, Record], at: datetime) -> bool:
    """Whether a fact is what held at a time, in the words that held then."""
    record = records[fact.id]
    if not fact.valid_from <= at or (fact.valid_until is not None and fact.valid_until <= at):
        return False
    if record.superseded_by is not None and fact.replaced_by is None:
        wording = records.get(record.superseded_by)
        return wording is None or not fact_of(wording).valid_from <= at
    put_aside = record.archived_at if fact.valid_until is None else None
    return put_aside is None or at < put_aside


def fact_of(record: Record, *, current: bool | None = None) -> Fact:
    """A record as a fact.

    Args:
        record: Of kind `fact`.
        current: Whether it is on the list; default what the record says, which knows no clock.

    Returns:
        The fact.
    """
    data = record.data
    said = record.said_at or record.created_at
    return Fact(
        id=record.id,
        text=record.text,
        subject=str(data.get("subject", "")),
        relation=str(data.get("relation", "")),
        value=str(data.get("value", "")),
        said_at=said,
        valid_from=moment(data, "valid_from") or said,
        valid_until=moment(data, "valid_until"),
        current=record.live if current is None else current,
        replaced_by=data.get("ended_by"),
        retracted=bool(data.get("retracted")),
        pinned=bool(data.get("pinned")),
        confirmed_at=moment(data, "confirmed_at"),
        suspect=bool(data.get("suspect")),
    )
