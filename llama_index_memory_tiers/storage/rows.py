"""Rows of the log as values: a message on its way in, a session, a window, and rows decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers.copies import many_objects
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.moments import check_moment
from llama_index_memory_tiers.records import StoredMessage
from llama_index_memory_tiers.storage import codec

T = TypeVar("T")

_ACTIVE, _ARCHIVED = MessageStatus.ACTIVE, MessageStatus.ARCHIVED
ACTIVE, ARCHIVED = _ACTIVE.value, _ARCHIVED.value
CLEARED = "cleared"  # out of the window and of the history by `areset`; still a source for recall
GONE = "gone"  # forgotten: a tombstone keeps a late retry from bringing the text back
_THREAD_CHARACTERS = 500_000  # 5 MB of an image take 40 ms to decode
MOST_PARAMETERS = 500  # ids in one statement; SQLite and asyncpg allow thousands


@dataclass(frozen=True, slots=True)
class Entry:
    """A message on its way into the log.

    Args:
        uid: Public id, made before the first try, so that a repeated put is one put.
        role: Its role.
        tokens: Its size.
        counter: Name of the counter that measured it.
        created_at: When it was said, microseconds since 1970.
        data: JSON of the message.
        meta: JSON of its metadata, or `None`.
    """

    uid: str
    role: str
    tokens: int
    counter: str
    created_at: int
    data: str
    meta: str | None = None

    @property
    def hash(self) -> str:
        """Name of the content."""
        return codec.content_hash(self.data)


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put found and made.

    Args:
        sid: Private row of the session.
        head_seq: Newest sequence number.
        active_tokens: Size of the window after the put.
        stored: How many of the messages were new.
    """

    sid: int
    head_seq: int
    active_tokens: int
    stored: int


@dataclass(frozen=True, slots=True)
class Session:
    """A session's row.

    Args:
        sid: Private row number, never used again after a deletion.
        user_id: The person, or '' for none.
        session_id: The conversation.
        head_seq: Newest sequence number.
        active_tokens: Size of the window.
        window_rev: Rises with every change of the window other than an append.
        last_put_at: When the newest message came, microseconds since 1970.
    """

    sid: int
    user_id: str
    session_id: str
    head_seq: int
    active_tokens: int
    window_rev: int
    last_put_at: int


@dataclass(frozen=True, slots=True)
class Window:
    """The active messages of a session, oldest first.

    Args:
        sid: Private row; 0 when the session does not exist yet.
        head_seq: Newest sequence number.
        window_rev: See `Session`.
        messages: Shared with the cache: copy before handing out.
        counters: Counter's name of each message.
        damaged: Sequence numbers of rows that could not be read.
        owner_rev: Rises with every change of what is known about the user or in the session.

    Attributes:
        tokens: Size of all messages.
    """

    sid: int = 0
    head_seq: int = 0
    window_rev: int = 0
    owner_rev: int = 0
    messages: tuple[StoredMessage, ...] = ()
    counters: tuple[str, ...] = ()
    damaged: tuple[int, ...] = ()
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Sum up once what every context asks for."""
        object.__setattr__(self, "tokens", sum([stored.tokens for stored in self.messages]))


def statuses_of(status: MessageStatus | None) -> tuple[str, ...]:
    """What LlamaIndex's status means here; `None` means active and archived.

    Raises:
        ConfigurationError: It is something else.
    """
    if status is None:
        return ACTIVE, ARCHIVED
    if not isinstance(status, MessageStatus):
        raise ConfigurationError(
            f"status={status!r:.100} was given.",
            allowed="It is a MessageStatus, or None for active and archived messages.",
            remedy="Pass MessageStatus.ACTIVE or MessageStatus.ARCHIVED, or leave it out.",
        )
    return (status.value,)


def storable_ids(values: Iterable[T]) -> list[T]:
    """Those that a database can hold: an id that none can hold is nobody's."""
    return [value for value in values if not isinstance(value, str) or codec.storable(value) == value]


def chunks(values: Sequence[T]) -> Iterable[Sequence[T]]:
    """Cut ids into lists that a statement of every database takes; see `storable_ids`."""
    values = storable_ids(values)
    return (values[at : at + MOST_PARAMETERS] for at in range(0, len(values), MOST_PARAMETERS))


RawMessage = Sequence[Any]
"""seq, uid, status, tokens, counter, created_at, data, meta: by position, as SQLAlchemy's names cost 0.8 µs each."""


async def decode_rows(
    rows: Sequence[RawMessage], sids: Iterable[int], session_ids: Iterable[str]
) -> list[StoredMessage | Exception]:
    """Decode rows of messages; long ones in a thread.

    Args:
        rows: See `RawMessage`.
        sids: Private row of each one's session; may be endless.
        session_ids: Its public id; may be endless.

    Returns:
        The message of each row, or what is wrong with it.
    """
    if sum(len(row[6] or "") for row in rows) > _THREAD_CHARACTERS:
        return await asyncio.to_thread(_decoded, rows, sids, session_ids)
    return _decoded(rows, sids, session_ids)


def _decoded(
    rows: Sequence[RawMessage], sids: Iterable[int], session_ids: Iterable[str]
) -> list[StoredMessage | Exception]:
    """See `decode_rows`; one loop, as a call that makes each of a thousand would take half as long again."""
    new = tuple.__new__
    made: list[StoredMessage | Exception] = []
    with many_objects():
        sources = codec.decode_sources([row[6] for row in rows])
        for row, source, sid, session_id in zip(rows, sources, sids, session_ids):  # noqa: B905  # those may be endless
            if isinstance(source, Exception):
                made.append(source)
                continue
            if not isinstance(row[3], int) or row[3] < 0:
                made.append(ValueError("no size"))
                continue
            try:
                meta = codec.decode_meta(row[7])
                check_moment(row[5], meta.utc_offset_seconds)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                made.append(error)
                continue
            status = _ACTIVE if row[2] == ACTIVE else _ARCHIVED
            made.append(new(StoredMessage, (row[1], source, status, row[5], row[3], meta, session_id, sid, row[0])))
    return made
