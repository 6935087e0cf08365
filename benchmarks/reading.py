"""The price of a get: a window of a thousand messages, cold and warm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from llama_index.core.memory import Memory

from benchmarks.timing import message, table, timed
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9
ROUNDS = 5
Get = Callable[[], Awaitable[object]]


async def report(directory: Path, *, quick: bool) -> str:
    """Measure gets, the three in turn, so that a machine that is slow for a while is slow for all of them.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    size, times = (100, 1) if quick else (1000, 8)
    async with AsyncExitStack() as stack:
        gets = {
            "stock Memory": await _stock(directory, size, stack),
            "TieredMemory, cold": await _cold(directory, size, times * ROUNDS, stack),
            "TieredMemory, warm": await _warm(directory, size, stack),
        }
        rounds = [{name: await timed(get, times) for name, get in gets.items()} for _ in range(ROUNDS)]
    measured = {name: [median(cost) for cost in zip(*(each[name] for each in rounds), strict=True)] for name in gets}
    stock = measured["stock Memory"]
    rows = [
        [name, f"{wall:.1f}", f"{stock[0] / wall:.1f}", f"{cpu:.1f}", f"{stock[1] / cpu:.1f}"]
        for name, (wall, cpu) in measured.items()
    ]
    heads = ["", "wall ms", "times as fast as stock", "CPU ms", "times as fast as stock"]
    return f"## Get\n\nMilliseconds of `aget` over {size} active messages.\n\n" + table(heads, rows)


async def _fill(directory: Path, size: int, sessions: int) -> Path:
    path = directory / f"get-{size}.db"
    if not path.exists():
        async with Storage(path) as storage:
            memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
            for session in range(sessions + 1):
                said = [message(number) for number in range(size)]
                await memory.for_session(str(session)).aput_messages(said)
    return path


async def _cold(directory: Path, size: int, times: int, stack: AsyncExitStack) -> Get:
    """Sessions that this process has not read yet, in an open storage; stock's engine is open as well."""
    storage = await stack.enter_async_context(Storage(await _fill(directory, size, times)))
    memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
    await memory.aget()
    sessions = iter(range(1, times + 1))
    return lambda: memory.for_session(str(next(sessions))).aget()


async def _warm(directory: Path, size: int, stack: AsyncExitStack) -> Get:
    storage = await stack.enter_async_context(Storage(await _fill(directory, size, 0)))
    memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
    await memory.aget()
    return memory.aget


async def _stock(directory: Path, size: int, stack: AsyncExitStack) -> Get:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-get-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    await memory.aget()
    stack.push_async_callback(memory.sql_store._async_engine.dispose)
    return memory.aget
