"""Synchronous calls: from scripts, threads, busy loops and forks, never from inside a block."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import TieredMemory
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.portal import Portal

asked_by: contextvars.ContextVar[str] = contextvars.ContextVar("asked_by", default="nobody")


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    loop, thread = portal._loop, portal._thread
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def where() -> tuple[int, int]:
    await asyncio.sleep(0)
    return threading.get_ident(), id(asyncio.get_running_loop())


def test_the_result_comes_back_from_one_thread_with_one_loop(portal: Portal) -> None:
    first, second = portal.run(where()), portal.run(where())
    assert first == second
    assert first[0] != threading.get_ident()


def test_an_error_comes_back_as_it_was_raised(portal: Portal) -> None:
    class OddError(Exception):
        pass

    async def fails() -> None:
        raise OddError("odd")

    with pytest.raises(OddError, match="odd"):
        portal.run(fails())
    assert portal.run(where())[0] != threading.get_ident()


def test_nothing_is_started_before_the_first_call() -> None:
    before = threading.active_count()
    portal = Portal()
    assert threading.active_count() == before
    assert portal._thread is None


def test_the_thread_does_not_keep_the_process_alive(portal: Portal) -> None:
    portal.run(where())
    assert portal._thread is not None
    assert portal._thread.daemon


async def test_it_works_inside_a_running_loop_as_in_a_notebook(portal: Portal) -> None:
    here = id(asyncio.get_running_loop())
    thread, loop = portal.run(where())
    assert (thread, loop) != (threading.get_ident(), here)


def test_many_threads_share_it_and_get_their_own_answers(portal: Portal) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: portal.run(double(number)), range(200)))
    assert answers == [2 * number for number in range(200)]


def test_calls_wait_for_each_other_only_where_they_must(portal: Portal) -> None:
    # Both must be inside at once, or neither gets out.
    inside: list[asyncio.Event] = []

    async def meet() -> int:
        inside.append(asyncio.Event())
        inside[0].set() if len(inside) == 2 else await asyncio.wait_for(inside[0].wait(), 30)
        return len(inside)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: portal.run(meet()), range(2))) == [2, 2]


def test_background_work_goes_on_after_the_call(portal: Portal) -> None:
    done = threading.Event()

    async def later() -> None:
        await asyncio.sleep(0)
        done.set()

    kept: list[asyncio.Task[None]] = []

    async def start() -> None:
        kept.append(asyncio.get_running_loop().create_task(later()))

    portal.run(start())
    assert done.wait(10)


def test_context_variables_of_the_caller_come_along_and_changes_stay_inside(portal: Portal) -> None:
    async def read() -> str:
        seen = asked_by.get()
        asked_by.set("the portal")
        return seen

    token = asked_by.set("logan")
    assert portal.run(read()) == "logan"
    assert asked_by.get() == "logan"
    asked_by.reset(token)
    assert portal.run(read()) == "nobody"


def test_a_call_from_its_own_thread_is_refused_instead_of_waiting_for_itself(portal: Portal) -> None:
    async def inner() -> None:
        portal.run(where())

    with pytest.raises(ConfigurationError) as caught:
        portal.run(inner())
    assert "inside a memory block" in caught.value.given
    assert "aget()" in caught.value.remedy


class Confused(BaseMemoryBlock[str]):
    """A block that calls a synchronous method of its own memory."""

    name: str = "confused"
    memory: TieredMemory | None = None
    error: str = ""

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: object) -> str:
        assert self.memory is not None
        try:
            self.memory.get()
        except ConfigurationError as error:
            self.error = str(error)
            raise
        return ""

    async def _aput(self, messages: list[ChatMessage]) -> None:
        return None


def test_a_block_that_calls_a_synchronous_method_costs_its_own_section_only() -> None:
    block = Confused()
    memory = TieredMemory(session_id="chat", memory_blocks=[block])
    block.memory = memory
    memory.put(ChatMessage(role="user", content="hello"))
    assert [message.content for message in memory.get()] == ["hello"]
    assert "from inside a memory block" in block.error
    memory.close()


def test_after_a_fork_the_child_gets_a_thread_of_its_own(portal: Portal) -> None:
    portal.run(where())
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns: a web server forks all the same
        child = os.fork()
    if child == 0:
        try:
            ident, _ = portal.run(where())
            os.write(writing, b"ok" if ident != threading.get_ident() else b"same thread")
        finally:
            os._exit(0)
    os.close(writing)
    for _ in range(1000):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.read(reading, 20) == b"ok"
    os.close(reading)
    assert portal.run(where())[0] != threading.get_ident()


async def test_a_sync_call_goes_through_while_its_own_loop_is_in_the_middle_of_a_write(tmp_path: Path) -> None:
    memory = TieredMemory(storage=tmp_path / "m.db", session_id="s")
    await memory.aput(ChatMessage(role="user", content="warm"))
    for steps in range(12):  # stop the loop at every step of a put: before BEGIN, inside, after COMMIT
        putting = asyncio.ensure_future(memory.aput(ChatMessage(role="user", content="async")))
        for _ in range(steps):
            await asyncio.sleep(0.001)
        memory.put(ChatMessage(role="user", content="sync"))
        await putting
    assert len(await memory.aget_all()) == 25
    await memory.aclose()
