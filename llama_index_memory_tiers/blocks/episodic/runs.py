"""Runs of LlamaIndex agents, read as they go: their events become the steps of an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.agent.workflow.workflow_events import AgentOutput, ToolCallResult
from llama_index.core.workflow import Event
from workflows.events import InternalDispatchEvent
from workflows.handler import WorkflowHandler

from llama_index_memory_tiers.blocks.episodic.episodes import EpisodeStep, Outcome, ToolUse, judged

ANSWER = "answer"
"""Action of the step that gives the answer."""

_HANDOFF = "handoff"
# A stream ends with its run; somebody who began to read it before may hold it longer.
_STREAM_SECONDS = 1.0


class RunReader:
    """Turns the events of a run into steps."""

    def __init__(self) -> None:
        self._agent = ""
        self._thought = ""
        self._seen: set[str] = set()
        self._answered = False
        self._calls: list[EpisodeStep] = []

    @property
    def outcome(self) -> Outcome:
        """How the run ended, having come to an answer."""
        return judged(self._calls)

    def step(self, event: Event) -> EpisodeStep | None:
        """The step that an event completes, if it does.

        Args:
            event: Any event of the stream.

        Returns:
            A tool's result, a hand-off, a refused answer, the answer; `None` for everything else.
        """
        if isinstance(event, ToolCallResult):
            return self._tool(event)
        return self._output(event) if isinstance(event, AgentOutput) else None

    def rest(self, result: Any) -> list[EpisodeStep]:
        """What the stream did not show: somebody had read it before, or the workflow is no agent's.

        Args:
            result: What the run returned.

        Returns:
            Steps, in order.
        """
        calls: Sequence[Any] = result.tool_calls if isinstance(result, AgentOutput) else ()
        found = [
            self._tool(call) for call in calls if isinstance(call, ToolCallResult) and call.tool_id not in self._seen
        ]
        if not self._answered:
            found.append(EpisodeStep(ANSWER, observation=str(result), agent=self._agent))
        return found

    def _output(self, event: AgentOutput) -> EpisodeStep | None:
        self._agent = event.current_agent_name
        text = event.response.content or ""
        if event.retry_messages:
            observed = "\n".join(message.content or "" for message in event.retry_messages)
            return EpisodeStep("think", reasoning=text, observation=observed, failed=True, agent=self._agent)
        if event.tool_calls:
            self._thought = text
            return None
        self._answered = True
        return EpisodeStep(ANSWER, observation=text, agent=self._agent)

    def _tool(self, event: ToolCallResult) -> EpisodeStep:
        self._seen.add(event.tool_id)
        output = event.tool_output
        call = ToolUse(event.tool_name, _json(event.tool_kwargs), output.content or "", bool(output.is_error))
        step = EpisodeStep(
            event.tool_name,
            reasoning=self._thought,
            tool_calls=(call,),
            evaluation="failed" if call.failed else "ok",
            failed=call.failed,
            agent=self._agent,
        )
        if event.tool_name == _HANDOFF and not call.failed:
            to, reason = (str(event.tool_kwargs.get(name, "")) for name in ("to_agent", "reason"))
            step = replace(step, action=f"hand over to {to}", reasoning=reason or self._thought)
        self._calls.append(step)
        return step


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


class Tape:
    """The events of a run, read once and played as often as somebody asks.

    From now on `stream_events` of the handler plays the tape, so that who reads it misses nothing. Only the handler's
    own stream goes through here, not that of its context.

    Args:
        handler: A run that goes on; best one whose events nobody has read yet.
    """

    def __init__(self, handler: WorkflowHandler) -> None:
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._over = False
        self._news = asyncio.Event()
        source = handler.stream_events(expose_internal=True)
        self._reading = asyncio.create_task(self._read(source))
        handler.stream_events = self.play  # type: ignore[method-assign]  # a stream can be read once

    async def _read(self, source: AsyncGenerator[Event, None]) -> None:
        try:
            async for event in source:
                self._events.append(event)
                self._wake()
        except Exception as error:  # noqa: BLE001  # the reader is told what the stream said
            self._error = error
        finally:
            self._over = True
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def play(self, expose_internal: bool = False) -> AsyncGenerator[Event, None]:
        """All events, as the handler's `stream_events` gives them, and its error when somebody had read them before.

        Args:
            expose_internal: The workflow's own ones too.

        Yields:
            Events in their order.
        """
        async for event in self.events():
            if expose_internal or not isinstance(event, InternalDispatchEvent):
                yield event
        if self._error is not None and not self._events:
            raise self._error

    async def events(self) -> AsyncGenerator[Event, None]:
        """All events, those that were and those to come.

        Yields:
            Events in their order.
        """
        at = 0
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self._over:
                return
            await self._news.wait()

    async def finish(self) -> None:
        """Wait for the end of the stream, the run being over."""
        await asyncio.wait([self._reading], timeout=_STREAM_SECONDS)
        if not self._reading.done():
            self._reading.cancel()
            await asyncio.wait([self._reading])
