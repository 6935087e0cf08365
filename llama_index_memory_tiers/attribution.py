"""Learn from the events of a multi-agent run which agent said what, and write it beside the messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.board import MessageBoard
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.records import Cause, StoredMessage, cause_name
from llama_index_memory_tiers.roles import ANSWERING_ROLES, RESULT_ROLES, answered_by, calls_of
from llama_index_memory_tiers.storage import codec


@runtime_checkable
class _Run(Protocol):
    """What `AgentWorkflow.run(…)` returns."""

    def stream_events(self) -> AsyncIterator[Any]:
        """Events, as they come."""


@dataclass(slots=True)
class _Heard:
    """What the events of a run say about its messages."""

    calls: dict[str, str] = field(default_factory=dict)  # id of a tool call → agent
    tools: dict[str, str] = field(default_factory=dict)  # id of a tool call → tool
    texts: dict[str, str] = field(default_factory=dict)  # text of an answer → agent

    def hear(self, event: Any) -> None:
        # Named only here, as loading LlamaIndex's agents takes a tenth of a second that most users need not spend.
        from llama_index.core.agent.workflow.workflow_events import AgentOutput, ToolCallResult  # noqa: PLC0415

        if isinstance(event, AgentOutput):
            for call in event.tool_calls:
                self.calls[call.tool_id] = event.current_agent_name
            if not event.tool_calls and event.response.content:
                self.texts[event.response.content] = event.current_agent_name
        elif isinstance(event, ToolCallResult):
            self.tools[event.tool_id] = event.tool_name


@checked
async def attributed(
    run: _Run, board: MessageBoard, *, causes: Mapping[str, Cause] | None = None
) -> AsyncIterator[Any]:
    """Hand on the events of a run, and then write beside its messages which agent they are from.

    Answers and tool calls get `sent_from`; tool results get the tool as `cause_by`, and no sender, as no agent says
    them. A message that no event tells about stays as it is, as do messages with a sender.

    Args:
        run: What `AgentWorkflow.run(…, memory=memory)` returned.
        board: Of the same memory.
        causes: Agent → `cause_by` of its answers.

    Yields:
        Every event, unchanged; take them all, as it is after the last one that the messages are written to.
    """
    session = await board.session()
    before = 0 if session is None else session.head_seq
    heard = _Heard()
    async for event in run.stream_events():
        heard.hear(event)
        yield event
    session = await board.session()
    if session is None:
        return
    named = {agent: cause_name(cause) for agent, cause in (causes or {}).items()}
    texts = {_redacted(text, board): agent for text, agent in heard.texts.items()}
    metas: dict[int, str | None] = {}
    for stored in await board.latest():
        if stored.seq > before and not stored.meta.sent_from:
            told = _told(stored, heard, texts, named)
            if told is not None:
                metas[stored.seq] = told
    await board.storage.log.describe(session.sid, metas)


def _told(stored: StoredMessage, heard: _Heard, texts: Mapping[str, str], causes: Mapping[str, str]) -> str | None:
    """The metadata of a message with what was heard of it; `None` when nothing was."""
    message = stored.message
    if stored.role in RESULT_ROLES:
        tool = heard.tools.get(answered_by(message))
        return None if tool is None else codec.encode_meta(replace(stored.meta, cause_by=tool))
    if stored.role not in ANSWERING_ROLES:
        return None
    calls = calls_of(message)
    agent = next((heard.calls[call.id] for call in calls if call.id in heard.calls), None) or texts.get(stored.text)
    if agent is None:
        return None
    return codec.encode_meta(replace(stored.meta, sent_from=agent, cause_by="" if calls else causes.get(agent, "")))


def _redacted(text: str, board: MessageBoard) -> str:
    return board.redacted(ChatMessage(role=MessageRole.ASSISTANT, content=text)).content or ""
