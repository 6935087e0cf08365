"""One call of a language model, told to whoever listens: what for, how long, how many tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.events import ModelCalled, emit
from llama_index_memory_tiers.instruments import listening, texts_included, who_acts

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse
    from llama_index.core.llms import LLM


async def ask(llm: LLM, messages: Sequence[ChatMessage], purpose: str) -> str:
    """Ask a model once.

    Args:
        llm: The model.
        messages: What it is asked.
        purpose: Such as `facts`, for the event.

    Returns:
        Its answer, '' when it has no words.
    """
    began = time.monotonic()
    response = None
    error: str | None = None
    try:
        response = await llm.achat(messages)
    except BaseException as failed:
        error = type(failed).__name__
        raise
    finally:
        if listening():
            emit(_event(llm, messages, response, purpose, time.monotonic() - began, error))
    return response.message.content or ""


def _event(
    llm: LLM,
    messages: Sequence[ChatMessage],
    response: ChatResponse | None,
    purpose: str,
    seconds: float,
    error: str | None,
) -> ModelCalled:
    block, session = who_acts()
    prompt = "\n\n".join(message.content or "" for message in messages)
    answer = "" if response is None else response.message.content or ""
    return ModelCalled(
        session_id=session,
        block=block,
        purpose=purpose,
        seconds=seconds,
        tokens=_used(response) or _counted(prompt, answer),
        error=error,
        model=str(getattr(llm, "model", None) or llm.class_name()),
        prompt=prompt if texts_included() else None,
        answer=answer if texts_included() else None,
    )


def _used(response: ChatResponse | None) -> int:
    """What the provider says it used; 0 when it does not say."""
    if response is None:
        return 0
    raw: Any = response.raw
    usage = raw.get("usage") if isinstance(raw, Mapping) else getattr(raw, "usage", None)
    for said in (usage, response.additional_kwargs):
        total = said.get("total_tokens") if isinstance(said, Mapping) else getattr(said, "total_tokens", None)
        if isinstance(total, int):
            return total
    return 0


def _counted(prompt: str, answer: str) -> int:
    count = get_tokenizer()
    return len(count(prompt)) + len(count(answer))
