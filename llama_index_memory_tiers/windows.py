"""A session's window: in our log, or in a chat store that the user brought."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.copies import clone
from llama_index_memory_tiers.events import ForgetEntry
from llama_index_memory_tiers.records import MessageMeta, Scope, StoredMessage
from llama_index_memory_tiers.storage import Entry, Storage, Window, codec
from llama_index_memory_tiers.storage.rows import statuses_of
from llama_index_memory_tiers.storage.selection import Selection


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append found.

    Args:
        stored: How many messages were new.
        active_tokens: Size of the window now.
        head_seq: Sequence number of the newest message; 0 where messages have none.
    """

    stored: int
    active_tokens: int
    head_seq: int = 0


class SessionWindow(Protocol):
    """What a memory needs of the place where its window is kept."""

    async def read(self) -> Window:
        """The active messages, shared: copy before handing out."""

    async def append(self, entries: Sequence[Entry], consumers: Sequence[str], *, distinct: bool = False) -> Appended:
        """Store messages at the end; with `distinct`, only those with new content or metadata."""

    async def replace(self, entries: Sequence[Entry], consumers: Sequence[str], room_tokens: int) -> Appended:
        """Make the window hold these messages."""

    async def archive(self, seqs: Sequence[int]) -> int:
        """Move messages out of the window."""

    async def clear(self, status: MessageStatus | None) -> None:
        """Empty the window, the archive, or (None) both."""

    async def history(self, status: MessageStatus | None) -> list[StoredMessage]:
        """Messages of a status, or (None) active and archived; copies, oldest first."""

    async def forget(self, selection: Selection) -> ForgetEntry | None:
        """Forget what is kept outside our storage; `None` when nothing is."""


class LogWindow:
    """The window in our log: sequence numbers, one statement a read, nothing lost.

    Args:
        storage: Where.
        scope: Whose.
        counter: Measures; counts that another counter made are renewed when they are read.
    """

    def __init__(self, storage: Storage, scope: Scope, counter: TokenCounter) -> None:
        self._storage = storage
        self._user = scope.user_id or ""
        self._session = scope.session_id
        self._counter = counter

    async def read(self) -> Window:
        """See `SessionWindow`."""
        window = await self._storage.log.window(self._user, self._session)
        name = self._counter.name
        if window.counters.count(name) == len(window.counters):
            return window
        foreign = [stored for stored, made_by in zip(window.messages, window.counters, strict=True) if made_by != name]
        counts = await asyncio.to_thread(
            lambda: {stored.seq: self._counter.message(stored.message) for stored in foreign}
        )
        await self._storage.log.recount(window.sid, counts, name)
        again = await self._storage.log.window(self._user, self._session)
        if again.counters.count(name) == len(again.counters):
            return again
        # A memory with another counter is at work here as well, and has counted once more in its measure.
        mine = (one._replace(tokens=counts[one.seq]) if one.seq in counts else one for one in window.messages)
        return replace(window, messages=tuple(mine), counters=(name,) * len(window.counters))

    async def append(self, entries: Sequence[Entry], consumers: Sequence[str], *, distinct: bool = False) -> Appended:
        """See `SessionWindow`."""
        result = await self._storage.log.append(
            self._user, self._session, entries, now=self._storage.now(), consumers=consumers, distinct=distinct
        )
        return Appended(result.stored, result.active_tokens, result.head_seq)

    async def replace(self, entries: Sequence[Entry], consumers: Sequence[str], room_tokens: int) -> Appended:
        """See `SessionWindow`."""
        result = await self._storage.log.align(
            self._user,
            self._session,
            entries,
            now=self._storage.now(),
            room_tokens=room_tokens,
            consumers=consumers,
        )
        return Appended(result.stored, result.active_tokens, result.head_seq)

    async def archive(self, seqs: Sequence[int]) -> int:
        """See `SessionWindow`."""
        return await self._storage.log.archive(self._user, self._session, seqs)

    async def clear(self, status: MessageStatus | None) -> None:
        """See `SessionWindow`."""
        await self._storage.log.clear(self._user, self._session, statuses_of(status))

    async def history(self, status: MessageStatus | None) -> list[StoredMessage]:
        """See `SessionWindow`."""
        statuses = statuses_of(status)
        session = await self._storage.log.session(self._user, self._session)
        if session is None:
            return []
        found, _ = await self._storage.log.read(session.sid, self._session, statuses=statuses)
        return found

    async def forget(self, selection: Selection) -> None:  # noqa: ARG002
        """See `SessionWindow`."""
        return


class StoreWindow:
    """The window in a foreign chat store; what leaves it is copied into our log for the blocks.

    Weaker than `LogWindow`, as a chat store has neither ids nor transactions: concurrent writers may archive the
    same message twice, a crash between its archive and our log loses a message for the blocks, ids and times are
    not known, and a system message leaves with the oldest turn. Its key is the session's id, as in stock; with a
    user it is `<length of user id>:<user id>:<session id>`, as a store knows no users.

    Args:
        store: The user's store.
        storage: Our log, for what leaves the window.
        scope: Whose.
        counter: Measures.
    """

    def __init__(self, store: AsyncDBChatStore, storage: Storage, scope: Scope, counter: TokenCounter) -> None:
        self._store = store
        self._session = scope.session_id
        self._key = _store_key(scope)
        self._counter = counter
        self._storage = storage
        self._log = LogWindow(storage, scope, counter)
        self._consumers: tuple[str, ...] = ()

    async def read(self) -> Window:
        """See `SessionWindow`."""
        messages = tuple(await self._stored(MessageStatus.ACTIVE))
        log = await self._log.read()
        return replace(log, messages=messages, counters=(self._counter.name,) * len(messages))

    async def append(
        self,
        entries: Sequence[Entry],
        consumers: Sequence[str],
        *,
        distinct: bool = False,  # noqa: ARG002  # a chat store cannot tell; `TieredMemory.board` refuses it
    ) -> Appended:
        """See `SessionWindow`."""
        self._consumers = tuple(consumers)
        messages = [codec.decode_message(entry.data) for entry in entries]
        if messages:
            await self._store.add_messages(self._key, messages)
        return Appended(len(messages), await self._size())

    async def replace(self, entries: Sequence[Entry], consumers: Sequence[str], room_tokens: int) -> Appended:  # noqa: ARG002
        """See `SessionWindow`."""
        self._consumers = tuple(consumers)
        await self._store.set_messages(self._key, [codec.decode_message(entry.data) for entry in entries])
        return Appended(len(entries), await self._size())

    async def archive(self, seqs: Sequence[int]) -> int:
        """See `SessionWindow`."""
        moved = await self._store.archive_oldest_messages(self._key, max(seqs, default=0))
        entries = [self._entry(message) for message in moved]
        if entries:
            await self._log.append(entries, self._consumers)
            window = await self._log.read()
            await self._log.archive([stored.seq for stored in window.messages])
        return len(moved)

    async def clear(self, status: MessageStatus | None) -> None:
        """See `SessionWindow`."""
        await self._store.delete_messages(self._key, status)

    async def history(self, status: MessageStatus | None) -> list[StoredMessage]:
        """See `SessionWindow`."""
        return await self._stored(status)

    async def forget(self, selection: Selection) -> ForgetEntry:
        """See `SessionWindow`: the whole window or nothing, as a chat store has no ids."""
        if not selection.everything:
            return ForgetEntry("chat store", 0, None)
        keys = [self._key]
        if selection.session_id is None:  # of its other sessions we know those of which something has left the window
            sessions = await self._storage.log.sessions(selection.user_id)
            keys += [_store_key(Scope(session.session_id, selection.user_id or None)) for session in sessions]
            keys += [key for key in await self._store.get_keys() if key.startswith(_store_prefix(selection.user_id))]
        removed = left = 0
        for key in dict.fromkeys(keys):
            removed += len(await self._store.get_messages(key, None))
            await self._store.delete_messages(key, None)
            left += len(await self._store.get_messages(key, None))
        return ForgetEntry("chat store", removed - left, left)

    async def _size(self) -> int:
        return sum(stored.tokens for stored in await self._stored(MessageStatus.ACTIVE))

    async def _stored(self, status: MessageStatus | None) -> list[StoredMessage]:
        now = self._storage.now()
        return [
            StoredMessage(
                id="",
                source=clone(message),
                status=status or MessageStatus.ACTIVE,
                said=now,
                tokens=self._counter.message(message),
                meta=MessageMeta(),
                session_id=self._session,
                sid=0,
                seq=number,
            )
            for number, message in enumerate(await self._store.get_messages(self._key, status), 1)
        ]

    def _entry(self, message: ChatMessage) -> Entry:
        return Entry(
            uid=self._storage.ids(),
            role=message.role.value,
            tokens=self._counter.message(message),
            counter=self._counter.name,
            created_at=self._storage.now(),
            data=codec.encode_message(message),
        )


def _store_key(scope: Scope) -> str:
    """The key of a window; the length tells where the user's id ends, whatever the ids are made of."""
    if scope.user_id is None:
        return scope.session_id
    return f"{_store_prefix(scope.user_id)}{scope.session_id}"


def _store_prefix(user_id: str) -> str:
    return f"{len(user_id)}:{user_id}:"
