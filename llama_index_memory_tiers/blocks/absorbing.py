"""One step of one block through one session: plan a batch, claim it, prepare outside, merge inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.blocks.claims import Claim
from llama_index_memory_tiers.blocks.consumer import Consumer, Due, plan_batch
from llama_index_memory_tiers.blocks.guarding import contained
from llama_index_memory_tiers.blocks.outages import is_outage
from llama_index_memory_tiers.blocks.taking_back import take_back
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.events import BatchAbsorbed, BatchPrepared, BlockFailed, emit, emit_changes
from llama_index_memory_tiers.instruments import acting
from llama_index_memory_tiers.records import Batch, Changes, Reads, Scope, StoredMessage
from llama_index_memory_tiers.storage import DeadLetter, OwnerReader, Session, Storage, owner_key

_logger = logging.getLogger(__name__)

Outcome = Literal["absorbed", "nothing", "busy", "failed", "outage", "parked", "again"]

BUSY = "busy"
"""Reported when another worker, perhaps one that died a moment ago, still holds the claim."""

BATCH_MESSAGES = 64
# 64, 32, 16, 8, 4, 2, 1 and once more alone: then the message itself is at fault.
TRIES_BEFORE_PARKING = 8
_BEFORE_MESSAGES = 2
# Messages of a turn that is held back: a question, an answer, and a tool round.
_HELD_MESSAGES = 4


class _TooSlowError(asyncio.TimeoutError):
    """A block took longer than its `timeout_seconds`: a smaller batch may do, so this counts and never parks."""


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one step.

    Args:
        outcome: `absorbed`, or why not.
        messages: How many were absorbed.
        error: Kind of failure.
        waiting: Messages that lie behind the cursor now, as far as this step has seen; `None` when it cannot tell.
    """

    outcome: Outcome
    messages: int = 0
    error: str | None = None
    waiting: int | None = None


class Absorber:
    """Brings the log to blocks, a batch at a time: effects on records once, model calls at least once.

    Args:
        storage: Where.
        counter: Measures texts.
        claim_seconds: How long a dead worker keeps others waiting; a living one renews.
        agent_id: Provenance.
    """

    def __init__(
        self, storage: Storage, counter: TokenCounter, *, claim_seconds: float, agent_id: str | None = None
    ) -> None:
        self._storage = storage
        self._counter = counter
        self._claim_seconds = claim_seconds
        self._agent_id = agent_id

    async def absorb(self, consumer: Consumer, session: Session, due: Due) -> Step:
        """Absorb the next due batch.

        Args:
            consumer: Who.
            session: Which session.
            due: How far.

        Returns:
            What became of it; never raises for what the block or its model does.
        """
        # Workers of one loop wait for each other: a flush right after a put does not find the background busy.
        async with self._storage.cursors.turn(session.sid, consumer.key):
            return await self._absorb(consumer, session, due)

    async def _absorb(self, consumer: Consumer, session: Session, due: Due) -> Step:
        storage = self._storage
        cursor = (await storage.cursors.all(session.sid)).get(consumer.key)
        if cursor is None:
            return Step("nothing")
        scope, owner = self._whose(consumer, session)
        # The epoch before the batch: what is forgotten from now on rolls the merge back.
        epoch = await storage.records.epoch(owner)
        # One row more than the batch, as only the next message tells that a turn is complete; and what is held back.
        reach = BATCH_MESSAGES + consumer.hold_back * _HELD_MESSAGES
        rows, last = await storage.log.read(
            session.sid, session.session_id, after=cursor.pos, limit=reach + 1, tombstones=True
        )
        if not last:
            return Step("nothing", waiting=0)
        limit = max(1, BATCH_MESSAGES >> cursor.attempts)
        full = last - cursor.pos > reach
        hi = plan_batch(consumer, rows, last, due, max_messages=limit, full=full, done=cursor.pos)
        if hi is None:
            return Step("nothing", waiting=None if full else last - cursor.pos)
        before = await self._before(consumer, session, cursor.pos)
        claim = Claim(storage, session.sid, consumer.key, seconds=self._claim_seconds)
        pos = await claim.take()
        if pos is None:
            return Step("busy", error=BUSY)
        if pos != cursor.pos:
            await claim.release()
            return Step("again")
        messages = tuple(row for row in rows if row.seq <= hi)
        batch = Batch(scope, owner, session.sid, cursor.pos, hi, messages, before)
        step = await self._attempt(consumer, batch, claim, epoch, cursor.attempts)
        return replace(step, waiting=last - hi) if step.outcome == "absorbed" and not full else step

    async def absorb_letter(self, consumer: Consumer, session: Session, letter: DeadLetter) -> Step:
        """Try a dead letter again; it is gone in the transaction that absorbs its range.

        Args:
            consumer: Who.
            session: Which session.
            letter: The range.

        Returns:
            What became of it.
        """
        storage = self._storage
        scope, owner = self._whose(consumer, session)
        epoch = await storage.records.epoch(owner)
        rows, _ = await storage.log.read(session.sid, session.session_id, after=letter.lo, until=letter.hi)
        before = await self._before(consumer, session, letter.lo)
        batch = Batch(scope, owner, session.sid, letter.lo, letter.hi, tuple(rows), before)
        try:
            reader = OwnerReader(storage.records, owner, consumer.key)
            preparing = asyncio.wait_for(
                contained(consumer.prepare(batch, reader, self._counter)), consumer.timeout_seconds
            )
            draft = await _told(consumer, batch, preparing)
            changes = await self._commit(
                consumer, owner, epoch, draft, lambda connection: storage.cursors.bury(connection, letter.id)
            )
        except asyncio.CancelledError:
            await self._take_back(consumer, batch)
            raise
        except Exception as error:  # noqa: BLE001  # it stays a dead letter, with the newest reason in the report
            await self._take_back(consumer, batch)
            return Step("failed", error=type(error).__name__)
        if changes is None:
            await self._take_back(consumer, batch)
            return Step("again")
        _tell(consumer, batch, changes)
        return Step("absorbed", messages=len(rows))

    def _whose(self, consumer: Consumer, session: Session) -> tuple[Scope, str]:
        scope = Scope(session.session_id, session.user_id or None, self._agent_id)
        return scope, owner_key(scope, session.sid, per_session=consumer.per_session)

    async def _before(self, consumer: Consumer, session: Session, pos: int) -> tuple[StoredMessage, ...]:
        """What a model reads to understand a batch; a block without one reads each message for itself."""
        if not consumer.uses_model:
            return ()
        rows, _ = await self._storage.log.read(
            session.sid, session.session_id, until=pos, limit=_BEFORE_MESSAGES, newest=True
        )
        return tuple(rows)

    async def _attempt(self, consumer: Consumer, batch: Batch, claim: Claim, epoch: int, attempts: int) -> Step:
        reader = OwnerReader(self._storage.records, batch.owner, consumer.key)
        try:
            failpoints.reach("prepare.claimed")
            async with claim.kept_alive():
                draft = await _told(consumer, batch, _prepare(consumer, batch, reader, self._counter))
            failpoints.reach("prepare.done")
            changes = await self._commit(
                consumer, batch.owner, epoch, draft, lambda connection: claim.fence(connection, batch.lo, batch.hi)
            )
        except asyncio.CancelledError:
            await self._take_back(consumer, batch)
            await claim.release()
            raise
        except Exception as error:  # noqa: BLE001  # whatever a block or its model raises must not reach the chat
            await self._take_back(consumer, batch)
            return await _failed(consumer, batch, claim, error, attempts)
        if changes is None:
            await self._take_back(consumer, batch)
            await claim.release()
            return Step("again")
        _tell(consumer, batch, changes)
        return Step("absorbed", messages=len(batch.messages))

    async def _take_back(self, consumer: Consumer, batch: Batch) -> None:
        """Delete what a block wrote elsewhere about messages that were forgotten while it prepared.

        The rest may stay: its messages are read again, and whoever forgets them then names them to the block.
        """
        if consumer.holds_external_data and batch.messages:
            messages = {stored.seq: stored.id for stored in batch.messages}
            user_id = batch.scope.user_id or ""
            noting = self._storage.forgetting.note_gone(consumer.key, user_id, batch.sid, messages)
            await take_back(self._storage, consumer, noting)

    async def _commit(
        self, consumer: Consumer, owner: str, epoch: int, draft: Any, fence: Callable[[Any], Awaitable[bool]]
    ) -> Changes | None:
        """Merge a draft, or move on without one, in the transaction that the fence guards."""
        return await self._storage.records.commit(
            owner,
            consumer.key,
            epoch=epoch,
            fence=fence,
            reads=Reads() if draft is None else consumer.reads(draft),
            merge=lambda records: Changes() if draft is None else consumer.merge(draft, records),
        )


async def _told(consumer: Consumer, batch: Batch, preparing: Awaitable[Any]) -> Any:
    """Let a block prepare, and say so; the model calls inside carry its name."""
    began, session = time.monotonic(), batch.scope.session_id
    with acting(consumer.key, session):
        draft = await preparing
    seconds = time.monotonic() - began
    emit(BatchPrepared(session_id=session, block=consumer.key, messages=len(batch.messages), seconds=seconds))
    return draft


def _tell(consumer: Consumer, batch: Batch, changes: Changes) -> None:
    """Say what was written, once it is."""
    messages = len(batch.messages)
    emit_changes(BatchAbsorbed, consumer.key, changes, session_id=batch.scope.session_id, messages=messages)


async def _prepare(consumer: Consumer, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Any:
    """Run `prepare` within its time, and tell our time-out from one that its model raised."""
    raised = False

    async def work() -> Any:
        nonlocal raised
        try:
            return await contained(consumer.prepare(batch, reader, counter))
        except Exception:
            raised = True
            raise

    try:
        return await asyncio.wait_for(work(), consumer.timeout_seconds)
    except asyncio.TimeoutError as error:
        if raised:
            raise
        raise _TooSlowError from error


async def _failed(consumer: Consumer, batch: Batch, claim: Claim, error: Exception, attempts: int) -> Step:
    slow = isinstance(error, _TooSlowError)
    kind = "TimeoutError" if slow else type(error).__name__
    outage = not slow and is_outage(error)
    # Slowness counts while that makes the batch smaller: what is alone at last has all its other tries left.
    counts = BATCH_MESSAGES >> attempts > 1 if slow else not outage
    parked = (
        not outage
        and not slow
        and attempts + 1 >= TRIES_BEFORE_PARKING
        and await claim.park(batch.lo, batch.hi, error=kind)
    )
    if not parked:
        await claim.release(error=kind, counts=counts)
    emit(
        BlockFailed(
            session_id=batch.scope.session_id,
            block=consumer.key,
            error=kind,
            attempts=attempts + 1,
            parked=parked,
        )
    )
    if parked or not attempts:  # the error's text may quote what was said, or a key
        _logger.warning(
            "block %s %s (%s)",
            consumer.key,
            "put a batch aside" if parked else "failed",
            kind,
            extra={"block": consumer.key, "session_id": batch.scope.session_id, "error": kind},
        )
    return Step("parked" if parked else "outage" if outage else "failed", error=kind)
