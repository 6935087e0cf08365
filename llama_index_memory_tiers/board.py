"""The messages of one session, looked up by what made them, who said them, and what they say."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Any, Literal, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.checks import check_whole, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Cause, Scope, StoredMessage, cause_name
from llama_index_memory_tiers.storage import Session, Storage, codec
from llama_index_memory_tiers.storage.rows import ACTIVE, ARCHIVED

Duplicates = Literal["id", "content"]
Put: TypeAlias = "Callable[..., Awaitable[int]]"
"""Stores messages: (messages, uids, distinct=…, **about) → how many were new."""


@dataclass(slots=True)
class _Index:
    """Places of a session's messages by cause and by who said them."""

    sid: int = 0
    window_rev: int = -1
    messages: list[StoredMessage] = field(default_factory=list)
    causes: dict[str, list[int]] = field(default_factory=dict)
    roles: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    def take(self, rows: Iterable[StoredMessage]) -> None:
        """Take in rows behind the last one; those that are there already are passed over."""
        head = self.messages[-1].seq if self.messages else 0
        for row in rows:
            if row.seq <= head:
                continue
            at = len(self.messages)
            self.messages.append(row)
            self.ids[row.id] = at
            self.causes.setdefault(row.meta.cause_by, []).append(at)
            for name in {row.meta.sent_from, row.role.value} - {""}:
                self.roles.setdefault(name, []).append(at)


class MessageBoard:
    """One session's messages, in the order in which they were put; `TieredMemory.board()` makes it.

    The lookups are answered from an index in RAM, which one statement keeps up to date, two after a change.

    Args:
        storage: Where.
        scope: Whose session.
        put: Stores messages through the memory.
        redacted: Takes secrets out of a message.
        deduplicate: What an identical message is: one with the same `id` (default), or one with the same `content`
            and metadata.
    """

    def __init__(
        self,
        storage: Storage,
        scope: Scope,
        *,
        put: Put,
        redacted: Callable[[ChatMessage], ChatMessage],
        deduplicate: Duplicates = "id",
    ) -> None:
        if deduplicate not in {"id", "content"}:
            raise ConfigurationError(
                f"deduplicate={deduplicate!r:.100} was given.",
                allowed="It is 'id' or 'content'.",
                remedy="Pass one of them, or leave it out.",
            )
        self.storage = storage
        self.scope = scope
        self._put = put
        self.redacted = redacted
        self._distinct = deduplicate == "content"
        self._index = _Index()

    # -- changing --------------------------------------------------------------------------------------------

    @checked
    async def add(self, message: ChatMessage, *, uid: str | None = None, **about: Any) -> str | None:
        """Put a message unless an identical one is there; the given object is not changed.

        Args:
            message: The message.
            uid: Your own id; default a new one.
            about: `sent_from`, `send_to`, `cause_by`, `created_at` as of `TieredMemory.aput`.

        Returns:
            Its id, or `None` when it was refused.
        """
        name = uid if uid is not None else self.storage.ids()
        return name if await self._put([message], [name], distinct=self._distinct, **about) else None

    @checked
    async def add_batch(self, messages: Sequence[ChatMessage], **about: Any) -> list[str]:
        """Put messages in one transaction; identical ones are left out.

        Args:
            messages: In order.
            about: See `add`; holds for all.

        Returns:
            Ids of those that were stored.
        """
        names = [self.storage.ids() for _ in messages]
        await self._put(list(messages), names, distinct=self._distinct, **about)
        index = await self._fresh()
        return [name for name in names if name in index.ids]

    @checked
    async def delete(self, id: str) -> StoredMessage | None:  # noqa: A002  # as it is called everywhere
        """Delete a message: its text goes, and what a vector block finds it by.

        What was learnt from it, such as a fact, stays; `TieredMemory.aforget(ids=[…])` reaches that too.

        Args:
            id: Its id.

        Returns:
            The message as it was; `None` when it is not there.
        """
        found = await self.storage.log.delete(self._user, self.scope.session_id, [id])
        return found[0] if found else None

    async def delete_newest(self) -> StoredMessage | None:
        """Delete the newest message; `None` when there is none."""
        newest = await self.latest(1)
        return await self.delete(newest[0].id) if newest else None

    async def clear(self) -> int:
        """Delete all messages of the session.

        Returns:
            How many there were.
        """
        return await self.storage.log.clear(self._user, self.scope.session_id, (ACTIVE, ARCHIVED), gone=True)

    # -- looking ---------------------------------------------------------------------------------------------

    async def count(self) -> int:
        """How many messages there are."""
        return len((await self._fresh()).messages)

    @checked
    async def latest(self, k: int = 0) -> list[StoredMessage]:
        """The newest messages, oldest first.

        Args:
            k: How many; 0 (the default) means all.

        Returns:
            The messages.

        Raises:
            ConfigurationError: `k` is negative.
        """
        messages = (await self._fresh()).messages
        return messages[max(0, len(messages) - check_whole("k", k, least=0)) :] if k else list(messages)

    @checked
    async def by_cause(self, *causes: Cause | Iterable[Cause]) -> list[StoredMessage]:
        """Messages that something made.

        Args:
            causes: Classes or names, one or many, also in a set or list.

        Returns:
            The messages, in order; none for a cause that made none.
        """
        index = await self._fresh()
        places = (index.causes.get(name, []) for name in cause_names(causes))
        return [index.messages[at] for at in merge(*places)]

    @checked
    async def by_role(self, role: str | MessageRole) -> list[StoredMessage]:
        """What a role said.

        Args:
            role: The name that was given as `sent_from`, or a chat role such as `user`.

        Returns:
            The messages, in order.
        """
        index = await self._fresh()
        name = role.value if isinstance(role, MessageRole) else role
        return [index.messages[at] for at in index.roles.get(name, [])]

    @checked
    async def containing(self, text: str) -> list[StoredMessage]:
        """Messages in whose text a string stands, in order."""
        return [message for message in (await self._fresh()).messages if text in message.text]

    @checked
    async def news(
        self, observed: Sequence[StoredMessage | ChatMessage], k: int = 0
    ) -> list[StoredMessage | ChatMessage]:
        """Which of these messages are not on the board.

        Args:
            observed: Stored messages are compared by id, others by content.
            k: Only the newest so many are looked at; 0 (the default) means all.

        Returns:
            Those that are not there, in the given order.
        """
        known = await self.latest(k)
        ids = {message.id for message in known}
        contents: set[str] = set()
        if any(isinstance(one, ChatMessage) for one in observed):
            contents = {_content(message.message) for message in known}
        return [
            one
            for one in observed
            if (_content(self.redacted(one)) not in contents if isinstance(one, ChatMessage) else one.id not in ids)
        ]

    @checked
    async def get(self, id: str) -> StoredMessage | None:  # noqa: A002  # as it is called everywhere
        """One message by its id; `None` when it is not there."""
        index = await self._fresh()
        at = index.ids.get(id)
        return None if at is None else index.messages[at]

    @checked
    async def until(self, seq: int) -> list[StoredMessage]:
        """Messages up to a place in the log, in order.

        Args:
            seq: Sequence number.

        Returns:
            The messages.
        """
        messages = (await self._fresh()).messages
        return messages[: bisect_left(messages, seq + 1, key=lambda message: message.seq)]

    async def session(self) -> Session | None:
        """The session's row; `None` before the first put."""
        return await self.storage.log.session(self._user, self.scope.session_id)

    @property
    def _user(self) -> str:
        return self.scope.user_id or ""

    async def _fresh(self) -> _Index:
        session = await self.session()
        if session is None:
            self._index = _Index()
            return self._index
        index = self._index
        if (index.sid, index.window_rev) != (session.sid, session.window_rev):
            index = _Index(session.sid, session.window_rev)
        head = index.messages[-1].seq if index.messages else 0
        if session.head_seq > head:
            rows, _ = await self.storage.log.read(
                session.sid, session.session_id, after=head, statuses=(ACTIVE, ARCHIVED)
            )
            index.take(rows)
        self._index = index
        return index


def cause_names(causes: Iterable[Cause | Iterable[Cause]]) -> list[str]:
    """Names of causes that were given one by one or in collections, each once.

    Args:
        causes: Classes, names, or collections of them.

    Returns:
        The names.
    """
    names: dict[str, None] = {}
    for cause in causes:
        several = [cause] if isinstance(cause, str | type) else cause
        names.update(dict.fromkeys(cause_name(one) for one in several))
    return list(names)


def _content(message: ChatMessage) -> str:
    return codec.content_hash(codec.encode_message(message))
