"""Maintenance: apply rules of retention to the records of one owner, now or from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.events import MaintenanceReport, RecordsRetired, emit
from llama_index_memory_tiers.records import Changes, Departure, Reads, Record, Scope
from llama_index_memory_tiers.retention import RetentionPolicy, plan_retention
from llama_index_memory_tiers.storage import Storage, owner_key

_logger = logging.getLogger(__name__)

_KNOWN_OWNERS = 10_000


async def maintain(
    storage: Storage,
    blocks: Sequence[TieredMemoryBlock],
    scope: Scope,
    policies: Sequence[RetentionPolicy],
    *,
    dry_run: bool,
) -> MaintenanceReport:
    """Put aside what the rules let go; what is put aside can be restored.

    Args:
        storage: Where.
        blocks: Whose records.
        scope: Whose memory.
        policies: The rules.
        dry_run: Say what would leave, and change nothing.

    Returns:
        What leaves and why.
    """
    session = await storage.log.session(scope.user_id or "", scope.session_id)
    sid = 0 if session is None else session.sid
    departures: list[Departure] = []
    for block in blocks if policies else ():
        if sid == 0 and (scope.user_id is None or block.per_session):
            continue  # an owner that does not exist yet
        owner = owner_key(scope, sid, per_session=block.per_session)
        going = await _plan(storage, block, owner, policies)
        if not dry_run and going:
            await _apply(storage, block, owner, scope, going)
        departures += going
    return MaintenanceReport(tuple(departures), dry_run=dry_run)


async def _plan(
    storage: Storage, block: TieredMemoryBlock, owner: str, policies: Sequence[RetentionPolicy]
) -> tuple[Departure, ...]:
    parts, now = storage.records.parts, storage.clock()
    records = await parts.of_block(owner, block.key)
    visits = await parts.visits(owner)
    holdings = [block.holding(record, visits.get(record.id), now) for record in records]
    # Off the loop: thousands of texts are read for duplicates.
    return await asyncio.to_thread(plan_retention, policies, holdings, now)


async def _apply(
    storage: Storage, block: TieredMemoryBlock, owner: str, scope: Scope, going: Sequence[Departure]
) -> None:
    wanted = {one.record_id: one for one in going}

    def merge(records: Sequence[Record]) -> Changes:
        there = [wanted[record.id] for record in records if record.live and record.id in wanted]
        archive = tuple(one.record_id for one in there if one.successor is None)
        supersede = {one.record_id: one.successor for one in there if one.successor is not None}
        return Changes(archive=archive, supersede=supersede)

    done = await storage.records.change(owner, block.key, reads=Reads(ids=tuple(wanted)), merge=merge)
    emit(
        RecordsRetired(
            session_id=scope.session_id, block=block.name, archived=len(done.archive), merged=len(done.supersede)
        )
    )


class Upkeep:
    """Runs maintenance beside the chat, for each owner when its time has come.

    Args:
        seconds: Between two runs for one owner; `None` never runs.
        now: Clock in microseconds since 1970.
    """

    def __init__(self, seconds: float | None, now: Callable[[], int]) -> None:
        self._seconds = seconds
        self._now = now
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()

    def due(self, key: tuple[str, str]) -> bool:
        """Whether an owner's time has come; asking begins the next period."""
        if self._seconds is None:
            return False
        now, last = self._now(), self._last.get(key)
        if last is not None and now - last < self._seconds * 1e6:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > _KNOWN_OWNERS:
            self._last.popitem(last=False)
        return True

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Let work run in the background of the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.warning("maintenance stopped", extra={"error": type(task.exception()).__name__})

    async def aclose(self) -> None:
        """Stop what runs on this loop; what was not put aside yet is at the next run."""
        mine = [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
