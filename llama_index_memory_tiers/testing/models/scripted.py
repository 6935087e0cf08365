"""Models that answer from a script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools.types import BaseTool
from pydantic import PrivateAttr

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.testing.models.answering import Answering, ToolCall, ToolCalling, call_message

_Answer: TypeAlias = "str | ChatMessage | ToolCall | Sequence[ToolCall]"
_Step: TypeAlias = "_Answer | Exception | Callable[[Sequence[ChatMessage]], _Answer]"


class ScriptedLLM(Answering):
    """Answers from a script, one step a call; calls are kept; safe to use from several threads.

    Args:
        script: The steps, each text, a whole message, an exception to raise, or a function of the messages that
            returns one of these. A single function instead of a list answers every call.
        kwargs: What LlamaIndex's `LLM` takes.
    """

    _script: Sequence[_Step] | Callable[[Sequence[ChatMessage]], _Answer] = PrivateAttr()
    _calls: list[list[ChatMessage]] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self, script: Sequence[_Step] | Callable[[Sequence[ChatMessage]], _Answer] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._script = script if callable(script) else [script] if isinstance(script, str) else list(script)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return cls.__name__

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of every call so far, as they were then."""
        with self._lock:
            return list(self._calls)

    def _reply(self, messages: Sequence[ChatMessage], tools: Sequence[BaseTool]) -> ChatMessage:  # noqa: ARG002
        seen = [message.model_copy(deep=True) for message in messages]
        with self._lock:
            self._calls.append(seen)
            number = len(self._calls)
        return _as_message(self._step(number), messages)

    def _step(self, number: int) -> _Step:
        if callable(self._script):
            return self._script
        if number > len(self._script):
            raise ConfigurationError(
                f"Call {number} came to a {type(self).__name__} whose script has {len(self._script)} steps.",
                allowed="Each call of the model takes one step.",
                remedy="Add steps, or pass a function of the messages, which answers every call.",
            )
        return self._script[number - 1]


def _as_message(step: _Step, messages: Sequence[ChatMessage]) -> ChatMessage:
    if isinstance(step, Exception):
        raise step
    if isinstance(step, ChatMessage):
        return step.model_copy(deep=True)
    if isinstance(step, str):
        return ChatMessage(role=MessageRole.ASSISTANT, content=step)
    if isinstance(step, ToolCall):
        return call_message([step])
    if callable(step):
        return _as_message(step(messages), messages)
    return call_message(step)


class ScriptedFunctionCallingLLM(ScriptedLLM, ToolCalling):
    """A scripted model that also calls tools.

    Args:
        script: Steps as of `ScriptedLLM`; also a `ToolCall`, or a list of them for parallel calls.
        kwargs: What LlamaIndex's `LLM` takes.
    """
