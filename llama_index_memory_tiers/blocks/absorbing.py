"""One step of one block through one session: plan a batch, claim it, prepare outside, merge inside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.blocks.consumer import Consumer, Due, plan_batch
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.errors import StorageError
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
_SECOND = 1_000_000
# What HTTP clients answer when nothing is wrong with the content: no key, no money and no such model among them.
_OUTAGE_STATUS = frozenset({401, 402, 403, 404, 408, 409, 425, 429, 500, 502, 503, 504, 529})
_OUTAGE_NAMES = ("timeout", "connect", "ratelimit", "unavailable", "overloaded", "network")


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


async def absorb(
    storage: Storage,
    consumer: Consumer,
    session: Session,
    due: Due,
    *,
    counter: TokenCounter,
    claim_seconds: float,
    agent_id: str | None = None,
) -> Step:
    """Absorb the next due batch: effects on records once, model calls at least once.

    Args:
        storage: Where.
        consumer: Who.
        session: Which session.
        due: How far.
        counter: Measures texts.
        claim_seconds: How long a dead worker keeps others waiting; a living one renews.
        agent_id: Provenance.

    Returns:
        What became of it; never raises for what the block or its model does.
    """
    # Workers of one loop wait for each other: a flush right after a put does not find the background busy.
    async with storage.cursors.turn(session.sid, consumer.key):
        return await _absorb(storage, consumer, session, due, counter, claim_seconds, agent_id)


async def _absorb(
    storage: Storage,
    consumer: Consumer,
    session: Session,
    due: Due,
    counter: TokenCounter,
    claim_seconds: float,
    agent_id: str | None,
) -> Step:
    scope = Scope(session.session_id, session.user_id or None, agent_id)
    owner = owner_key(scope, session.sid, per_session=consumer.per_session)
    cursor = (await storage.cursors.all(session.sid)).get(consumer.key)
    if cursor is None:
        return Step("nothing")
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
    before = await _before(storage, session, cursor.pos) if consumer.uses_model else ()
    me = storage.ids()
    pos = await _claim(storage, consumer, session.sid, me, claim_seconds)
    if pos is None:
        return Step("busy", error=BUSY)
    if pos != cursor.pos:
        await storage.cursors.release(session.sid, consumer.key, me)
        return Step("again")
    batch = Batch(
        scope=scope,
        owner=owner,
        sid=session.sid,
        lo=cursor.pos,
        hi=hi,
        messages=tuple(row for row in rows if row.seq <= hi),
        before=before,
    )
    step = await _attempt(storage, consumer, batch, me, epoch, counter, claim_seconds, cursor.attempts)
    return replace(step, waiting=last - hi) if step.outcome == "absorbed" and not full else step


async def absorb_letter(
    storage: Storage,
    consumer: Consumer,
    session: Session,
    letter: DeadLetter,
    *,
    counter: TokenCounter,
    agent_id: str | None = None,
) -> Step:
    """Try a dead letter again; it is gone in the transaction that absorbs its range.

    Args:
        storage: Where.
        consumer: Who.
        session: Which session.
        letter: The range.
        counter: Measures texts.
        agent_id: Provenance.

    Returns:
        What became of it.
    """
    scope = Scope(session.session_id, session.user_id or None, agent_id)
    owner = owner_key(scope, session.sid, per_session=consumer.per_session)
    epoch = await storage.records.epoch(owner)
    rows, _ = await storage.log.read(session.sid, session.session_id, after=letter.lo, until=letter.hi)
    batch = Batch(scope, owner, session.sid, letter.lo, letter.hi, tuple(rows))
    try:
        reader = OwnerReader(storage.records, owner, consumer.key)
        preparing = asyncio.wait_for(consumer.prepare(batch, reader, counter), consumer.timeout_seconds)
        draft = await _told(consumer, batch, preparing)
        changes = await _commit(
            storage, consumer, owner, epoch, draft, lambda connection: storage.cursors.bury(connection, letter.id)
        )
    except Exception as error:  # noqa: BLE001  # it stays a dead letter, with the newest reason in the report
        return Step("failed", error=type(error).__name__)
    if changes is None:
        return Step("again")
    _tell(consumer, batch, changes)
    return Step("absorbed", messages=len(rows))


async def _claim(storage: Storage, consumer: Consumer, sid: int, me: str, claim_seconds: float) -> int | None:
    now = storage.now()
    until = now + int(claim_seconds * _SECOND)
    claiming = asyncio.ensure_future(storage.cursors.claim(sid, consumer.key, me, now=now, until=until))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        # It is committed all the same; left alone it would keep others waiting until it expires.
        await claiming
        await storage.cursors.release(sid, consumer.key, me)
        raise


async def _before(storage: Storage, session: Session, pos: int) -> tuple[StoredMessage, ...]:
    rows, _ = await storage.log.read(session.sid, session.session_id, until=pos, limit=_BEFORE_MESSAGES, newest=True)
    return tuple(rows)


async def _commit(
    storage: Storage, consumer: Consumer, owner: str, epoch: int, draft: Any, fence: Callable[[Any], Awaitable[bool]]
) -> Changes | None:
    """Merge a draft, or move on without one, in the transaction that the fence guards."""
    return await storage.records.commit(
        owner,
        consumer.key,
        epoch=epoch,
        fence=fence,
        reads=Reads() if draft is None else consumer.reads(draft),
        merge=lambda records: Changes() if draft is None else consumer.merge(draft, records),
    )


async def _attempt(
    storage: Storage,
    consumer: Consumer,
    batch: Batch,
    me: str,
    epoch: int,
    counter: TokenCounter,
    claim_seconds: float,
    attempts: int,
) -> Step:
    reader = OwnerReader(storage.records, batch.owner, consumer.key)
    try:
        failpoints.reach("prepare.claimed")
        async with kept_alive(storage, consumer.key, batch.sid, me, claim_seconds):
            draft = await _told(consumer, batch, _prepare(consumer, batch, reader, counter))
        failpoints.reach("prepare.done")
        changes = await _commit(
            storage,
            consumer,
            batch.owner,
            epoch,
            draft,
            lambda connection: storage.cursors.fence(connection, batch.sid, consumer.key, me, batch.lo, batch.hi),
        )
    except asyncio.CancelledError:
        await storage.cursors.release(batch.sid, consumer.key, me)
        raise
    except Exception as error:  # noqa: BLE001  # whatever a block or its model raises must not reach the chat
        return await _failed(storage, consumer, batch, me, error, attempts)
    if changes is None:
        await storage.cursors.release(batch.sid, consumer.key, me)
        return Step("again")
    _tell(consumer, batch, changes)
    return Step("absorbed", messages=len(batch.messages))


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
            return await consumer.prepare(batch, reader, counter)
        except Exception:
            raised = True
            raise

    try:
        return await asyncio.wait_for(work(), consumer.timeout_seconds)
    except asyncio.TimeoutError as error:
        if raised:
            raise
        raise _TooSlowError from error


async def _failed(storage: Storage, consumer: Consumer, batch: Batch, me: str, error: Exception, attempts: int) -> Step:
    slow = isinstance(error, _TooSlowError)
    kind = "TimeoutError" if slow else type(error).__name__
    outage = not slow and is_outage(error)
    # Slowness counts while that makes the batch smaller: what is alone at last has all its other tries left.
    counts = BATCH_MESSAGES >> attempts > 1 if slow else not outage
    parked = (
        not outage
        and not slow
        and attempts + 1 >= TRIES_BEFORE_PARKING
        and await storage.cursors.park(
            batch.sid, consumer.key, me, lo=batch.lo, hi=batch.hi, error=kind, now=storage.now()
        )
    )
    if not parked:
        await storage.cursors.release(batch.sid, consumer.key, me, error=kind, counts=counts)
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


@contextlib.asynccontextmanager
async def kept_alive(storage: Storage, key: str, sid: int, me: str, claim_seconds: float) -> AsyncIterator[None]:
    """Renew a claim while what it is for takes its time.

    Args:
        storage: Where.
        key: Of the consumer.
        sid: Private row of the session.
        me: Name of the attempt that claimed.
        claim_seconds: For how long a claim holds.
    """

    async def renew() -> None:
        while True:
            await asyncio.sleep(claim_seconds / 3)
            until = storage.now() + int(claim_seconds * _SECOND)
            # The next one may succeed; if none does, the fence sees to it.
            with contextlib.suppress(StorageError):
                await storage.cursors.renew(sid, key, me, until=until)

    renewing = asyncio.get_running_loop().create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        # Not `await renewing`: that would take a cancellation of this task for the one of that task.
        await asyncio.wait([renewing])


def is_outage(error: BaseException) -> bool:
    """Whether a failure comes from the way to a model or store, not from the content.

    Args:
        error: What was raised; its causes are looked at as well.

    Returns:
        True for connections, time-outs and rate limits: the block waits. False: the batch is at fault.
    """
    return any(_is_outage(link) for link in _causes(error))


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError):
        return True
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    name = type(error).__name__.lower()
    return status in _OUTAGE_STATUS or any(sign in name for sign in _OUTAGE_NAMES)


def _causes(error: BaseException) -> Iterable[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
