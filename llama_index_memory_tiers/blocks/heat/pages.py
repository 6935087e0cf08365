"""Pages: one question and its answer, cut out of the log."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from llama_index.core.base.llms.types import MessageRole
from numpy.typing import NDArray

from llama_index_memory_tiers.records import NewRecord, Place, Record, StoredMessage
from llama_index_memory_tiers.roles import SYSTEM_ROLES
from llama_index_memory_tiers.storage import PAGE, codec
from llama_index_memory_tiers.text import analyse

Vector = NDArray[np.float32]

KIND = PAGE
_MOST_TERMS = 64
_MOST_KEYS = 8
_TITLE_CHARACTERS = 80
_KEYWORD_CHARACTERS = 2000
_WORD = re.compile(r"[\w][\w'’+#.-]*")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s*|\n")
# A page with fewer terms says nothing of its own: "yes, please".
THIN_TERMS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A page that is to be filed.

    Args:
        id: Public id, the same whenever it is cut out of the log again.
        messages: What was said, in order.
        text: Question and answer.
        terms: What it is about: term → times.
        keys: Terms of its keywords.
        keywords: As they are written.
        title: In a few words.
        said_at: When its last message was said.
        vector: Its embedding, if there is one.
        chain: Id of the first page of the chain that it goes on with; its own when it begins one.
        meta: Rolling summary of the chain.
        told: Title, keywords and summary are a model's.
        tokens: Size of its text.
    """

    id: str
    messages: tuple[StoredMessage, ...]
    text: str
    terms: Mapping[str, int]
    keys: tuple[str, ...]
    keywords: tuple[str, ...]
    title: str
    said_at: datetime
    vector: Vector | None = None
    chain: str = ""
    meta: str = ""
    told: bool = False
    tokens: int = 0

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its messages stand."""
        return tuple(stored.place for stored in self.messages)

    @property
    def thin(self) -> bool:
        """Whether it says too little to be a topic of its own."""
        return len(self.terms) < THIN_TERMS


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch cut into pages.

    Args:
        pages: Groups of messages, each from a question up to the next.
        rest: Messages in front of the first question: the end of an earlier page.
    """

    pages: tuple[tuple[StoredMessage, ...], ...] = ()
    rest: tuple[StoredMessage, ...] = field(default=())


def cut(messages: Iterable[StoredMessage]) -> Cut:
    """Cut messages into pages; system messages belong to none.

    Args:
        messages: In order.

    Returns:
        The groups.
    """
    rest: list[StoredMessage] = []
    groups: list[list[StoredMessage]] = []
    for stored in messages:
        if stored.role in SYSTEM_ROLES:
            continue
        if stored.role == MessageRole.USER:
            groups.append([stored])
        else:
            (groups[-1] if groups else rest).append(stored)
    return Cut(tuple(map(tuple, groups)), tuple(rest))


def make_page(block: str, messages: Sequence[StoredMessage]) -> Page:
    """Describe a group of messages by its own words.

    Args:
        block: Key of the block.
        messages: At least one, in order.

    Returns:
        The page, with an extractive title and keywords.
    """
    first, text = messages[0], codec.told(messages)
    question = codec.told(m for m in messages if m.role == MessageRole.USER)
    terms = strongest(analyse(text), _MOST_TERMS)
    # A question tells the topic; the answer is longer and wanders.
    asked = analyse(question)
    keys = tuple(sorted(terms, key=lambda term: -(terms[term] + 2 * (term in asked)))[:_MOST_KEYS])
    written = surface(text[:_KEYWORD_CHARACTERS], keys)
    return Page(
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{block}/{first.place[0]}/{first.seq}/{first.id}")),
        messages=tuple(messages),
        text=text,
        terms=terms,
        keys=keys,
        keywords=tuple(written.get(key, key) for key in keys),
        title=title_of(question or text),
        said_at=max(stored.created_at for stored in messages),
    )


def title_of(text: str) -> str:
    """The first sentence of a text, cut to a line."""
    first = next((part.strip() for part in _SENTENCE.split(text) if part.strip()), "")
    return first if len(first) <= _TITLE_CHARACTERS else f"{first[: _TITLE_CHARACTERS - 1].rstrip()}…"


def strongest(terms: Mapping[str, int], most: int) -> dict[str, int]:
    """The terms that occur most often; of equals the first."""
    kept = sorted(terms, key=lambda term: -terms[term])[:most]
    chosen = set(kept)
    return {term: count for term, count in terms.items() if term in chosen}


def surface(text: str, wanted: Iterable[str]) -> dict[str, str]:
    """How terms of a text are written in it: term → word; those that are no single word are missing."""
    missing = set(wanted)
    found: dict[str, str] = {}
    for word in dict.fromkeys(_WORD.findall(text)):
        if not missing:
            break
        for term in missing.intersection(analyse(word)):
            found[term] = word.strip(".'’-")
        missing.difference_update(found)
    return found


def page_record(page: Page, segment: str, number: int, model: str) -> NewRecord:
    """The record of a page.

    Args:
        page: The page.
        segment: Id of the segment that it belongs to.
        number: Its number in there, from 1.
        model: Name of the embedding model.

    Returns:
        A range of the log with what it is found by; its text stays in the log.
    """
    return NewRecord(
        id=page.id,
        kind=KIND,
        data={
            "n": number,
            "title": page.title,
            "keywords": list(page.keywords),
            "keys": list(page.keys),
            "terms": dict(page.terms),
            "chain": page.chain or page.id,
            "meta": page.meta,
            "told": page.told,
        },
        said_at=page.said_at,
        sources=page.places,
        tokens=page.tokens,
        vector=None if page.vector is None else tuple(map(float, page.vector)),
        model=model if page.vector is not None else "",
        parent=segment,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """A page whose answer came in a later batch.

    Args:
        page: Its record, under the same id.
        terms: What is added to its terms.
        before: Its embedding so far, if there is one.
        vector: Its embedding now.
    """

    page: NewRecord
    terms: Mapping[str, int]
    before: Vector | None
    vector: Vector | None


def extended(
    record: Record,
    messages: Sequence[StoredMessage],
    *,
    before: Vector | None,
    vector: Vector | None,
    model: str,
    tokens: int,
) -> Extension:
    """Add to a page what came in a later batch.

    Args:
        record: As it is.
        messages: What else belongs to it.
        before: Its embedding so far.
        vector: The embedding of the whole.
        model: Name of the embedding model.
        tokens: Size of what is added.

    Returns:
        What changes.
    """
    more, terms = analyse(codec.told(messages)), page_terms(record)
    for term, count in more.items():
        terms[term] = terms.get(term, 0) + count
    page = NewRecord(
        id=record.id,
        kind=KIND,
        data={**record.data, "terms": strongest(terms, _MOST_TERMS)},
        said_at=max(stored.created_at for stored in messages),
        sources=tuple(stored.place for stored in messages),
        tokens=record.tokens + tokens,
        vector=None if vector is None else tuple(map(float, vector)),
        model=model if vector is not None else "",
        parent=record.parent,
    )
    return Extension(page, more, before, vector)


def page_terms(record: Record) -> dict[str, int]:
    """Terms of a stored page."""
    stored: Any = record.data.get("terms")
    if not isinstance(stored, dict):
        return {}
    if all(type(count) is int for count in stored.values()):  # a hundred pages are read for one context
        return dict(stored)
    return {str(term): int(count) for term, count in stored.items()}
