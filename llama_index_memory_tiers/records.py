"""Frozen values that the rooms hand to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers.copies import PlainText, Source, fresh
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.moments import from_microseconds
from llama_index_memory_tiers.roles import calls_of

Place = tuple[int, int]
"""Where a message stands in the log: session row and sequence number. Never shown to users."""

# Databases refuse or change these; an id that is changed would be another one's.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

NOTHING: Mapping[str, Any] = MappingProxyType({})


def nothing() -> Mapping[str, Any]:
    """Default of mapping fields: nothing, and nobody can add to it."""
    return NOTHING


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose memory: every read and write carries one.

    Args:
        session_id: The conversation, not blank.
        user_id: The person; `None` makes the session its own owner.
        agent_id: The agent, as provenance.
    """

    session_id: str
    user_id: str | None = None
    agent_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("session_id", "user_id", "agent_id"):
            value = getattr(self, name)
            if value is None and name != "session_id":
                continue
            if not isinstance(value, str) or not value.strip() or _UNSTORABLE.search(value):
                raise ConfigurationError(
                    f"{name}={value!r:.100} was given.",
                    allowed="An id is text with at least one visible character, without NUL and lone surrogates.",
                    remedy=f"Pass a {name} as text, such as {str(value)[:100]!r}."
                    if not isinstance(value, str) and str(value).isprintable()
                    else f"Pass a {name} that names one {name.removesuffix('_id')}"
                    + ("." if name == "session_id" else ", or leave it out."),
                )
            # A member of an Enum is formatted by its name, and two classes may have members of one name.
            object.__setattr__(self, name, str.__str__(value))


Cause = str | type
"""What made a message: the class of an action, or a name."""


def cause_name(cause: Cause) -> str:
    """The name under which a cause is stored.

    Args:
        cause: A class, or a name as it is.

    Returns:
        `module.Class` for a class.
    """
    return f"{cause.__module__}.{cause.__qualname__}" if isinstance(cause, type) else cause


@dataclass(frozen=True, slots=True)
class MessageMeta:
    """What an application knows about a message, kept beside it and never in it.

    Args:
        sent_from: Who spoke.
        send_to: Whom it addresses; empty means everybody.
        cause_by: What made it: an action, a tool, a step.
        utc_offset_seconds: The speaker's zone, when the time was given with one.
        extra: Anything else that can be written as JSON.
    """

    sent_from: str = ""
    send_to: tuple[str, ...] = ()
    cause_by: str = ""
    utc_offset_seconds: int = 0
    extra: Mapping[str, Any] = field(default_factory=nothing)


class StoredMessage(NamedTuple):
    """A message as it stands in the log; a tuple of little, as a window has a thousand of them.

    Args:
        id: Public id, made before the first try of the put that stored it.
        source: What it says; read `message`, `role` and `text` instead.
        status: In the window (active) or behind it (archived).
        said: When it was said, microseconds since 1970; read `created_at` instead.
        tokens: Its size by the counter of the memory that put it.
        meta: What the application told about it.
        session_id: The session it belongs to.
        sid: Private row of that session.
        seq: Position within it.
    """

    id: str
    source: Source
    status: MessageStatus
    said: int
    tokens: int
    meta: MessageMeta
    session_id: str
    sid: int
    seq: int

    @property
    def created_at(self) -> datetime:
        """When it was said, aware, in the speaker's zone."""
        return from_microseconds(self.said, self.meta.utc_offset_seconds)

    @property
    def place(self) -> Place:
        """Private position in the log."""
        return self.sid, self.seq

    @property
    def message(self) -> ChatMessage:
        """The message itself: a new copy each time, yours to change."""
        return fresh((self.source,))[0]

    @property
    def role(self) -> MessageRole:
        """Its role."""
        return self.source.role

    @property
    def text(self) -> str:
        """Its text blocks joined by newlines."""
        source = self.source
        return "\n".join(source.texts) if isinstance(source, PlainText) else source.content or ""

    @property
    def calls_tool(self) -> bool:
        """Whether it calls a tool."""
        return not isinstance(self.source, PlainText) and bool(calls_of(self.source))


@dataclass(frozen=True, slots=True)
class Record:
    """A long-term memory: a row of SQL, owned by one owner.

    Args:
        id: Public id; a uuid as text.
        kind: `message`, `fact`, `summary`, `segment`, `profile`, `episode` …
        block: Key of the block that wrote it.
        text: What is recalled; empty for kind `message`, whose text stands in the log.
        data: Fields of its kind.
        created_at: When it was written.
        said_at: When it was said, if that is known.
        expires_at: When it stops being recalled.
        superseded_by: Id of the record that replaced it.
        archived_at: When an eviction put it aside.
        sources: The messages it came from; empty where a reader says that it leaves them out.
        parent: Id of the record that it is a part of, such as a page's segment.
        tokens: Size of what is shown.
    """

    id: str
    kind: str
    block: str
    text: str
    data: Mapping[str, Any]
    created_at: datetime
    said_at: datetime | None = None
    expires_at: datetime | None = None
    superseded_by: str | None = None
    archived_at: datetime | None = None
    sources: tuple[Place, ...] = ()
    parent: str | None = None
    tokens: int = 0

    @property
    def live(self) -> bool:
        """Neither superseded nor put aside; expiry is the reader's to judge, who has the clock."""
        return self.superseded_by is None and self.archived_at is None


@dataclass(frozen=True, slots=True)
class Recollection:
    """What `TieredMemory.arecall` found.

    Args:
        id: Of the record.
        text: What was said or noted, as it was.
        score: What it is worth for the question; for comparison within one answer.
        distance: 1 − cosine of the embeddings, 0 to 2; `None` without an embedding model.
        said_at: When it was said or noted.
        partition: Its partition; `None` when the block has none.
        metadata: Of a note what it was given; of a message `role`, `session_id`, and `sent_from`, `cause_by` if known.
    """

    id: str
    text: str
    score: float
    distance: float | None
    said_at: datetime
    partition: str | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record that a merge wants written.

    Args:
        id: Public id, made by the block in `prepare` so that a merge can be repeated.
        kind: See `Record`.
        text: See `Record`.
        data: See `Record`.
        said_at: See `Record`.
        expires_at: See `Record`.
        sources: See `Record`.
        terms: What BM25 finds it by: text analysis of the record, term → times it occurs.
        speaker: Who said it, when one person did.
        tokens: Size of what will be shown, by the memory's counter.
        vector: Embedding, shape (dimensions,), or `None`.
        model: Name of the embedding model that made `vector`.
        parent: See `Record`.
    """

    id: str
    kind: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=nothing)
    said_at: datetime | None = None
    expires_at: datetime | None = None
    sources: tuple[Place, ...] = ()
    terms: Mapping[str, int] = field(default_factory=nothing)
    speaker: str = ""
    tokens: int = 0
    vector: tuple[float, ...] | None = None
    model: str = ""
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Amendment:
    """What changes about a record whose text stays as it is.

    Args:
        data: Fields of its kind from now on.
        expires_at: When it stops being recalled from now on.
    """

    data: Mapping[str, Any]
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What a merge decided; the storage writes it in the transaction that moves the cursor.

    Args:
        add: Records to write.
        revise: Records to write over those with the same ids: an id that lasts, such as a segment's or an episode's.
            Their sources are added to those that are there.
        supersede: Old id → id of the record that replaces it.
        archive: Ids to put aside.
        restore: Ids to take back from where `archive` put them.
        amend: Id → what changes about it; its text and what it is found by stay.
        share: Agent → ids of records that it may tell all its users, for as long as they are live.
        events: What is told once all this is written.
    """

    add: tuple[NewRecord, ...] = ()
    revise: tuple[NewRecord, ...] = ()
    supersede: Mapping[str, str] = field(default_factory=nothing)
    archive: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    amend: Mapping[str, Amendment] = field(default_factory=nothing)
    share: Mapping[str, tuple[str, ...]] = field(default_factory=nothing)
    events: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reads:
    """Which records a merge wants to see afresh, inside its transaction.

    Args:
        kinds: All live records of these kinds that the block wrote.
        ids: These, whatever became of them.
        past: Of those kinds also what is no longer live.
    """

    kinds: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    past: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a block is to delete where it holds data of its own; it may hear of the same again.

    Args:
        records: Public ids of its records that are gone.
        messages: Session row, sequence number and public id of the messages that are gone.
    """

    records: tuple[str, ...] = ()
    messages: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A range of one session's log that a block is to absorb.

    Args:
        scope: Whose messages.
        owner: Key of the owner whose records will change.
        sid: Private row of the session.
        lo: Everything up to here was absorbed before.
        hi: Everything up to here will have been absorbed after; the last row read, never a later head.
        messages: Copies, in order; damaged and forgotten rows are missing.
        before: A few messages in front of the batch, for context only.
    """

    scope: Scope
    owner: str
    sid: int
    lo: int
    hi: int
    messages: tuple[StoredMessage, ...]
    before: tuple[StoredMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Departure:
    """A record that leaves, or would.

    Args:
        record_id: Public id.
        block: Name of the block that wrote it.
        kind: Of the record.
        policy: Which rule says so.
        reason: Why, in words.
        successor: Id of the record that stands for it from now on, when it is a duplicate.
    """

    record_id: str
    block: str
    kind: str
    policy: str
    reason: str
    successor: str | None = None
