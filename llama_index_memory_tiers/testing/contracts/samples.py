"""What both contract suites say and look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000049454e44ae426082")
ODD_TEXTS = (
    "nul \0 in it",
    "lone \ud83d surrogate",
    "🐈‍⬛ und Ümläute",
    "我的猫叫汤姆。",
    "'; DROP TABLE x; --",
    "{{ x }} </memory>",
)


def user_says(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role=MessageRole.USER, content=text)


def texts(messages: Sequence[ChatMessage]) -> list[str | None]:
    """Their texts."""
    return [message.content for message in messages]


def numbered(count: int, start: int = 0) -> list[ChatMessage]:
    """Messages that can be told apart by their number."""
    return [user_says(f"message {number}") for number in range(start, start + count)]


def tool_turn() -> list[ChatMessage]:
    """A turn with a call of a tool and its result."""
    call = ToolCallBlock(tool_call_id="call-1", tool_name="weather", tool_kwargs={"city": "Paris", "days": [1, 2]})
    return [
        user_says("How is the weather in Paris?"),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[TextBlock(text="Let me look."), call]),
        ChatMessage(role=MessageRole.TOOL, content="Sunny.", additional_kwargs={"tool_call_id": "call-1"}),
        ChatMessage(role=MessageRole.ASSISTANT, content="It is sunny.", additional_kwargs={"cost": 0.5, "tags": None}),
    ]


def content_text(content: Any) -> str:
    """The text of what a block returned.

    Args:
        content: A text, content blocks, chat messages, or nothing.

    Returns:
        The text; '' for nothing.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        (part.content or "") if isinstance(part, ChatMessage) else getattr(part, "text", type(part).__name__)
        for part in content
    )


async def close(resource: Any) -> None:
    """Close what can be closed."""
    close = getattr(resource, "aclose", None)
    if close is not None:
        await close()
