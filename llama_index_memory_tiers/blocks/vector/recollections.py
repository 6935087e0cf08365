"""A message or note as a vector memory measures, finds, shows and hands it out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from llama_index.core.base.llms.types import MessageRole

from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.errors import ConfigurationError, InvalidMessageError
from llama_index_memory_tiers.instructions import NOT_AN_INSTRUCTION, looks_like_instruction
from llama_index_memory_tiers.partitions import Partition, place
from llama_index_memory_tiers.records import Place, Recollection, Record, StoredMessage
from llama_index_memory_tiers.roles import ANSWERING_ROLES, RESULT_ROLES
from llama_index_memory_tiers.storage import Hit, OwnerReader, RecalledMessage
from llama_index_memory_tiers.text import day_label, escape, message_terms

MESSAGE = "message"
NOTE = "note"
KINDS = frozenset({MESSAGE, NOTE})
# An instruction that a text hides is looked for in this much of it.
_JUDGED_CHARACTERS = 20_000
_RECALLED_ROLES = frozenset({MessageRole.USER, *ANSWERING_ROLES, *RESULT_ROLES})
# Larger batches are analysed and counted in a thread: 5 million characters take 1.5 s.
_THREAD_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """Something that recall found.

    Args:
        record_id: Of the record.
        hit: What the index knows.
        text: What was said or noted.
        line: The same as it is shown.
        said_at: When, in the speaker's zone.
        seq: Position in its session, 0 for a note.
        session_id: The session; '' for a note.
        sources: The message that it shows.
        partition: Name of its partition, or `None`.
        metadata: See `Recollection`.
    """

    record_id: str
    hit: Hit
    text: str
    line: str
    said_at: datetime
    seq: int
    session_id: str
    sources: frozenset[Place]
    partition: str | None
    metadata: Mapping[str, Any]

    def by(self, hit: Hit) -> Found:
        """The same, found by another search."""
        return self if hit is self.hit else replace(self, hit=hit)

    def passes(self, partitions: Collection[str] | None, wanted: Mapping[str, Any] | None) -> bool:
        """Whether it is in one of these partitions and its metadata holds these values; `None` wants nothing."""
        if partitions is not None and self.partition not in partitions:
            return False
        return all(name in self.metadata and self.metadata[name] == value for name, value in (wanted or {}).items())

    def item(self, line: str) -> Item:
        """Offer it for a context."""
        day = day_label(self.said_at)
        return Item(
            text=line,
            score=self.hit.score,
            group=f"{self.session_id}/{day}",
            # Stored text never begins a line, so that it cannot look like this one. A tag with an attribute and an end
            # took six tokens more a session: +.004 / +.001 of recall within 1 000 / 4 000 tokens.
            header=f"<{day}>" if self.session_id else f"<notes {day}>",
            order=(self.said_at.timestamp(), float(self.seq)),
            sources=self.sources,
            legs=self.hit.legs,
            record_id=self.record_id,
            quotes=self.line in line,  # what a reranker or a template shortened is no quotation
        )

    def recollection(self) -> Recollection:
        """Hand it out."""
        similarity = self.hit.similarity
        return Recollection(
            id=self.record_id,
            text=self.text,
            score=self.hit.score,
            distance=None if similarity is None else 1.0 - similarity,
            said_at=self.said_at,
            partition=self.partition,
            metadata=dict(self.metadata),
        )


async def read_found(reader: OwnerReader, hits: Sequence[Hit]) -> list[Found]:
    """Texts behind candidates, in their order; what is no longer there is missing."""
    messages = await reader.messages_of([hit for hit in hits if hit.place is not None])
    by_id = {message.hit.id: _message(message) for message in messages}
    alone = [hit for hit in hits if hit.place is None]
    if alone:
        numbers = await reader.records_by_hit(alone)
        by_id |= {hit.id: _note(numbers[hit.id], hit) for hit in alone if hit.id in numbers}
    return [by_id[hit.id] for hit in hits if hit.id in by_id]


def distinct(found: Iterable[Found]) -> list[Found]:
    """Of those that are shown alike on one day the first: a phrase that was said a hundred times tells nothing more."""
    first: dict[tuple[str, str], Found] = {}
    for one in found:
        first.setdefault((one.line, day_label(one.said_at)), one)
    return list(first.values())


def within_quotas(found: Iterable[Found], partitions: Sequence[Partition]) -> list[Found]:
    """Of each partition as many as it may show, best first; partitions by priority.

    Args:
        found: Best first.
        partitions: All of the block; none leaves everything as it is.
    """
    if not partitions:
        return list(found)
    taken = dict.fromkeys((partition.name for partition in partitions), 0)
    kept: list[tuple[int, Found]] = []
    for one in found:
        partition = place(partitions, one.partition)
        taken[partition.name] += 1
        if partition.top_k is None or taken[partition.name] <= partition.top_k:
            kept.append((partition.priority, one))
    return [one for _, one in sorted(kept, key=lambda pair: pair[0])]


def checked_note(content: object, metadata: object, partition: object, partitions: Sequence[Partition]) -> None:
    """Refuse a note that says nothing, cannot be stored, or names no partition.

    Raises:
        InvalidMessageError: Its text or metadata.
        ConfigurationError: Its partition.
    """
    if not isinstance(content, str) or not content.strip():
        raise InvalidMessageError(
            f"content={content!r:.100} was given.",
            allowed="A note is a text with at least one visible character.",
            remedy="Pass what is to be remembered; nothing was stored.",
        )
    try:
        written = metadata is None or (isinstance(metadata, Mapping) and json.dumps(dict(metadata)) is not None)
    except (TypeError, ValueError):
        written = False
    if not written:
        raise InvalidMessageError(
            f"metadata={metadata!r:.100} was given.",
            allowed="It maps names to values that can be written as JSON.",
            remedy="Convert its values to text or numbers; nothing was stored.",
        )
    names = [each.name for each in partitions]
    if partition is not None and partition not in names:
        raise ConfigurationError(
            f"partition={partition!r:.100} was given.",
            allowed=f"The block's partitions are: {', '.join(names) or 'none'}.",
            remedy="Pass one of them, leave it out, or add it to the block's partitions=.",
        )


def speaker_of(stored: StoredMessage) -> str:
    """Who said it: the name that is known, else the role."""
    return stored.meta.sent_from or stored.role.value


def said_in(stored: StoredMessage) -> str:
    """The text of a message that can be recalled; '' for one that nobody looks for."""
    return stored.text.strip() if stored.role in _RECALLED_ROLES else ""


async def measure(
    told: Sequence[tuple[StoredMessage, str]], counter: TokenCounter
) -> list[tuple[Mapping[str, int], int]]:
    """What each message is found by, and the size of what will be shown.

    Args:
        told: Messages and what is said in each.
        counter: Measures.

    Returns:
        Of each its terms, with how often they stand in it, and its tokens.
    """

    def measured() -> list[tuple[Mapping[str, int], int]]:
        return [
            (
                message_terms(text, speaker=speaker_of(stored), when=stored.created_at),
                counter.text(message_line(stored) + "\n"),
            )
            for stored, text in told
        ]

    large = sum(len(text) for _, text in told) > _THREAD_CHARACTERS
    return await asyncio.to_thread(measured) if large else measured()


def message_line(stored: StoredMessage) -> str:
    """One message as it is shown: by its speaker's name when that is known, else as LlamaIndex shows it."""
    said = stored.text.strip()
    text = escape(said)
    suspect = looks_like_instruction(said[:_JUDGED_CHARACTERS])
    if stored.meta.sent_from and not suspect:
        return f"{escape(stored.meta.sent_from)}: {text}"
    if not suspect:
        return f"<message role='{stored.role.value}'>{text}</message>"
    who = escape(speaker_of(stored)).replace("'", "&#39;")
    return f"<message role='{who}' note='{NOT_AN_INSTRUCTION}'>{text}</message>"


def note_line(text: str) -> str:
    """A note as it is shown."""
    mark = f" note='{NOT_AN_INSTRUCTION}'" if looks_like_instruction(text[:_JUDGED_CHARACTERS]) else ""
    return f"<note{mark}>{escape(text)}</note>"


def _message(found: RecalledMessage) -> Found:
    stored = found.message
    known = {"sent_from": stored.meta.sent_from, "cause_by": stored.meta.cause_by}
    return Found(
        record_id=found.record_id,
        hit=found.hit,
        text=stored.text,
        line=message_line(stored),
        said_at=stored.created_at,
        seq=stored.seq,
        session_id=stored.session_id,
        sources=frozenset({stored.place}),
        partition=found.data.get("partition"),
        metadata={
            **stored.meta.extra,
            "role": stored.role.value,
            "session_id": stored.session_id,
            **{name: value for name, value in known.items() if value},
        },
    )


def _note(record: Record, hit: Hit) -> Found:
    return Found(
        record_id=record.id,
        hit=hit,
        text=record.text,
        line=note_line(record.text),
        said_at=record.said_at or record.created_at,
        seq=0,
        session_id="",
        sources=frozenset(record.sources),
        partition=record.data.get("partition"),
        metadata=record.data.get("metadata", {}),
    )
