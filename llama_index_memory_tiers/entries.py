"""A message on its way in: freed of recalled text and secrets, counted and written, before anything is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from pydantic import BaseModel

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.checks import repeated
from llama_index_memory_tiers.copies import clone
from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.moments import checked_time, to_microseconds
from llama_index_memory_tiers.records import Cause, MessageMeta, cause_name
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.rendering import strip_recalled
from llama_index_memory_tiers.roles import SYSTEM_ROLES
from llama_index_memory_tiers.storage import Entry, Storage, codec

# Longer messages are worked on in a thread: 100 000 characters take about 20 ms to redact, count and write.
_THREAD_CHARACTERS = 100_000
_RECALLING_ROLES = frozenset({MessageRole.USER, *SYSTEM_ROLES})


@dataclass(frozen=True, slots=True)
class About:
    """What the application told about the messages of one put.

    Args:
        created_at: When they were said, microseconds since 1970.
        meta: JSON of the rest, or `None`.
    """

    created_at: int
    meta: str | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Messages that are ready to be stored.

    Args:
        entries: Rows for the log.
        raw: Messages of the newest turn whose secrets were replaced, as they were said, by id.
        new_turn: Whether a user message is among them.
    """

    entries: tuple[Entry, ...]
    raw: Mapping[str, ChatMessage]
    new_turn: bool


class EntryMaker:
    """Makes entries; everything that can be refused is refused here.

    Args:
        storage: Clock and ids.
        counter: Measures.
        redactor: Takes secrets out, or `None`.
    """

    def __init__(self, storage: Storage, counter: TokenCounter, redactor: Redactor | None) -> None:
        self._storage = storage
        self._counter = counter
        self.redactor = redactor

    def describe(
        self,
        created_at: datetime | None = None,
        sent_from: str = "",
        send_to: str | Sequence[str] = (),
        cause_by: Cause = "",
    ) -> About:
        """Check what was told about messages.

        Args:
            created_at: When they were said; naive means UTC; default now.
            sent_from: Who spoke. A secret in a name is replaced as one in a text is.
            send_to: Whom they address; one name or several.
            cause_by: What made them: a name, or the class of an action.

        Returns:
            The checked metadata.

        Raises:
            InvalidMessageError: Names the argument and its value.
        """
        cause = cause_name(cause_by)
        for name, value in (("sent_from", sent_from), ("cause_by", cause)):
            if not isinstance(value, str):
                raise _wrong(name, value, "text")
        to = (send_to,) if isinstance(send_to, str) else _several(send_to)
        if to is None or not all(isinstance(name, str) for name in to):
            raise _wrong("send_to", send_to, "a name or a list of names")
        moment = checked_time("created_at", created_at) if created_at is not None else self._storage.clock()
        offset = moment.utcoffset()
        meta = MessageMeta(
            sent_from=self.name(sent_from),
            send_to=tuple(self.name(name) for name in to if name),
            cause_by=self.name(cause),
            utc_offset_seconds=int(offset.total_seconds()) if offset is not None else 0,
        )
        return About(to_microseconds(moment), codec.encode_meta(meta))

    def name(self, name: str) -> str:
        """A name, as of who speaks, without secrets."""
        return name if self.redactor is None else self.redactor.text(name)

    def redacted(self, message: ChatMessage) -> ChatMessage:
        """The message without secrets; the same object when it holds none."""
        return message if self.redactor is None else self.redactor.message(message)

    async def make(self, messages: Sequence[ChatMessage], uids: Sequence[str | None] | None, about: About) -> Prepared:
        """Turn messages into entries.

        Args:
            messages: In order; they are not changed.
            uids: One id per message, or `None` to make them.
            about: From `describe`.

        Returns:
            Entries for what is left when recalled text is taken out.

        Raises:
            InvalidMessageError: A message or an id cannot be stored; names it and why.
        """
        ids = self._ids(messages, uids)
        if sum(map(_bulk, messages)) > _THREAD_CHARACTERS:
            return await asyncio.to_thread(self._make, messages, ids, about)
        return self._make(messages, ids, about)

    def _ids(self, messages: Sequence[ChatMessage], uids: Sequence[str | None] | None) -> list[str]:
        if _several(messages) is None:
            raise _wrong("messages", type(messages), "a list of ChatMessages")
        given = _several(uids) if uids is not None else (None,) * len(messages)
        if given is None or len(given) != len(messages):
            raise _wrong("uids", uids, f"one id for each of the {len(messages)} messages")
        for uid in given:
            if uid is not None and (not isinstance(uid, str) or not uid.strip() or codec.storable(uid) != uid):
                raise _wrong("uid", uid, "text with at least one visible character")
        twice = repeated([uid for uid in given if uid is not None])
        if twice:
            raise _wrong("uids", twice, "ids that differ, as each names one message")
        return [uid if uid is not None else self._storage.ids() for uid in given]

    def _make(self, messages: Sequence[ChatMessage], ids: Sequence[str], about: About) -> Prepared:
        entries = []
        raw: dict[str, ChatMessage] = {}
        new_turn = False
        for message, uid in zip(messages, ids, strict=True):
            said = self._own_words(message)
            if said is None:
                continue
            if said.role == MessageRole.USER:
                raw, new_turn = {}, True
            kept = self.redacted(said)
            if kept is not said:
                raw[uid] = clone(said)
            entries.append(
                Entry(
                    uid=uid,
                    role=kept.role.value,
                    tokens=self._counter.message(kept),
                    counter=self._counter.name,
                    created_at=about.created_at,
                    data=codec.encode_message(kept),
                    meta=about.meta,
                )
            )
        return Prepared(tuple(entries), raw, new_turn)

    def _own_words(self, message: ChatMessage) -> ChatMessage | None:
        if not isinstance(message, ChatMessage):
            raise _wrong("message", type(message), "a llama_index ChatMessage")
        if message.role not in _RECALLING_ROLES:
            return message
        left = strip_recalled(message)
        # What a person said is kept, even if it looks like nothing but a memory.
        return message if left is None and message.role == MessageRole.USER else left


def _bulk(value: object, deep: int = 6) -> int:
    """About how many characters something has, whatever it is made of; it only decides where the work is done."""
    if isinstance(value, str | bytes):
        return len(value)
    parts: Iterable[object] = ()
    if isinstance(value, BaseModel):
        parts = vars(value).values()
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    return sum(_bulk(part, deep - 1) for part in parts) if deep else 0


def _several(values: object) -> tuple[Any, ...] | None:
    """The values of a list or tuple; a text is one value, whatever it can be cut into."""
    return tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else None


def _wrong(name: str, value: object, allowed: str) -> InvalidMessageError:
    return InvalidMessageError(
        f"{name}={value!r:.100} was given.",
        allowed=f"{name} is {allowed}.",
        remedy="Correct it and put again; nothing was stored.",
    )
