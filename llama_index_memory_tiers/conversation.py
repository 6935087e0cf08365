"""One turn by hand: a context for a model, its answer, both remembered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.extraction.models import llm_of_settings
from llama_index_memory_tiers.roles import SYSTEM_ROLES


class Remembering(Protocol):
    """What a turn needs of a memory."""

    async def aget(self, input: Any = None, *, initial_token_count: int = 0) -> list[ChatMessage]:  # noqa: A002  # stock's name
        """A context."""

    async def aput_messages(self, messages: list[ChatMessage], *, created_at: datetime | None = None) -> None:
        """Store messages."""


def pair(user_message: str, assistant_message: str) -> list[ChatMessage]:
    """A question and its answer as messages.

    Raises:
        ConfigurationError: One of them is no text.
    """
    for name, text in (("user_message", user_message), ("assistant_message", assistant_message)):
        if not isinstance(text, str):
            raise ConfigurationError(
                f"{name} of type {type(text).__name__} was given.",
                allowed="It is a text.",
                remedy="Pass the text; messages with other content go through aput_messages.",
            )
    return [
        ChatMessage(role=MessageRole.USER, content=user_message),
        ChatMessage(role=MessageRole.ASSISTANT, content=assistant_message),
    ]


def answering_model(given: LLM | None, blocks: Sequence[BaseMemoryBlock[Any]]) -> LLM:
    """The model that answers: the one given, else that of a block, else that of `Settings` if one was set.

    Raises:
        ConfigurationError: There is none.
    """
    owned = (getattr(block, "llm", None) for block in blocks)
    found = given or next((llm for llm in owned if isinstance(llm, LLM)), None) or llm_of_settings()
    if found is None:
        raise ConfigurationError(
            "get_response was called without llm, no block has one, and Settings.llm is not set.",
            allowed="An answer is written by a model of your choice.",
            remedy="Pass llm=…, give one to HeatMemoryBlock(llm=…), or set Settings.llm.",
        )
    return found


async def respond(memory: Remembering, llm: LLM, user_message: str, instructions: str, *, spoken_for: int) -> str:
    """Answer a message with what is remembered, and remember both.

    Args:
        memory: The memory.
        llm: The model.
        user_message: What the user says.
        instructions: What the answer is to heed; stands in the system message.
        spoken_for: Tokens of the two.

    Returns:
        The answer. When the model fails, nothing is stored.
    """
    context = await memory.aget(user_message, initial_token_count=spoken_for)
    asked = [*_instructed(context, instructions), ChatMessage(role=MessageRole.USER, content=user_message)]
    response = await llm.achat(asked)
    answer = response.message.content or ""
    await memory.aput_messages(pair(user_message, answer))
    return answer


def _instructed(context: list[ChatMessage], instructions: str) -> list[ChatMessage]:
    if not instructions.strip():
        return context
    if context and context[0].role in SYSTEM_ROLES:
        first = ChatMessage(role=context[0].role, content=f"{context[0].content or ''}\n\n{instructions}")
        return [first, *context[1:]]
    return [ChatMessage(role=MessageRole.SYSTEM, content=instructions), *context]
