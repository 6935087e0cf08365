"""Episodes that go on: a handle for the hand, a frame for a piece of code, a recorder for a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

from llama_index.core.workflow import Event
from workflows.errors import WorkflowCancelledByUser
from workflows.handler import WorkflowHandler

from llama_index_memory_tiers.blocks.episodic.episodes import Episode, EpisodeStep, Outcome, ToolUse
from llama_index_memory_tiers.blocks.episodic.runs import RunReader, Tape
from llama_index_memory_tiers.checks import checked


class Writer(Protocol):
    """What handles need of the book that they write in."""

    async def start(self, task: str, *, tags: Iterable[str] = ()) -> OpenEpisode:
        """Begin."""

    async def add_step(self, episode_id: str, step: EpisodeStep) -> EpisodeStep:
        """Go on."""

    async def close(
        self,
        episode_id: str,
        outcome: Outcome,
        *,
        lessons: Iterable[str] = (),
        cost: float | None = None,
        error: str | None = None,
    ) -> Episode:
        """End, also as interrupted."""

    async def end(
        self, episode_id: str, outcome: Outcome, *, lessons: Iterable[str], cost: float | None, error: str | None
    ) -> Episode:
        """End."""

    def failed(self, error: Exception) -> None:
        """Say that something could not be written; the work went on."""


class OpenEpisode:
    """A running episode: add steps, then end it.

    Args:
        writer: The book.
        id: Its id, with which it can be resumed after a restart.
    """

    def __init__(self, writer: Writer, id: str) -> None:  # noqa: A002  # as everywhere
        self._writer = writer
        self.id = id
        self.ended = False

    @checked
    async def add_step(
        self,
        action: str,
        *,
        reasoning: str = "",
        tool_calls: Sequence[ToolUse] = (),
        observation: str = "",
        evaluation: str = "",
        failed: bool = False,
        agent: str = "",
    ) -> EpisodeStep:
        """Add a step.

        Args:
            action: What was done, not blank.
            reasoning: Why.
            tool_calls: The tools that were called.
            observation: What came of it.
            evaluation: What that is worth.
            failed: Whether it went wrong; also true when a tool failed.
            agent: Who did it.

        Returns:
            The step as it is stored: without secrets, with its time.

        Raises:
            ConfigurationError: The episode has ended, or the action is blank.
        """
        step = EpisodeStep(action, reasoning, tuple(tool_calls), observation, evaluation, failed, agent)
        return await self._writer.add_step(self.id, step)

    @checked
    async def end(
        self,
        outcome: Outcome = "success",
        *,
        lessons: Iterable[str] = (),
        cost: float | None = None,
        error: str | None = None,
    ) -> Episode:
        """End it; from now on it is recalled.

        Args:
            outcome: `success` (the default), `partial` or `failure`.
            lessons: What to do, or not to do, the next time; without any, the block's `llm` is asked once.
            cost: What it cost, in a unit of your choice.
            error: What ended it, when that was an error.

        Returns:
            The episode.

        Raises:
            ConfigurationError: It has ended, or an argument is out of range.
        """
        episode = await self._writer.end(self.id, outcome, lessons=lessons, cost=cost, error=error)
        self.ended = True
        return episode


class EpisodeFrame:
    """An episode around a piece of code; see `EpisodeBook.episode`.

    Args:
        writer: The book.
        task: What is to be done.
        tags: Words to find it by.
    """

    def __init__(self, writer: Writer, task: str, tags: Iterable[str]) -> None:
        self._writer = writer
        self._task = task
        self._tags = tags
        self._open: OpenEpisode | None = None

    async def __aenter__(self) -> OpenEpisode:
        self._open = await self._writer.start(self._task, tags=self._tags)
        return self._open

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        episode = self._open
        if episode is None or episode.ended:
            return
        if error is None:
            await episode.end("success")
            return
        try:
            await self._writer.close(episode.id, _ending(error), error=message(error))
        except Exception as problem:  # noqa: BLE001  # what the code raised matters more
            self._writer.failed(problem)


def message(error: BaseException) -> str:
    """An error in one text, with its kind."""
    said = str(error).strip()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _ending(error: BaseException) -> Outcome:
    """Whoever was stopped from outside has not failed."""
    stopped = isinstance(error, WorkflowCancelledByUser) or not isinstance(error, Exception)
    return "interrupted" if stopped else "failure"


class RecordedRun(Awaitable[Any]):
    """A run that is being recorded: `await` it for its result; everything else is the handler's.

    Args:
        writer: The book.
        handler: The run.
        task: What is to be done.
        tags: Words to find it by.
    """

    def __init__(self, writer: Writer, handler: WorkflowHandler, task: str, tags: Iterable[str]) -> None:
        self._writer = writer
        self._handler = handler
        self._tape = Tape(handler)
        self._result: asyncio.Future[Any] = asyncio.ensure_future(handler)
        self._ending = asyncio.create_task(self._until_over())
        self._writing = asyncio.create_task(self._write(task, tags))
        for each in (self._result, self._writing):
            each.add_done_callback(_noticed)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            result = await self._handler
        except Exception:
            await asyncio.wait([self._writing])
            raise
        await asyncio.wait([self._writing])
        return result

    async def episode(self) -> Episode:
        """The episode, as soon as it is written.

        Returns:
            It, ended.

        Raises:
            StorageError: It could not be written; the run itself went on.
        """
        return await asyncio.shield(self._writing)

    def stream_events(self, expose_internal: bool = False) -> AsyncGenerator[Event, None]:
        """All events of the run, from its beginning; so does the handler's own method.

        Args:
            expose_internal: The workflow's own ones too.

        Returns:
            Events in their order.
        """
        return self._tape.play(expose_internal)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._handler, name)

    async def _until_over(self) -> None:
        await asyncio.wait([self._result])
        await self._tape.finish()

    async def _write(self, task: str, tags: Iterable[str]) -> Episode:
        try:
            episode = await self._writer.start(task, tags=tags)
            reader = RunReader()
            async for event in self._tape.events():
                step = reader.step(event)
                if step is not None:
                    await self._writer.add_step(episode.id, step)
            await asyncio.wait([self._ending])
            return await self._close(episode.id, reader)
        except Exception as error:
            self._writer.failed(error)
            raise

    async def _close(self, episode_id: str, reader: RunReader) -> Episode:
        if self._result.cancelled():
            return await self._writer.close(episode_id, "interrupted")
        error = self._result.exception()
        if error is not None:
            return await self._writer.close(episode_id, _ending(error), error=message(error))
        steps = reader.rest(self._result.result())
        for step in steps:
            await self._writer.add_step(episode_id, step)
        return await self._writer.close(episode_id, reader.outcome)


def _noticed(task: asyncio.Future[Any]) -> None:
    """What a task raised was told, or is told to whoever asks: asyncio need not warn of it."""
    if not task.cancelled():
        task.exception()
