"""Commands that let blocks work: worker, replay, maintain, reindex."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.cli.outcome import FINDING, FINE, Outcome, progress
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.display import Grid, counted
from llama_index_memory_tiers.errors import ConfigurationError, StorageError
from llama_index_memory_tiers.events import BlockProgress, FlushReport, MaintenanceReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.pacing import wait_at_most


@dataclass(slots=True)
class Rounds:
    """What the rounds of a worker came to.

    Args:
        rounds: How many.
        failures: Rounds that the database refused.
        blocks: Sum of what was absorbed; what waits is that of the newest round.
    """

    rounds: int = 0
    failures: int = 0
    blocks: dict[str, BlockProgress] = field(default_factory=dict)

    def add(self, report: FlushReport) -> None:
        """Count a round."""
        self.rounds += 1
        for block in report.blocks:
            before = self.blocks.get(block.block, BlockProgress(block.block))
            self.blocks[block.block] = BlockProgress(
                block.block,
                before.absorbed + block.absorbed,
                block.pending,
                block.error,
                before.parked + block.parked,
                block.in_window,
            )

    def outcome(self) -> Outcome:
        """What to tell in the end; a block that failed in the newest round is a finding."""
        report = FlushReport(tuple(self.blocks.values()))
        failed = self.failures or any(one.error not in {None, "busy"} or one.parked for one in report.blocks)
        data = {"rounds": self.rounds, "failures": self.failures, "blocks": report.blocks}
        return Outcome(data, [counted(self.rounds, "round"), report], FINDING if failed else FINE)


async def work(memory: TieredMemory, *, once: bool, every_seconds: float) -> Outcome:
    """Absorb what is due in anybody's sessions, again and again, until the process is told to end.

    Args:
        memory: With your blocks.
        once: One round only.
        every_seconds: Pause between rounds.

    Returns:
        What was absorbed.
    """
    rounds = Rounds()
    stop = asyncio.Event()
    with _told_to_end(stop):
        while not stop.is_set():
            await _round(memory, rounds, stop)
            if once:
                break
            await wait_at_most(stop, every_seconds)
    return rounds.outcome()


async def _round(memory: TieredMemory, rounds: Rounds, stop: asyncio.Event) -> None:
    """One round; when the process is told to end it is cut off, and what it had claimed is given back."""
    drain = asyncio.ensure_future(memory.adrain())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({drain, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
        rounds.add(await drain)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    except StorageError:
        rounds.failures += 1  # the next round tries again; a supervisor sees it in the exit code
    finally:
        stopped.cancel()


@contextlib.contextmanager
def _told_to_end(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    caught: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        # Windows has no handlers on a loop; threads other than the main one have none either.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop.set)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def replay(memory: TieredMemory, where: Where) -> Outcome:
    """Try dead letters again.

    Args:
        memory: With your blocks.
        where: Of one user or session, if one was named; else everybody's.

    Returns:
        What was absorbed; what failed again is a finding.
    """
    total = Rounds()
    if where.user is not None or where.session is not None:
        total.add(await memory.areplay())
    else:
        for each in await _everybody(memory):
            total.add(await each.areplay())
    left = sum(waiting.dead_letters for waiting in await memory.storage.survey.waiting(now=memory.storage.now()))
    report = FlushReport(tuple(total.blocks.values()))
    shown = [report, f"Left: {counted(left, 'dead letter')}."]
    return Outcome({"blocks": report.blocks, "dead_letters": left}, shown, FINDING if left else FINE)


async def maintain(memory: TieredMemory, where: Where, *, dry_run: bool) -> Outcome:
    """Put aside what the memory's rules of retention let go.

    Args:
        memory: With your rules.
        where: Of one user or session, if one was named; else everybody's.
        dry_run: Only say what would leave.

    Returns:
        What left, or would.
    """
    if where.user is not None or where.session is not None:
        report = await memory.amaintain(dry_run=dry_run)
    else:
        reports = [await each.amaintain(dry_run=dry_run) for each in await _everybody(memory)]
        report = MaintenanceReport(tuple(one for each in reports for one in each.departures), dry_run)
    return Outcome({"dry_run": dry_run, "departures": report.departures}, report)


async def _everybody(memory: TieredMemory) -> list[TieredMemory]:
    """One memory per person, and one per session of nobody."""
    found: list[TieredMemory] = []
    for person in await memory.storage.survey.people():
        sessions = await memory.storage.log.sessions(person.user_id)
        chosen = sessions[:1] if person.user_id else sessions  # what is a person's is tended together
        found += [memory.for_session(session.session_id, person.user_id or None) for session in chosen]
    return found


async def reindex(memory: TieredMemory, where: Where, *, again: bool, as_json: bool) -> Outcome:
    """Embed with the memory's models what they have not embedded, and bring an index on a server in step.

    Args:
        memory: With your blocks, their embedding models and your index.
        where: Of one user, if one was named; else everybody's.
        again: Embed also what has vectors of these models.
        as_json: Without progress bars.

    Returns:
        What was embedded, and how the index stands; one that is not in step is a finding.
    """
    reports = []
    with progress("embed", as_json=as_json) as tell:
        for model, blocks in _models(memory):
            reports.append(
                await memory.storage.reindex(
                    model, user_id=where.user, session_id=where.session, blocks=blocks, again=again, progress=tell
                )
            )
    with progress("tell the index", as_json=as_json) as tell:
        state = await memory.storage.sync_index(tell)
    rows = [(each.model, each.embedded, each.skipped, each.owners) for each in reports]
    index = f"index on a server: {counted(state.pending, 'record')} to be told" if state.attached else "index: built in"
    shown = [Grid(("model", "embedded", "skipped", "owners"), rows), index]
    return Outcome({"models": reports, "index": state}, shown, FINE if state.in_step else FINDING)


def _models(memory: TieredMemory) -> list[tuple[BaseEmbedding, list[str]]]:
    """The embedding models of a memory's blocks, each with the keys of its blocks."""
    found: dict[str, tuple[BaseEmbedding, list[str]]] = {}
    for block in memory.memory_blocks:
        model = getattr(block, "embed_model", None)
        if isinstance(block, TieredMemoryBlock) and isinstance(model, BaseEmbedding):
            found.setdefault(model.model_name, (model, []))[1].append(block.key)
    return list(found.values())


def needs_memory(where: Where, command: str) -> None:
    """Refuse a command that runs blocks without being told which.

    Raises:
        ConfigurationError: `--memory` was left out.
    """
    if where.memory is None:
        raise ConfigurationError(
            f"{command} was called without --memory.",
            allowed="Blocks absorb with their own models and settings, which a storage does not know.",
            remedy="Write a function that returns your TieredMemory, and pass --memory module:function.",
        )
