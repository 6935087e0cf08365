"""Delivery: brings every session's log to every block, in the background or on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from llama_index_memory_tiers.blocks.absorbing import Absorber
from llama_index_memory_tiers.blocks.consumer import Consumer, Due
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.errors import MemoryTiersError, StorageClosedError
from llama_index_memory_tiers.events import BlockProgress, FlushReport
from llama_index_memory_tiers.pacing import Key, Lane, Rests, wait_at_most
from llama_index_memory_tiers.storage import DeadLetter, Session, Storage

_logger = logging.getLogger(__name__)

_DRAINED_USERS = 10_000
_KNOWN_SESSIONS = 10_000
# Words of 100 turns are absorbed in about half a second; an answer does not wait longer for an embedding service.
_FRESHEN_SECONDS = 2.0


@dataclass(slots=True)
class _Worker:
    """A session's background task on its loop."""

    loop: asyncio.AbstractEventLoop
    silent_seconds: float = 0.0
    again: asyncio.Event = field(default_factory=asyncio.Event)


class Delivery:
    """Runs blocks over sessions; holds no messages, so a crash or a closed loop loses nothing.

    Args:
        storage: Where the log and the cursors are.
        consumers: The blocks.
        counter: Measures texts.
        claim_seconds: How long a dead worker keeps others waiting.
        agent_id: Provenance.
    """

    def __init__(
        self,
        storage: Storage,
        consumers: Sequence[Consumer],
        *,
        counter: TokenCounter,
        claim_seconds: float,
        agent_id: str | None = None,
    ) -> None:
        self._storage = storage
        self._consumers = tuple(consumers)
        self._absorber = Absorber(storage, counter, claim_seconds=claim_seconds, agent_id=agent_id)
        self._workers: dict[Key, _Worker] = {}
        # Of all loops, as a session's worker on one may be replaced by one on another.
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._drained: OrderedDict[str, None] = OrderedDict()
        # Whether every block has its cursor in a session; False when there was no session yet.
        self._attached: OrderedDict[Key, bool] = OrderedDict()
        self._settled: OrderedDict[Key, int] = OrderedDict()
        self._rests = Rests()
        self._lane = Lane()
        self._closed = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the blocks that absorb."""
        return tuple(consumer.key for consumer in self._consumers)

    async def attach(self, key: Key) -> None:
        """Give blocks that are new to an existing session their cursors, before the first put that they are to see.

        Args:
            key: The session; after its first put in this process nothing is to do.
        """
        if key in self._attached or not self._consumers:
            return
        session = await self._storage.log.session(*key)
        if session is not None:
            await self._first_cursors(session)
        elif key not in self._attached:
            self._now_attached(key, begun=False)  # by our put with our cursors, or by another memory without them

    def only_opens(self, key: Key, roles: Sequence[str], head_seq: int) -> bool:
        """Whether a put only began a turn, behind a log of which every block has absorbed everything.

        Args:
            key: The session.
            roles: Of the messages.
            head_seq: The session's newest sequence number.

        Returns:
            Then nothing is due, and nothing need be read to know it.
        """
        return list(roles) == ["user"] and self._settled.get(key, 0) == head_seq - 1

    # -- in the background -----------------------------------------------------------------------------------

    def serving(self) -> contextlib.AbstractContextManager[None]:
        """While a caller waits for a put or a context, background work holds back; see `Lane`."""
        return self._lane.serving()

    def schedule(self, key: Key, *, silent_seconds: float = 0.0) -> None:
        """See to a session soon, on the running loop; several calls are one.

        Args:
            key: The session.
            silent_seconds: How long it has been silent; 0 begins to measure anew.
        """
        if self._closed or not self._consumers:
            return
        self.wait_for_silence(key, silent_seconds)
        loop = asyncio.get_running_loop()
        worker = self._workers.get(key)
        if worker is not None and worker.loop is loop:
            worker.silent_seconds = silent_seconds
            worker.again.set()
            return
        worker = self._workers[key] = _Worker(loop, silent_seconds=silent_seconds)
        task = loop.create_task(self._run(key, worker))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(key, worker, done))

    def wait_for_silence(self, key: Key, silent_seconds: float = 0.0) -> None:
        """See to a session when it has been silent for as long as a block waits for; on the running loop."""
        old = self._timers.pop(key, None)
        if old is not None:
            old.cancel()
        if self._closed:
            return
        later = [wait for wait in self._idle_waits() if wait > silent_seconds]
        if later:
            wait = min(later)
            self._timers[key] = asyncio.get_running_loop().call_later(wait - silent_seconds, self._fire, key, wait)

    def _fire(self, key: Key, silent_seconds: float) -> None:
        self._timers.pop(key, None)
        self.schedule(key, silent_seconds=silent_seconds)

    def _idle_waits(self) -> list[float]:
        return [consumer.idle_seconds for consumer in self._consumers if "idle" in consumer.absorb_on]

    def _ended(self, key: Key, worker: _Worker, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._workers.get(key) is worker:
            del self._workers[key]
        if task.cancelled() or isinstance(task.exception(), StorageClosedError):
            self._cut.add(key)  # its loop or storage closed: the next call does the work itself
        elif task.exception() is not None:
            _logger.error("delivery stopped", exc_info=task.exception(), extra={"session_id": key[1]})
            self._cut.add(key)

    async def _run(self, key: Key, worker: _Worker) -> None:
        while not self._closed:
            async with self._lane.turn():
                worker.again.clear()
                await self.deliver(key, silent_seconds=worker.silent_seconds, without=self._rests.of(key))
            rest = self._rests.left(key)
            if rest is not None:
                await wait_at_most(worker.again, rest)
            elif not worker.again.is_set():
                # Not only in `_ended`, which runs later: a put in between would wake a worker that has gone home.
                if self._workers.get(key) is worker:
                    del self._workers[key]
                return

    async def catch_up(self, key: Key) -> None:
        """Do now what a background task could not do because its loop was closed."""
        worker = self._workers.get(key)
        if worker is not None and worker.loop.is_closed():  # closed without cancelling its tasks
            del self._workers[key]
            self._cut.add(key)
        if key in self._cut:
            self._cut.discard(key)
            await self.deliver(key)

    def drain_once(self, user_id: str) -> None:
        """See to all sessions of a person in the background, at their first use in this process.

        Args:
            user_id: The person; '' means nobody, whose sessions have nothing in common.
        """
        if not user_id or user_id in self._drained or self._closed or not self._consumers:
            return
        self._drained[user_id] = None
        if len(self._drained) > _DRAINED_USERS:
            self._drained.popitem(last=False)
        key = (user_id, "")
        loop = asyncio.get_running_loop()
        self._workers[key] = _Worker(loop)
        task = loop.create_task(self._drain(user_id))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._drain_ended(key, done))

    async def freshen(self, key: Key) -> None:
        """Absorb what could not be recalled else: what other sessions said a moment ago, what has just left the window.

        Only blocks that cost no model calls do so, and not for long: recall goes on with what there is.

        Args:
            key: The session that asks.
        """
        quick = {c.key for c in self._consumers if not c.uses_model and "turn" in c.absorb_on}
        if quick and not self._closed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._freshen(key, quick), _FRESHEN_SECONDS)

    async def _freshen(self, key: Key, quick: set[str]) -> None:
        user_id, asking = key
        slow = set(self.keys).difference(quick)
        for session in await self._storage.log.behind(user_id, quick, asking=asking):
            # Asked for with every context: a service that is down, or does not know us, is left alone meanwhile.
            failing = self._rests.failing((user_id, session.session_id))
            if not quick <= failing:
                await self._deliver(session, Due(to_head=session.session_id != asking), slow | failing)

    def _drain_ended(self, key: Key, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._workers.pop(key, None)
        if task.cancelled() or isinstance(task.exception(), StorageClosedError):
            self._drained.pop(key[0], None)
        elif (error := task.exception()) is not None:
            # An error of ours meets the caller's next call as well; any other is a fault that is to be found.
            known = isinstance(error, MemoryTiersError)
            _logger.error("drain stopped (%s)", type(error).__name__, exc_info=None if known else error)
            self._drained.pop(key[0], None)

    async def _drain(self, user_id: str) -> None:
        now = self._storage.now()
        for session in await self._storage.log.behind(user_id, self.keys):
            if self._closed:
                return
            silent_seconds = max(0.0, (now - session.last_put_at) / 1e6)
            key = (user_id, session.session_id)
            async with self._lane.turn():
                await self._deliver(session, Due(silent_seconds=silent_seconds), self._rests.of(key))
            if self._rests.left(key) is not None:
                self.schedule(key, silent_seconds=silent_seconds)

    # -- on request ------------------------------------------------------------------------------------------

    async def deliver(
        self, key: Key, *, to_head: bool = False, silent_seconds: float = 0.0, without: Collection[str] = ()
    ) -> tuple[BlockProgress, ...]:
        """Absorb what is due in one session now.

        Args:
            key: The session.
            to_head: Everything, for all but flush-only blocks.
            silent_seconds: How long it has been silent.
            without: Keys of blocks to leave alone.

        Returns:
            One entry per block.
        """
        session = await self._storage.log.session(*key) if self._consumers else None
        if session is None:
            return self._nothing_done()
        return await self._deliver(session, Due(to_head=to_head, silent_seconds=silent_seconds), without)

    async def flush(self, keys: Iterable[Key]) -> FlushReport:
        """Absorb everything in these sessions now; never raises for what a block does.

        Args:
            keys: The sessions.

        Returns:
            What was absorbed and what still waits.
        """
        report = FlushReport(self._nothing_done())
        for key in keys:
            report = report.plus(await self.deliver(key, to_head=True))
        return report

    async def drain_all(self) -> FlushReport:
        """Absorb what is due in everybody's sessions, for a process that does nothing else.

        Returns:
            What was absorbed and what still waits; a block that failed rests, as in the background.
        """
        report = FlushReport(self._nothing_done())
        for session in await self._storage.survey.due(self.keys) if self._consumers else ():
            silent_seconds = max(0.0, (self._storage.now() - session.last_put_at) / 1e6)
            resting = self._rests.of((session.user_id, session.session_id))
            report = report.plus(await self._deliver(session, Due(silent_seconds=silent_seconds), resting))
            report = report.plus(await self._unread(session, resting))
        return report

    async def replay(self, letters: Iterable[DeadLetter], user_id: str) -> FlushReport:
        """Try dead letters again.

        Args:
            letters: Which.
            user_id: Whose sessions they are from.

        Returns:
            What was absorbed; what failed again is pending, and stays a dead letter.
        """
        report = FlushReport(self._nothing_done())
        consumers = {consumer.key: consumer for consumer in self._consumers}
        for letter in letters:
            session = await self._storage.log.session(user_id, letter.session_id)
            consumer = consumers.get(letter.block)
            if session is None or consumer is None:
                continue
            step = await self._absorber.absorb_letter(consumer, session, letter)
            pending = letter.hi - letter.lo if step.error else 0
            report = report.plus([BlockProgress(letter.block, step.messages, pending, step.error)])
        return report

    def _nothing_done(self) -> tuple[BlockProgress, ...]:
        return tuple(BlockProgress(consumer.key) for consumer in self._consumers)

    async def _deliver(self, session: Session, due: Due, without: Collection[str] = ()) -> tuple[BlockProgress, ...]:
        key = (session.user_id, session.session_id)
        if not self._attached.get(key):
            await self._first_cursors(session)
        if any("flush" in consumer.absorb_on for consumer in self._consumers):
            due = replace(due, flushed_until=await self._storage.log.flushed_until(session.sid))
        working = [consumer for consumer in self._consumers if consumer.key not in without]
        progress = await asyncio.gather(*(self._deliver_to(consumer, session, due) for consumer in working))
        self._rests.after(key, progress)
        self._settled.pop(key, None)
        if not any(block.pending or block.error for block in progress) and len(working) == len(self._consumers):
            self._settled[key] = session.head_seq
            if len(self._settled) > _KNOWN_SESSIONS:
                self._settled.popitem(last=False)
        return tuple(progress)

    async def _first_cursors(self, session: Session) -> None:
        """A block that was attached later starts at the head if it costs model calls, else at the beginning."""
        key = (session.user_id, session.session_id)
        later = key not in self._attached
        known = await self._storage.cursors.all(session.sid)
        starts = [
            (consumer.key, session.head_seq if later and consumer.uses_model and not consumer.backfill else 0)
            for consumer in self._consumers
            if consumer.key not in known
        ]
        if starts:
            await self._storage.cursors.add(session.sid, starts)
        self._now_attached(key, begun=True)  # not before: puts at the same time look for themselves

    def _now_attached(self, key: Key, *, begun: bool) -> None:
        self._attached[key] = begun
        if len(self._attached) > _KNOWN_SESSIONS:
            self._attached.popitem(last=False)

    async def _deliver_to(self, consumer: Consumer, session: Session, due: Due) -> BlockProgress:
        absorbed = parked = 0
        error = None
        while True:
            step = await self._absorber.absorb(consumer, session, due)
            absorbed += step.messages
            parked += step.outcome == "parked"
            # With nothing behind it there is nothing to look for: whoever puts more meanwhile sees to that.
            if step.outcome not in {"absorbed", "parked", "again"} or step.waiting == 0:
                error = step.error
                break
        pending = step.waiting
        if pending is None:
            pending = sum(block.pending for block in await self._unread(session, [consumer.key]))
        not_due = session.head_seq - due.flushed_until if consumer.absorb_on == {"flush"} else 0
        return BlockProgress(consumer.key, absorbed, pending, error, parked, max(0, min(pending, not_due)))

    async def _unread(self, session: Session, keys: Collection[str]) -> list[BlockProgress]:
        """What waits for blocks, by the log as it is now."""
        now = await self._storage.log.session(session.user_id, session.session_id) if keys else None
        if now is None:
            return []
        cursors = await self._storage.cursors.all(now.sid)
        waiting = [cursor for key, cursor in cursors.items() if key in keys]
        return [
            BlockProgress(cursor.consumer, 0, max(0, now.head_seq - cursor.pos), cursor.error) for cursor in waiting
        ]

    async def aclose(self) -> None:
        """Stop background work; what it had claimed is given back, nothing is lost."""
        self._closed = True
        here = asyncio.get_running_loop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        mine = [task for task in self._tasks if task.get_loop() is here]
        for task in mine:
            task.cancel()
        for task in self._tasks.difference(mine):
            if not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)
        await asyncio.gather(*mine, return_exceptions=True)
