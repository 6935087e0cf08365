"""What LlamaIndex asks of a model, led to one method; calls of tools."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.tools.types import BaseTool
from pydantic import ConfigDict

_PIECE = re.compile(r"\s*\S+|\s+\Z")


def _call_id() -> str:
    return f"call_{uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that a scripted model calls.

    Args:
        name: Name of the tool.
        kwargs: Its arguments.
        id: Id of the call; `None` (the default) lets the model make one.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


class Answering(LLM):
    """Every way to call a model leads to `_reply`, which sees the messages and the tools."""

    model_config = ConfigDict(extra="forbid")  # a misspelt name is no silent default

    @abstractmethod
    def _reply(self, messages: Sequence[ChatMessage], tools: Sequence[BaseTool]) -> ChatMessage:
        """Answer."""

    @property
    def metadata(self) -> LLMMetadata:
        """Name and abilities, as LlamaIndex asks for them."""
        return LLMMetadata(
            is_chat_model=True,
            is_function_calling_model=isinstance(self, FunctionCallingLLM),
            model_name=type(self).__name__,
        )

    def _respond(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> ChatResponse:
        message = self._reply(messages, kwargs.get("tools") or ())
        return ChatResponse(message=message, raw={"model": type(self).__name__}, delta=message.content or "")

    def _complete(self, prompt: str) -> CompletionResponse:
        text = self._reply([ChatMessage(content=prompt)], ()).content or ""
        return CompletionResponse(text=text, delta=text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._respond(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._respond(messages, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages, word by word; a tool call comes with the last piece."""
        return _chunks(self._respond(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer messages, word by word; a tool call comes with the last piece."""
        return _awaited(_chunks(self._respond(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt, which counts as one user message."""
        return self._complete(prompt)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt, which counts as one user message."""
        return self._complete(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Answer a prompt, word by word."""
        return _text_chunks(self._complete(prompt))

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002 -- LlamaIndex's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt, word by word."""
        return _awaited(_text_chunks(self._complete(prompt)))


def _chunks(whole: ChatResponse) -> Generator[ChatResponse, None, None]:
    message, text = whole.message, ""
    for piece in _PIECE.findall(message.content or ""):
        text += piece
        partial = message.model_copy(update={"blocks": [TextBlock(text=text)]})
        yield ChatResponse(message=partial, delta=piece, raw=whole.raw)
    yield ChatResponse(message=message, delta="", raw=whole.raw)


def _text_chunks(whole: CompletionResponse) -> Generator[CompletionResponse, None, None]:
    text = ""
    for piece in _PIECE.findall(whole.text):
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    yield CompletionResponse(text=whole.text, delta="")


async def _awaited(pieces: Iterator[Any]) -> AsyncGenerator[Any, None]:
    for piece in pieces:
        yield piece


class ToolCalling(Answering, FunctionCallingLLM):
    """What LlamaIndex asks of a model that calls tools."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 -- LlamaIndex's signature
        allow_parallel_tool_calls: bool = False,  # noqa: ARG002
        tool_required: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg)
        return {"messages": messages, "tools": tools, **kwargs}

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002 -- LlamaIndex's signature
    ) -> list[ToolSelection]:
        """Read the tool calls of an answer.

        Args:
            response: The answer.
            error_on_no_tool_call: Whether an answer without any is an error.
            kwargs: Ignored.

        Returns:
            The calls in order.

        Raises:
            ValueError: There is none, and one was wanted.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not calls:
            raise ValueError(f"The answer of {type(self).__name__} calls no tool: {response.message.content!r}.")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=json.loads(call.tool_kwargs) if isinstance(call.tool_kwargs, str) else call.tool_kwargs,
            )
            for call in calls
        ]


def call_message(calls: Sequence[ToolCall]) -> ChatMessage:
    """The message of a model that calls tools."""
    blocks = [
        ToolCallBlock(tool_call_id=call.id or _call_id(), tool_name=call.name, tool_kwargs=dict(call.kwargs))
        for call in calls
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
