"""Keeping an index outside the database in step: told of what changed, after the transaction, again until it is so."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.storage.catch_up import index_columns
from llama_index_memory_tiers.storage.index.seam import Point, Space, VectorIndex, point_id
from llama_index_memory_tiers.storage.marks import IndexState, MarkStore

_logger = logging.getLogger(__name__)
_PAUSE_SECONDS = 5.0
_OWNERS_AT_ONCE = 200
_BACKGROUND_SECONDS = 2.0

SyncProgress = Callable[[int, int], None]
"""Gets the owners done and the owners in all."""


class IndexKeeper:
    """Tells an index what the database holds.

    Args:
        index: Which.
        marks: How far it is.
        prefix: Name of the storage's tables.
    """

    def __init__(self, index: VectorIndex, marks: MarkStore, *, prefix: str) -> None:
        self.index = index
        self.marks = marks
        self._prefix = prefix
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: dict[str, set[str | None]] = {}  # while somebody is at it
        self._not_before = 0.0
        self.error: str | None = None

    # -- whether it answers ----------------------------------------------------------------------------------

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago, so that nobody waits for it again at once."""
        return time.monotonic() < self._not_before

    def failed(self, error: BaseException) -> None:
        """Write down that it did not answer."""
        self.error = type(error).__name__
        self._not_before = time.monotonic() + _PAUSE_SECONDS
        _logger.warning("external index failed", extra={"error": self.error})

    def worked(self) -> None:
        """Write down that it answered."""
        self.error, self._not_before = None, 0.0

    async def state(self) -> IndexState:
        """See `Storage.index_state`."""
        models = await self.marks.asked_models() or await self.marks.stored_models() or [""]
        counts = [await self.marks.waiting(model) for model in models]
        return IndexState(
            attached=True,
            pending=max(records for _, records in counts),
            owners=max(owners for owners, _ in counts),
            error=self.error,
        )

    # -- telling it ------------------------------------------------------------------------------------------

    def soon(self, owner: str, model: str | None = None) -> None:
        """Tell it in the background what is new about an owner."""
        if self.resting:
            return  # the next change or question tries again
        if owner in self._wanted:
            self._wanted[owner].add(model)
            return
        self._wanted[owner] = {model}
        task = asyncio.get_running_loop().create_task(self._later(owner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, owner: str) -> None:
        try:
            while asked := self._wanted[owner]:
                self._wanted[owner] = set()
                for model in sorted({*await self.marks.models_of(owner), *(one for one in asked if one is not None)}):
                    await self.drain(owner, model)
        except Exception as error:  # noqa: BLE001  # whatever client or database raise: the next change tries again
            self.failed(error)
        finally:
            del self._wanted[owner]

    async def settle(self) -> None:
        """Wait until nothing is being told on this loop any more."""
        while await self._settled_once():
            pass

    async def _settled_once(self, timeout_seconds: float | None = None) -> bool:
        """Wait for what is being told on this loop now; whether there was anything."""
        here = asyncio.get_running_loop()
        mine = [task for task in self._tasks if task.get_loop() is here]
        if mine:
            await asyncio.wait(mine, timeout=timeout_seconds)  # which is cancelled without cancelling these
        return bool(mine)

    async def sync(self, progress: SyncProgress | None = None, *, again: bool = False) -> IndexState:
        """Tell it everything that it has not been told; see `Storage.sync_index`."""
        # What has begun already would else begin to tell the same when this has ended.
        await self._settled_once(_BACKGROUND_SECONDS)
        if again:
            await self.marks.reset()
        done = 0
        # Each owner once: somebody who writes without a pause is told of in the background.
        for model in sorted({*await self.marks.asked_models(), *await self.marks.stored_models()} or {""}):
            total = done + (await self.marks.waiting(model))[0]
            after = ""
            while owners := await self.marks.behind(model, _OWNERS_AT_ONCE, after=after):
                after = owners[-1]
                for owner in owners:
                    await self.drain(owner, model)
                    done += 1
                    if progress is not None:
                        progress(done, max(done, total))
        self.worked()
        return await self.state()

    async def drain(self, owner: str, model: str) -> int:
        """Bring it up to date about one owner and one model's vectors.

        Args:
            owner: Whose.
            model: Name of the embedding model; '' for none.

        Returns:
            How many points were deleted.
        """
        standing = await self.marks.standing(owner, model)
        if standing is None or not standing.behind:
            return 0
        dimensions = await self.marks.dimensions(owner, model)
        space = Space.of(self._prefix, model, dimensions)
        if standing.space and not dimensions:
            space = Space.named(standing.space)  # without any vector left there is nothing to move for
        await self.index.prepare(space)
        busy, moved = uuid.uuid4().hex, standing.space not in {"", space.name}
        await self.marks.begin(owner, model, space.name, busy)
        since = 0 if moved else standing.seen_rev
        dropped = await self._tell(owner, model, space, since, standing.rev)
        failpoints.reach("index.told")
        if standing.epoch != standing.seen_epoch or standing.busy is not None:
            dropped += len(await self._strangers(owner, space, delete=True))
        if moved:
            before = Space.named(standing.space)
            held = await self._held(owner, before)
            await self.index.drop(before, held)
            dropped += len(held)
        await self.marks.finish(owner, model, standing, busy)
        self.worked()
        return dropped

    async def _tell(self, owner: str, model: str, space: Space, since: int, until: int) -> int:
        after, dropped = 0, 0
        while True:
            rows, uids = await self.marks.changed(owner, model, since, until, after)
            if not rows:
                return dropped
            after = rows[-1].id
            dead = {row.id for row in rows if row.superseded_by is not None or row.archived_at is not None}
            gone = [point_id(uids[number]) for number in dead if number in uids]
            await self.index.drop(space, gone)
            dropped += len(gone)
            points = [point for point in _points(owner, rows, uids) if point.record not in dead]
            await self.index.put(space, points)
            # What was forgotten while this was on its way must not stay.
            there = await self.marks.alive(owner, [point.record for point in points])
            late = [point.id for point in points if point.record not in there]
            await self.index.drop(space, late)
            dropped += len(late)

    async def _strangers(self, owner: str, space: Space, *, delete: bool) -> list[str]:
        """Points of an owner whose record is not there, or not live, any more."""
        known: set[str] = set()
        after = 0
        held = await self._held(owner, space)
        while page := await self.marks.live(owner, after):
            known |= {point_id(uid) for _, uid in page}
            after = page[-1][0]
        found = [point for point in held if point not in known]
        if delete:
            await self.index.drop(space, found)
        return found

    async def _held(self, owner: str, space: Space) -> list[str]:
        held: list[str] = []
        after: str | None = None
        while True:
            page, after = await self.index.held(space, owner, after)
            held += page
            if after is None:
                return held

    # -- forgetting ------------------------------------------------------------------------------------------

    async def forget(self, owners: Iterable[str]) -> tuple[int, int | None]:
        """Delete the points of what was forgotten, and look again.

        Args:
            owners: Of whom something was forgotten.

        Returns:
            How many points went, and how many are left all the same; `None` when it does not answer: then they are
            deleted when it does.
        """
        dropped, left = 0, 0
        try:
            for owner in sorted(owners):
                for model in await self.marks.models_of(owner):
                    dropped += await self.drain(owner, model)
                    standing = await self.marks.standing(owner, model)
                    if standing is not None and standing.space:
                        left += len(await self._strangers(owner, Space.named(standing.space), delete=False))
        except Exception as error:  # noqa: BLE001  # whatever the client raises: it stays pending and says so
            self.failed(error)
            return dropped, None
        return dropped, left


def _points(owner: str, rows: Sequence[Any], uids: dict[int, str]) -> list[Point]:
    columns = index_columns(rows)
    points = []
    for at, number in enumerate(columns["id"]):
        if number not in uids:
            continue  # forgotten meanwhile
        terms = np.frombuffer(columns["terms"][at], "<u4").tolist()
        counts = np.frombuffer(columns["counts"][at], "<u2").tolist()
        vector = columns["vector"][at]
        points.append(
            Point(
                id=point_id(uids[number]),
                record=number,
                owner=owner,
                kind=columns["kind"][at],
                block=columns["block"][at],
                said_at=columns["said_at"][at],
                expires_at=columns["expires_at"][at],
                sid=columns["sid"][at],
                seq=columns["seq"][at],
                speaker=columns["speaker"][at],
                terms=dict(zip(terms, counts, strict=True)),
                vector=None if vector is None else np.frombuffer(vector, "<f2").astype(np.float32),
            )
        )
    return points
