"""Contexts go out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, MessageRole

from llama_index_memory_tiers.arguments import (
    check_request,
)
from llama_index_memory_tiers.context import Request, make_request
from llama_index_memory_tiers.events import (
    ContextReport,
)
from llama_index_memory_tiers.instruments import span
from llama_index_memory_tiers.memory.base import MemoryBase


class Getting(MemoryBase):
    """Contexts on their way out."""

    async def aget(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        *,
        messages: list[ChatMessage] | None = None,
        initial_token_count: int = 0,
        **block_kwargs: Any,
    ) -> list[ChatMessage]:
        """Return the context for the current request, within the token limit as rendered.

        Args:
            input: The request as text or message; default the newest user message.
            messages: Or messages for the blocks to look at, the newest user message being the request.
            initial_token_count: Tokens that are spoken for already.
            block_kwargs: Passed on to stock and third-party blocks.

        Returns:
            Messages, yours to change.

        Raises:
            BudgetError: What must be shown does not fit, and `overflow="raise"`.
        """
        with span("TieredMemory.aget"), self._shared.delivery.serving():
            request = await self._request(input, messages, initial_token_count, block_kwargs)
            return await self._shared.contexts.messages(request)

    async def aexplain(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        *,
        messages: list[ChatMessage] | None = None,
        initial_token_count: int = 0,
        **block_kwargs: Any,
    ) -> ContextReport:
        """Say what `aget` with these arguments returns and why: tokens per part, what was left out, which leg found it.

        Args:
            input: See `aget`.
            messages: See `aget`.
            initial_token_count: See `aget`.
            block_kwargs: See `aget`.

        Returns:
            The report, with the context in `messages`.
        """
        request = await self._request(input, messages, initial_token_count, block_kwargs)
        return await self._shared.contexts.report(request)

    async def _request(
        self,
        asked: str | ChatMessage | None,
        messages: list[ChatMessage] | None,
        initial_token_count: int,
        block_kwargs: Mapping[str, Any],
    ) -> Request:
        check_request(asked, messages, initial_token_count)
        await self._shared.delivery.catch_up(self._key)
        self._shared.delivery.drain_once(self.user_id or "")
        await self._shared.delivery.freshen(self._key)
        raw = self._shared.raw.get(self._key, {})
        window = await self._window.read()
        self._shared.forgetter.tell_waiting()  # the first read has opened the storage
        return make_request(
            self.scope,
            self._shared.contexts.views.of(self.scope, window, raw),
            asked=asked,
            messages=messages,
            redact=self._shared.entries.redacted,
            limit=max(0, self.token_limit - self.reserve_tokens - initial_token_count),
            now=self.storage.clock(),
            block_kwargs=block_kwargs,
        )

    # -- names that LlamaIndex reaches for -------------------------------------------------------------------

    def _estimate_token_count(
        self, message_or_blocks: str | ChatMessage | list[ChatMessage] | list[ContentBlock]
    ) -> int:
        counter = self._shared.counter
        if isinstance(message_or_blocks, str):
            return counter.text(message_or_blocks)
        if isinstance(message_or_blocks, ChatMessage):
            return counter.message(message_or_blocks)
        return sum(
            counter.message(part) if isinstance(part, ChatMessage) else counter.block(part)
            for part in message_or_blocks
        )

    async def _get_memory_blocks_content(
        self,
        chat_history: list[ChatMessage],
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        **block_kwargs: Any,
    ) -> dict[str, Any]:
        given = [*chat_history]
        if input is not None:
            given.append(input if isinstance(input, ChatMessage) else ChatMessage(role=MessageRole.USER, content=input))
        request = await self._request(None, given, 0, block_kwargs)
        return await self._shared.contexts.raw_contents(request)
