"""Blocks that raise what nobody expects, or never come back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from doubles import RecordingBlock, said
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import TieredMemory
from llama_index_memory_tiers.blocks.guarding import within
from llama_index_memory_tiers.portal import Portal


class Odd(BaseException):
    """Neither an error nor an end."""


class Raising(BaseMemoryBlock[str]):
    name: str = "Raising"
    priority: int = 1
    raised: Any = SystemExit

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
        raise self.raised

    async def _aput(self, messages: list[ChatMessage]) -> None:
        raise self.raised


class Deaf(Raising):
    name: str = "Deaf"
    timeout_seconds: float = 0.05

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
        for _ in range(20):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        return ""


@pytest.mark.parametrize("raised", [SystemExit, GeneratorExit, Odd])
def test_a_block_that_raises_what_is_no_error_costs_its_own_section(tmp_path: Path, raised: type) -> None:
    with_it = TieredMemory(storage=tmp_path / "m.db", session_id="s", memory_blocks=[Raising(raised=raised)])
    with_it.put(said("user", "hello"))
    with_it.put(said("assistant", "hi"))
    got: list[list[ChatMessage]] = []
    caller = threading.Thread(target=lambda: got.append(with_it.get()), daemon=True)
    caller.start()
    caller.join(10)
    assert [message.content for message in got[0]] == ["hello", "hi"]
    report = with_it.flush()
    assert (report.blocks[0].error, report.blocks[0].pending) == ("ExtractionError", 2)
    assert with_it.flush().blocks[0].error == "ExtractionError"  # it left no claim behind
    with_it.close()


async def test_a_block_that_swallows_its_cancellation_is_left_behind() -> None:
    memory = TieredMemory(session_id="s", memory_blocks=[Deaf(), RecordingBlock()])
    await memory.aput(said("user", "hello"))
    got = await asyncio.wait_for(memory.aget(), 2)
    assert [message.content for message in got] == ["hello"]
    await memory.aclose()


async def test_who_is_cancelled_while_waiting_for_a_block_cancels_it() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    waiting = asyncio.ensure_future(within(10, work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(ended.wait(), 2)


def test_a_thread_for_synchronous_calls_that_is_stopped_leaves_nobody_waiting() -> None:
    portal = Portal("stopped")

    async def stop() -> None:
        raise SystemExit

    async def long() -> None:
        await asyncio.sleep(3600)

    outcomes: list[type[BaseException]] = []

    def call(work: Any) -> None:
        try:
            portal.run(work)
        except BaseException as error:  # noqa: BLE001  # whatever comes
            outcomes.append(type(error))

    callers = [threading.Thread(target=call, args=(work,), daemon=True) for work in (long(), stop())]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert len(outcomes) == 2
    assert portal.run(asyncio.sleep(0, "again")) == "again"
