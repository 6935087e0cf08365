"""TieredChatStore: the message log as a LlamaIndex chat store, for one user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus
from pydantic import ConfigDict, PrivateAttr

from llama_index_memory_tiers.checks import check_whole, checked
from llama_index_memory_tiers.records import Scope, StoredMessage
from llama_index_memory_tiers.redaction import Redactor, checked_redaction
from llama_index_memory_tiers.storage import Storage, codec
from llama_index_memory_tiers.storage.rows import ARCHIVED, GONE, Entry, statuses_of


class TieredChatStore(AsyncDBChatStore):
    """An `AsyncDBChatStore` over our log; LlamaIndex's own `Memory` accepts it as `chat_store`.

    Its `key` is the session id. Order is the order of the puts, whatever the clock says; a deletion leaves no
    text behind.

    Args:
        storage: A Storage, a file path or a database URI; `None` is a private temporary database.
        user_id: Whose sessions; other users' sessions of the same name are out of reach.
        redaction: A `Redactor` that takes secrets out of what is stored, or `"default"` for ours; `None` (the default)
            stores messages as they are, as LlamaIndex's own stores do. A memory gives its `sql_store` its own.

    Raises:
        ConfigurationError: `redaction` is something else.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    user_id: str | None = None
    _storage: Storage = PrivateAttr()
    _redactor: Redactor | None = PrivateAttr(default=None)

    def __init__(
        self,
        storage: Storage | str | None = None,
        *,
        user_id: str | None = None,
        redaction: Redactor | Literal["default"] | None = None,
    ) -> None:
        redactor = checked_redaction(redaction)
        super().__init__(user_id=Scope(session_id="any", user_id=user_id).user_id)
        self._storage = storage if isinstance(storage, Storage) else Storage(storage)
        self._redactor = redactor

    @property
    def storage(self) -> Storage:
        """Where the messages are."""
        return self._storage

    @classmethod
    def class_name(cls) -> str:
        """Name used in LlamaIndex's serialisation."""
        return "TieredChatStore"

    @checked
    async def get_messages(
        self,
        key: str,
        status: MessageStatus | None = MessageStatus.ACTIVE,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[ChatMessage]:
        """Messages of a session in the order of their puts.

        Args:
            key: Session id.
            status: Only these; `None` means active and archived.
            limit: At most so many, from the oldest.
            offset: Skip so many first.

        Returns:
            Copies.
        """
        return [stored.message for stored in await self.stored_messages(key, status, limit, offset)]

    @checked
    async def stored_messages(
        self,
        key: str,
        status: MessageStatus | None = MessageStatus.ACTIVE,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[StoredMessage]:
        """Like `get_messages`, with ids, times and metadata."""
        for name, value in (("limit", limit), ("offset", offset)):
            if value is not None:
                check_whole(name, value, least=0)
        session = await self._storage.log.session(self._user, self._key(key))
        if session is None:
            return []
        found, _ = await self._storage.log.read(
            session.sid, key, limit=limit, offset=offset, statuses=statuses_of(status)
        )
        return found

    @checked
    async def count_messages(self, key: str, status: MessageStatus | None = MessageStatus.ACTIVE) -> int:
        """How many messages a session has; `None` counts active and archived."""
        session = await self._storage.log.session(self._user, self._key(key))
        return 0 if session is None else await self._storage.log.count(session.sid, statuses_of(status))

    @checked
    async def add_message(self, key: str, message: ChatMessage, status: MessageStatus = MessageStatus.ACTIVE) -> None:
        """Store one message at the end."""
        await self.add_messages(key, [message], status)

    @checked
    async def add_messages(
        self, key: str, messages: list[ChatMessage], status: MessageStatus = MessageStatus.ACTIVE
    ) -> None:
        """Store messages at the end, all or none; an empty list changes nothing."""
        self._key(key)
        if not messages:
            return
        result = await self._storage.log.append(self._user, key, self._entries(messages), now=self._storage.now())
        if status is not MessageStatus.ACTIVE:
            new = range(result.head_seq - result.stored + 1, result.head_seq + 1)
            await self._storage.log.archive(self._user, key, list(new))

    @checked
    async def set_messages(
        self, key: str, messages: list[ChatMessage], status: MessageStatus = MessageStatus.ACTIVE
    ) -> None:
        """Replace what the session shows, all or nothing; what is dropped is archived, never lost."""
        entries = self._entries(messages)
        await self._storage.log.align(self._user, self._key(key), entries, now=self._storage.now(), room_tokens=None)
        if status is not MessageStatus.ACTIVE:
            window = await self._storage.log.window(self._user, key)
            await self._storage.log.archive(self._user, key, [row.seq for row in window.messages])

    @checked
    async def delete_message(self, key: str, idx: int | str) -> ChatMessage | None:
        """Delete a message.

        Args:
            key: Session id.
            idx: Its public id (`StoredMessage.id`), or its sequence number.

        Returns:
            The message, or `None` when there is none.
        """
        for stored in await self.stored_messages(key, None):
            if idx in (stored.id, stored.seq):
                moved = await self._storage.log.archive(self._user, key, [stored.seq], status=GONE)
                return stored.message if moved else None
        return None

    @checked
    async def delete_messages(self, key: str, status: MessageStatus | None = None) -> None:
        """Delete a session's messages; their text is gone."""
        await self._storage.log.clear(self._user, self._key(key), statuses_of(status), gone=True)

    @checked
    async def delete_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        """Delete the oldest active messages and return them."""
        return await self._move_oldest(key, n, GONE)

    @checked
    async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        """Archive the oldest active messages and return them."""
        return await self._move_oldest(key, n, ARCHIVED)

    async def get_keys(self) -> list[str]:
        """Ids of the user's sessions that have messages ever written, oldest first."""
        return [session.session_id for session in await self._storage.log.sessions(self._user)]

    async def aclose(self) -> None:
        """Close the storage, if this store opened it."""
        await self._storage.aclose()

    @property
    def _user(self) -> str:
        return self.user_id or ""

    def _key(self, key: str) -> str:
        return Scope(session_id=key, user_id=self.user_id).session_id

    async def _move_oldest(self, key: str, n: int, status: str) -> list[ChatMessage]:
        count = check_whole("n", n, least=0)
        moved = await self._storage.log.move_oldest(self._user, self._key(key), count, status=status)
        return [stored.message for stored in moved]

    def _entries(self, messages: Sequence[ChatMessage]) -> list[Entry]:
        now = self._storage.now()
        if self._redactor is not None:
            messages = [self._redactor.message(message) for message in messages]
        return [
            Entry(self._storage.ids(), message.role.value, 0, "", now, codec.encode_message(message))
            for message in messages
        ]
