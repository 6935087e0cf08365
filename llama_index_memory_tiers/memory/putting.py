"""Messages come in, old turns leave the window."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.budget import plan_flush, window_row
from llama_index_memory_tiers.entries import About, Prepared
from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.events import (
    MessagesPut,
    WindowFlushed,
    emit,
)
from llama_index_memory_tiers.instruments import span
from llama_index_memory_tiers.memory.base import MemoryBase
from llama_index_memory_tiers.pacing import Key
from llama_index_memory_tiers.records import Cause, StoredMessage
from llama_index_memory_tiers.roles import RESULT_ROLES

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

_KNOWN_SESSIONS = 1024


class Putting(MemoryBase):
    """Messages on their way in, and out of the window."""

    async def aput(
        self,
        message: ChatMessage,
        *,
        created_at: datetime | None = None,
        sent_from: str = "",
        send_to: str | Sequence[str] = (),
        cause_by: Cause = "",
        uid: str | None = None,
    ) -> None:
        """Store a message; when this returns it is durable, whatever blocks or models do.

        Args:
            message: The message; it is copied.
            created_at: When it was said; naive means UTC; default now.
            sent_from: Who spoke.
            send_to: Whom it addresses; one name or several.
            cause_by: What made it: a name, or the class of an action.
            uid: Your own id: repeating a put with it stores nothing twice, also when the first was forgotten or reset.

        Raises:
            InvalidMessageError: It cannot be stored; nothing was.
        """
        made = self._shared.entries.describe(created_at, sent_from, send_to, cause_by)
        with span("TieredMemory.aput"):
            await self._put([message], [uid], made)

    async def aput_messages(
        self,
        messages: list[ChatMessage],
        *,
        created_at: datetime | None = None,
        sent_from: str = "",
        send_to: str | Sequence[str] = (),
        cause_by: Cause = "",
        uids: Sequence[str | None] | None = None,
    ) -> None:
        """Store messages in one transaction, all or none; an empty list changes nothing.

        The arguments are those of `aput` and hold for all messages; `uids` has one id per message.
        """
        made = self._shared.entries.describe(created_at, sent_from, send_to, cause_by)
        with span("TieredMemory.aput_messages"):
            await self._put(messages, uids, made)

    async def _put(
        self,
        messages: Sequence[ChatMessage],
        uids: Sequence[str | None] | None,
        about: About,
        *,
        distinct: bool = False,
    ) -> int:
        """Store messages, and see to what follows from that; returns how many were new."""
        with self._shared.delivery.serving():
            prepared = await self._shared.entries.make(messages, uids, about)
            if not prepared.entries:
                return 0
            await self._shared.delivery.catch_up(self._key)
            await self._shared.delivery.attach(self._key)
            failpoints.reach("put.prepared")
            result = await self._window.append(prepared.entries, self._shared.delivery.keys, distinct=distinct)
            failpoints.reach("put.stored")
            self._remember_raw(prepared.raw, new_turn=prepared.new_turn)
            if not self._shared.stuck.get(self._key, True) and any(
                e.role not in RESULT_ROLES for e in prepared.entries
            ):
                del self._shared.stuck[self._key]
            emit(MessagesPut(session_id=self.session_id, stored=result.stored, active_tokens=result.active_tokens))
            roles = [entry.role for entry in prepared.entries]
            opens = result.stored == 1 and self._shared.delivery.only_opens(self._key, roles, result.head_seq)
            await self._after_write(result.active_tokens, nothing_due=opens)
            return result.stored

    async def aset(self, messages: list[ChatMessage]) -> None:
        """Make the window hold these messages: what matches keeps its place, what is dropped is archived.

        Args:
            messages: The whole window, oldest first; memory text that `aget` put into it is recognised.
        """
        with self._shared.delivery.serving():
            prepared = await self._shared.entries.make(messages, None, self._shared.entries.describe())
            await self._shared.delivery.attach(self._key)
            result = await self._window.replace(prepared.entries, self._shared.delivery.keys, self._window_tokens)
            self._remember_raw(await self._kept_raw(prepared), new_turn=True)
            if result.stored:
                emit(MessagesPut(session_id=self.session_id, stored=result.stored, active_tokens=result.active_tokens))
            await self._after_write(result.active_tokens)

    async def _kept_raw(self, prepared: Prepared) -> dict[str, ChatMessage]:
        """The running turn as it was said, by the ids that it has in the log: messages that matched keep theirs."""
        if not prepared.raw:
            return {}
        stored = (await self._window.read()).messages
        # The window ends with what was wanted.
        pairs = zip(reversed(stored), reversed(prepared.entries), strict=False)
        return {row.id: prepared.raw[entry.uid] for row, entry in pairs if entry.uid in prepared.raw}

    async def _after_write(self, active_tokens: int, *, nothing_due: bool = False) -> None:
        self._shared.forgetter.tell_waiting()
        if self._shared.upkeep.due((self.user_id or "", "" if self.user_id is not None else self.session_id)):
            self._shared.upkeep.start(self.amaintain(dry_run=False))
        if active_tokens > self._window_tokens or self._window_bound[0] is not None:
            await self._postponable(self._flush_window())
        if self.delivery == "inline":
            if not nothing_due:
                await self._postponable(self._shared.delivery.deliver(self._key))
            return
        self._shared.delivery.drain_once(self.user_id or "")
        if nothing_due:
            self._shared.delivery.wait_for_silence(self._key)
        else:
            self._shared.delivery.schedule(self._key)

    async def _postponable(self, work: Awaitable[object]) -> None:
        """Do what the next put does else: the messages are stored, and who is told to repeat stores them twice."""
        try:
            await work
        except StorageError as error:
            about = {"session_id": self.session_id, "error": type(error).__name__}
            _logger.warning("stored, the rest is left to the next put", extra=about)

    async def _flush_window(self) -> None:
        if self._key in self._shared.stuck:
            return  # what stays alone is too large; nothing changes before the next turn, or group without turns
        async with self._shared.turn(self._key):
            await self._flush_now()

    async def _flush_now(self) -> None:
        window = await self._window.read()
        window_messages, flush_messages = self._window_bound
        seqs = plan_flush(
            [window_row(stored.seq, stored.message, stored.tokens) for stored in window.messages],
            limit_tokens=self._window_tokens,
            flush_tokens=self.token_flush_size,
            window_messages=window_messages,
            flush_messages=flush_messages,
        )
        if not seqs:
            if window.tokens > self._window_tokens:
                turns = any(stored.role == MessageRole.USER for stored in window.messages)
                self._shared.stuck[self._key] = turns
                _keep_newest(self._shared.stuck)
            return
        # A damaged row leaves with its neighbours, or what waits for a flush would wait behind it for ever.
        damaged = [seq for seq in window.damaged if seq < seqs[-1]]
        failpoints.reach("flush.planned")
        archived = await self._window.archive([*damaged, *seqs])
        failpoints.reach("flush.archived")
        emit(WindowFlushed(session_id=self.session_id, archived=archived))

    async def _manage_queue(self) -> None:
        await self._flush_window()

    def _remember_raw(self, raw: Mapping[str, ChatMessage], *, new_turn: bool) -> None:
        """Keep the running turn as it was said, in RAM: an agent can use a key that it was just given."""
        shared = self._shared
        if new_turn:
            shared.raw.pop(self._key, None)
            shared.stuck.pop(self._key, None)
        if raw:
            shared.raw.setdefault(self._key, {}).update(raw)
            _keep_newest(shared.raw)

    async def aget_all(self, status: MessageStatus | None = None) -> list[ChatMessage]:
        """All messages of the session; with a status, those in the window or behind it."""
        return [stored.message for stored in await self.amessages(status)]

    async def amessages(self, status: MessageStatus | None = None) -> list[StoredMessage]:
        """Like `aget_all`, with ids, times, tokens and metadata."""
        return await self._window.history(status)

    async def areset(self, status: MessageStatus | None = None) -> None:
        """Empty the window and the session's history; what blocks have learnt stays.

        Args:
            status: Only the window (`active`) or only what is behind it (`archived`).
        """
        await self._window.clear(status)
        self._remember_raw({}, new_turn=True)
        if self.delivery == "background":
            self._shared.delivery.schedule(self._key)


def _keep_newest(of_sessions: dict[Key, _T]) -> None:
    while len(of_sessions) > _KNOWN_SESSIONS:
        del of_sessions[next(iter(of_sessions))]
