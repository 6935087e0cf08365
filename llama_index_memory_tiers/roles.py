"""Who speaks in a message, and which tools it calls or answers, however the model's integration writes that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock

RESULT_ROLES = (MessageRole.TOOL, MessageRole.FUNCTION)
ANSWERING_ROLES = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)
SYSTEM_ROLES = (MessageRole.SYSTEM, MessageRole.DEVELOPER)

_ID_NAMES = ("id", "toolUseId", "call_id")


class Call(NamedTuple):
    """A call of a tool; some models give it no id, and name the tool in its result instead."""

    id: str
    name: str


def calls_of(message: ChatMessage) -> list[Call]:
    """The tool calls that a message makes.

    LlamaIndex's OpenAI model writes each in a block and, as models did before, in `additional_kwargs`: it counts once.

    Args:
        message: Any message.

    Returns:
        Its calls in order; empty for one that is no answer.
    """
    if message.role not in ANSWERING_ROLES:
        return []
    blocks = [Call(_text(b.tool_call_id), _text(b.tool_name)) for b in message.blocks if isinstance(b, ToolCallBlock)]
    kwargs = message.additional_kwargs or {}
    written = kwargs.get("tool_calls") or kwargs.get("function_call") or ()
    older = [_older(call) for call in (written if isinstance(written, (list, tuple)) else [written])]
    return max(blocks, older, key=lambda calls: (len(calls), sum(bool(call.id) for call in calls)))


def answered_by(message: ChatMessage) -> str:
    """Id of the call that a result answers, or the tool's name where the model goes by that; '' for neither."""
    return _text((message.additional_kwargs or {}).get("tool_call_id"))


def tool_of(message: ChatMessage) -> str:
    """Name of the tool whose result this is; '' where the model does not write it."""
    return _text((message.additional_kwargs or {}).get("name"))


def _older(call: Any) -> Call:
    """A call as models wrote it in `additional_kwargs`, each its own way."""
    id_ = next((found for name in _ID_NAMES if (found := _text(_part(call, name)))), "")
    return Call(id_, _text(_part(call, "name")) or _text(_part(_part(call, "function"), "name")))


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) else ""
