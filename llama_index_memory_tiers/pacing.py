"""When background work may run: not all at once, not before what callers wait for, not soon after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from llama_index_memory_tiers.blocks.absorbing import BUSY
from llama_index_memory_tiers.events import BlockProgress

Key = tuple[str, str]
"""(user_id or '', session_id)."""

# Sessions of a loop that are read at once in the background; what waits, waits in the log and takes no memory.
_AT_ONCE = 32
# With it 64 tasks that put without a pause get twice as far, and sessions are read in fewer and larger batches.
_HOLD_BACK_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0
_KNOWN_SESSIONS = 10_000


@dataclass(slots=True)
class _Traffic:
    """What goes on on one loop."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    served: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)


class Lane:
    """Lets callers pass: background work takes turns, and holds back for a moment while a caller is served."""

    def __init__(self) -> None:
        self._traffic: WeakKeyDictionary[asyncio.AbstractEventLoop, _Traffic] = WeakKeyDictionary()

    def _here(self) -> _Traffic:
        loop = asyncio.get_running_loop()
        found = self._traffic.get(loop)
        if found is None:
            for other in [other for other in self._traffic if other.is_closed()]:
                del self._traffic[other]  # what was once waited for holds its loop
            found = self._traffic[loop] = _Traffic()
        return found

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A caller waits for what is done in it."""
        traffic = self._here()
        traffic.served += 1
        traffic.quiet.clear()
        try:
            yield
        finally:
            traffic.served -= 1
            if not traffic.served:
                traffic.quiet.set()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Background work is done in it; it begins when nobody is served, or has been for too long."""
        traffic = self._here()
        if traffic.served:
            await wait_at_most(traffic.quiet, _HOLD_BACK_SECONDS)
        async with traffic.slots:
            yield


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than this.

    Before Python 3.12 `asyncio.wait_for` forgets that it was cancelled when the event comes at the same moment, and
    whoever cancelled the task would wait for it for ever.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


@dataclass(frozen=True, slots=True)
class _Rest:
    """A block rests after a failure: its siblings and later puts do not wait for it, nor wake it.

    Args:
        seconds: About how long; doubles with each failure.
        until: End by the loop's clock, which is the same for all loops of a process.
        busy: Nothing failed: another worker holds the claim.
    """

    seconds: float
    until: float
    busy: bool

    @classmethod
    def after(cls, block: BlockProgress, before: _Rest | None, now: float) -> _Rest:
        seconds = _FIRST_PAUSE_SECONDS
        if before is not None and not block.absorbed and not block.parked:
            if before.until > now:
                return before  # a call that did not wait for its end does not prolong it
            seconds = min(_LONGEST_PAUSE_SECONDS, before.seconds * 2)
        until = now + random.uniform(seconds / 2, seconds)  # noqa: S311  # jitter, not a secret
        return cls(seconds, until, busy=block.error == BUSY)


class Rests:
    """Which blocks rest in which sessions, as they failed there."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, dict[str, _Rest]] = OrderedDict()

    def of(self, key: Key) -> frozenset[str]:
        """Keys of the blocks that rest in a session now."""
        return frozenset(self._now(key))

    def failing(self, key: Key) -> frozenset[str]:
        """Those that rest as something failed, not as another worker has the claim."""
        return frozenset(name for name, rest in self._now(key).items() if not rest.busy)

    def left(self, key: Key) -> float | None:
        """Seconds until the first of the session's blocks has rested; `None` when none of them failed last time."""
        known = self._known.get(key)
        if not known:
            return None
        return max(0.0, min(rest.until for rest in known.values()) - asyncio.get_running_loop().time())

    def after(self, key: Key, progress: Sequence[BlockProgress]) -> None:
        """Blocks that failed rest, those that did not rest no more, the others go on as they were."""
        now = asyncio.get_running_loop().time()
        known = self._known.pop(key, {})
        for block in progress:
            before = known.pop(block.block, None)
            if block.error is not None:
                known[block.block] = _Rest.after(block, before, now)
        if known:
            self._known[key] = known
            if len(self._known) > _KNOWN_SESSIONS:
                self._known.popitem(last=False)

    def _now(self, key: Key) -> dict[str, _Rest]:
        now = asyncio.get_running_loop().time()
        return {name: rest for name, rest in self._known.get(key, {}).items() if rest.until > now}
