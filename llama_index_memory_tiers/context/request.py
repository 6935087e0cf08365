"""What a context is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.blocks.base import newest_request
from llama_index_memory_tiers.context.window_view import WindowView
from llama_index_memory_tiers.records import Scope


@dataclass(frozen=True, slots=True)
class Request:
    """What a context is asked for.

    Args:
        scope: Who asks.
        view: The active messages, running turn as it was said.
        text: The current request.
        given: Messages that the caller told, or the request.
        limit: Tokens allowed.
        now: The clock.
        block_kwargs: Passed on to foreign blocks.
        told: The messages were told by the caller, who may tell others the next time.
    """

    scope: Scope
    view: WindowView
    text: str
    given: tuple[ChatMessage, ...]
    limit: int
    now: datetime
    block_kwargs: Mapping[str, Any]
    told: bool = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """What stock and third-party blocks are given."""
        return self.given if self.told else (*self.view.stored, *self.given)

    @property
    def turn(self) -> int:
        """Sequence number of the newest user message."""
        for stored in reversed(self.view.window.messages):
            if stored.role == MessageRole.USER:
                return stored.seq
        return 0


def make_request(
    scope: Scope,
    view: WindowView,
    *,
    asked: str | ChatMessage | None,
    messages: Sequence[ChatMessage] | None,
    redact: Callable[[ChatMessage], ChatMessage],
    limit: int,
    now: datetime,
    block_kwargs: Mapping[str, Any],
) -> Request:
    """Put together what blocks and packer need to know.

    Args:
        scope: Who asks.
        view: The active messages.
        asked: The request as text or message; `None` means the newest user message.
        messages: Or these messages, whose newest user message is the request.
        redact: Takes secrets out of what the caller told, before any block or model sees it.
        limit: Tokens allowed.
        now: The clock.
        block_kwargs: Passed on to foreign blocks.

    Returns:
        The request.
    """
    given = list(messages or ())
    if isinstance(asked, ChatMessage):
        given.append(asked)
    elif asked is not None:
        given.append(ChatMessage(role=MessageRole.USER, content=asked))
    given = [redact(message) for message in given]
    asking = (stored.text for stored in reversed(view.window.messages) if stored.role == MessageRole.USER)
    text = newest_request(given) or (given[-1].content or "" if given else next(asking, ""))
    return Request(
        scope=scope,
        view=view,
        text=text,
        given=tuple(given),
        limit=limit,
        now=now,
        block_kwargs=block_kwargs,
        told=messages is not None,
    )
