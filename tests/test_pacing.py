"""Background work lets callers pass, and does not wait for ever."""

from __future__ import annotations

import asyncio

import pytest

from llama_index_memory_tiers import pacing
from llama_index_memory_tiers.pacing import Lane


async def rounds() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_background_work_begins_when_nobody_is_served_any_more() -> None:
    lane, begun = Lane(), []

    async def work() -> None:
        async with lane.turn():
            begun.append(True)

    with lane.serving():
        task = asyncio.create_task(work())
        with lane.serving():
            await rounds()
        await rounds()
        assert not begun  # the first caller still waits
    await task
    assert begun


async def test_with_nobody_served_it_begins_at_once() -> None:
    await asyncio.wait_for(_turn(Lane()), pacing._HOLD_BACK_SECONDS / 2)


async def _turn(lane: Lane) -> None:
    async with lane.turn():
        pass


async def test_callers_without_end_do_not_keep_it_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_HOLD_BACK_SECONDS", 0.01)
    lane = Lane()
    with lane.serving():
        await asyncio.wait_for(_turn(lane), 5)


async def test_a_caller_that_fails_is_served_no_more() -> None:
    lane = Lane()
    with pytest.raises(ValueError, match="bad"), lane.serving():
        raise ValueError("bad")
    await asyncio.wait_for(_turn(lane), pacing._HOLD_BACK_SECONDS / 2)


def test_a_loop_that_was_closed_is_let_go() -> None:
    lane = Lane()

    async def held_back() -> None:
        with lane.serving():
            task = asyncio.ensure_future(_turn(lane))
            await rounds()
        await task

    for _ in range(3):
        asyncio.run(held_back())
    assert len(lane._traffic) == 1
