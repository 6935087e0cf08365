"""The episodes of one owner, written by hand, around a piece of code, or from the run of an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, get_args

from workflows.handler import WorkflowHandler

from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.blocks.episodic.checks import (
    Cleaner,
    check_cost,
    check_final,
    check_open,
    check_text,
)
from llama_index_memory_tiers.blocks.episodic.episodes import (
    FINAL,
    KINDS,
    Episode,
    EpisodeStep,
    Outcome,
    closed,
    to_record,
    with_step,
)
from llama_index_memory_tiers.blocks.episodic.models import EpisodeFinder, LessonWriter, Wanted, failed, readable
from llama_index_memory_tiers.blocks.episodic.opened import EpisodeFrame, OpenEpisode, RecordedRun
from llama_index_memory_tiers.blocks.episodic.shown import size
from llama_index_memory_tiers.checks import check_fields, check_whole, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Changes, Reads, Record


class EpisodeBook:
    """The episodes of one memory's owner; made by `EpisodicMemoryBlock.of`.

    Args:
        desk: Where they are written.
        finder: Finds like ones.
        teacher: Writes lessons.
        patience: Silence after which a running episode is taken for left behind.
    """

    def __init__(self, desk: Desk, finder: EpisodeFinder, teacher: LessonWriter, *, patience: timedelta) -> None:
        self._desk = desk
        self._finder = finder
        self._teacher = teacher
        self._patience = patience
        self._clean = Cleaner(desk.redacted)

    # -- writing ---------------------------------------------------------------------------------------------

    @checked
    async def start(self, task: str, *, tags: Iterable[str] = ()) -> OpenEpisode:
        """Begin an episode.

        Args:
            task: What is to be done, not blank.
            tags: Words to find it by.

        Returns:
            The open episode: add steps, then end it.

        Raises:
            ConfigurationError: The task is blank, or tags are one text.
        """
        now = self._desk.now()
        episode = Episode(
            self._desk.new_id(),
            self._clean.text(check_text("task", task)),
            "running",
            now,
            tags=self._clean.texts("tags", tags),
            touched_at=now,
        )

        def merge(records: Sequence[Record]) -> Changes:
            return replace(self._closing(records, now), add=(to_record(episode),))

        await self._desk.change(merge, Reads(kinds=(KINDS["running"],)))
        return OpenEpisode(self, episode.id)

    @checked
    def episode(self, task: str, *, tags: Iterable[str] = ()) -> EpisodeFrame:
        """An episode around a piece of code: `async with episodes.episode("…") as episode:`.

        It ends as success, or as failure when the code raises, with the message of the error, which is raised again;
        when the code is cancelled, as interrupted. What `episode.end(…)` said inside has precedence.

        Args:
            task: What is to be done, not blank.
            tags: Words to find it by.

        Returns:
            The context manager.
        """
        return EpisodeFrame(self, task, tags)

    def record(self, handler: WorkflowHandler, *, task: str, tags: Iterable[str] = ()) -> RecordedRun:
        """Record the run of an agent or workflow: tool calls, results, errors, hand-offs and the answer.

        Call it right after `run`, before anybody reads the events. The handler can be used as before, streaming
        included; `await`ing what is returned instead also waits until the episode is written.

        Args:
            handler: What `agent.run(…)` returned.
            task: What is to be done, not blank.
            tags: Words to find it by.

        Returns:
            The run: `await` it for the result, `await run.episode()` for the episode.

        Raises:
            ConfigurationError: The handler is none, the task is blank, or tags are one text.
        """
        if not isinstance(handler, WorkflowHandler):
            raise ConfigurationError(
                f"handler={type(handler).__name__} was given.",
                allowed="It is what agent.run(…) or workflow.run(…) returns, before it is awaited.",
                remedy="Write run = episodes.record(agent.run(…), task=…), then await run.",
            )
        check_text("task", task)
        return RecordedRun(self, handler, task, self._clean.texts("tags", tags))

    @checked
    def resume(self, episode_id: str) -> OpenEpisode:
        """Go on with an episode that was begun earlier, perhaps by a process that is gone.

        Args:
            episode_id: Which.

        Returns:
            The open episode.
        """
        return OpenEpisode(self, episode_id)

    @checked
    async def add_step(self, episode_id: str, step: EpisodeStep) -> EpisodeStep:
        """Add a step to a running episode; see `OpenEpisode.add_step`.

        Args:
            episode_id: Which.
            step: What was done.

        Returns:
            The step as it is stored: without secrets, with its time.

        Raises:
            ConfigurationError: There is no such episode, it has ended, or the action is blank.
        """
        check_fields(step)
        for tool in step.tool_calls:
            check_fields(tool)
        check_text("action", step.action)
        stored = self._clean.step(step, self._desk.now())

        def added(episode: Episode) -> Episode:
            check_open(episode)
            return with_step(replace(episode, outcome="running", ended_at=None), stored, self._desk.now())

        await self._update(episode_id, added)
        return stored

    @checked
    async def end(
        self,
        episode_id: str,
        outcome: Outcome = "success",
        *,
        lessons: Iterable[str] = (),
        cost: float | None = None,
        error: str | None = None,
    ) -> Episode:
        """End a running episode; see `OpenEpisode.end`.

        Args:
            episode_id: Which.
            outcome: `success` (the default), `partial` or `failure`.
            lessons: What to do, or not to do, the next time; without any, the block's `llm` is asked once.
            cost: What it cost, in a unit of your choice.
            error: What ended it, when that was an error.

        Returns:
            The episode.

        Raises:
            ConfigurationError: There is no such episode, it has ended, or an argument is out of range.
        """
        check_final(outcome)
        return await self.close(episode_id, outcome, lessons=lessons, cost=cost, error=error)

    @checked
    async def close(
        self,
        episode_id: str,
        outcome: Outcome,
        *,
        lessons: Iterable[str] = (),
        cost: float | None = None,
        error: str | None = None,
    ) -> Episode:
        """End a running episode, also as `interrupted`; else as `end`."""
        learnt = self._clean.texts("lessons", lessons)
        cause = None if error is None else self._clean.text(error)
        check_cost(cost)

        def ended(episode: Episode) -> Episode:
            check_open(episode)
            now = self._desk.now()
            known = learnt or episode.lessons
            return replace(
                episode, outcome=outcome, lessons=known, ended_at=now, touched_at=now, cost=cost, error=cause
            )

        vector = await self._vector_of(episode_id)
        episode = await self._update(episode_id, ended, vector)
        if episode.lessons or outcome not in FINAL:
            return episode
        # Only now, so that a slow or failing model changes nothing else.
        found = self._clean.texts("lessons", await self._teacher.write(episode, self._desk.scope))
        return await self._update(episode_id, lambda held: replace(held, lessons=found), vector) if found else episode

    @checked
    def failed(self, error: Exception) -> None:
        """Say that something could not be written; the work went on."""
        failed(self._desk.block, error, self._desk.scope)

    @checked
    async def amend(
        self,
        episode_id: str,
        *,
        outcome: Outcome | None = None,
        lessons: Iterable[str] | None = None,
        tags: Iterable[str] | None = None,
        cost: float | None = None,
    ) -> Episode:
        """Correct an episode that has ended, when somebody knows better how it went.

        Args:
            episode_id: Which.
            outcome: `success`, `partial` or `failure`; `None` leaves it.
            lessons: All lessons from now on; `None` leaves them.
            tags: All tags from now on; `None` leaves them.
            cost: What it cost; `None` leaves it.

        Returns:
            The episode.

        Raises:
            ConfigurationError: There is no such episode, it still runs, or an argument is out of range.
        """
        changed: dict[str, Any] = {}
        if outcome is not None:
            check_final(outcome)
            changed["outcome"] = outcome
        if lessons is not None:
            changed["lessons"] = self._clean.texts("lessons", lessons)
        if tags is not None:
            changed["tags"] = self._clean.texts("tags", tags)
        if cost is not None:
            check_cost(cost)
            changed["cost"] = cost

        def amended(episode: Episode) -> Episode:
            if episode.outcome == "running":
                raise ConfigurationError(
                    f"episode_id={episode.id!r} was given, and that episode still runs.",
                    allowed="Only what has ended is amended.",
                    remedy="End it first.",
                )
            return replace(episode, **changed)

        return await self._update(episode_id, amended, await self._vector_of(episode_id))

    # -- reading ---------------------------------------------------------------------------------------------

    @checked
    async def get(self, episode_id: str) -> Episode | None:
        """An episode of this owner, whatever became of it; `None` when there is none of that id."""
        reader = await self._desk.reader()
        records = await reader.records_of(await reader.hits_of({episode_id: 1.0}))
        mine = [record for record in records if record.block == self._desk.block]
        return readable(mine[0]) if mine else None

    @checked
    async def history(self, *outcomes: Outcome, limit: int | None = None) -> list[Episode]:
        """Episodes in the order in which they began.

        Args:
            outcomes: Only those; default all.
            limit: The newest of them, so many.

        Returns:
            The episodes, running ones too.
        """
        newest = None if limit is None else check_whole("limit", limit, least=0)
        await self.close_interrupted()
        wanted = outcomes or get_args(Outcome)
        kinds = dict.fromkeys(KINDS[outcome] for outcome in wanted)
        records = await (await self._desk.reader()).records(*kinds)
        found = [e for record in records if (e := readable(record)) is not None and e.outcome in wanted]
        found.sort(key=lambda episode: episode.started_at)
        return found if newest is None else found[max(0, len(found) - newest) :]

    @checked
    async def recall_similar(self, task: str, k: int = 3) -> list[Episode]:
        """Episodes that are like a task, however they ended; attempts at the very same task come first.

        Args:
            task: What is to be done.
            k: At most so many; default 3.

        Returns:
            Best first.
        """
        return await self._recall(task, k, frozenset(FINAL))

    @checked
    async def recall_failures(self, task: str, k: int = 10) -> list[Episode]:
        """Failed episodes that are like a task; those that ended otherwise take no place among the `k`.

        Args:
            task: What is to be done.
            k: At most so many; default 10.

        Returns:
            Best first.
        """
        return await self._recall(task, k, frozenset({"failure"}))

    async def _recall(self, task: str, k: int, among: frozenset[Outcome]) -> list[Episode]:
        check_whole("k", k, least=1)
        asked, scope = self._clean.text(check_text("task", task)), self._desk.scope
        vector = await self._finder.of_query(asked, scope)
        wanted = Wanted(asked, self._desk.now(), scope, among, k, vector)
        return (await self._finder.find(await self._desk.reader(), wanted))[0]

    async def close_interrupted(self) -> int:
        """Close running episodes that were left behind; `start` and `history` do it anyway, and recall shows none.

        Returns:
            How many there were.
        """
        reader, now = await self._desk.reader(), self._desk.now()
        running = await reader.records(KINDS["running"])
        if not self._closing(running, now).revise:
            return 0
        changes = await self._desk.change(lambda records: self._closing(records, now), Reads(kinds=(KINDS["running"],)))
        return len(changes.revise)

    def _closing(self, records: Iterable[Record], now: datetime) -> Changes:
        episodes = [episode for record in records if (episode := readable(record)) is not None]
        left = [gone for episode in episodes if (gone := closed(episode, now, self._patience)) is not None]
        return Changes(revise=tuple(to_record(episode) for episode in left))

    # -- inside ----------------------------------------------------------------------------------------------

    async def _update(
        self,
        episode_id: str,
        change: Callable[[Episode], Episode],
        vector: tuple[float, ...] | None = None,
    ) -> Episode:
        """Change one episode in one transaction."""
        result: list[Episode] = []

        def merge(records: Sequence[Record]) -> Changes:
            result[:] = [change(self._only(episode_id, records))]
            episode = result[0]
            tokens = size(episode, self._desk.counter) if episode.outcome in FINAL else 0
            model = self._finder.model_name if vector is not None else ""
            return Changes(revise=(to_record(episode, tokens=tokens, vector=vector, model=model),))

        await self._desk.change(merge, Reads(ids=(episode_id,)))
        return result[0]

    def _only(self, episode_id: str, records: Sequence[Record]) -> Episode:
        mine = [record for record in records if record.block == self._desk.block]
        episode = readable(mine[0]) if mine else None
        if episode is None:
            raise ConfigurationError(
                f"episode_id={episode_id!r:.100} was given.",
                allowed="It is the id of an episode of this memory's owner.",
                remedy="Take it from start(…), history() or a recall.",
            )
        return episode

    async def _vector_of(self, episode_id: str) -> tuple[float, ...] | None:
        if self._finder.model is None:
            return None
        episode = await self.get(episode_id)
        return None if episode is None else await self._finder.of_task(episode.task, self._desk.scope)
