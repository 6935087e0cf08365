"""The price of a get: a window of a thousand messages, cold and warm."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from llama_index.core.memory import Memory

from benchmarks.timing import Work, in_turn, message, ratio, table, usual
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9
ROUNDS = 6


async def report(directory: Path, *, quick: bool) -> str:
    """Measure gets.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    size, times = (100, 1) if quick else (1000, 10)
    async with AsyncExitStack() as stack:
        gets = {
            "stock Memory": await _stock(directory, size, stack),
            "TieredMemory, cold": await _cold(directory, size, times * ROUNDS, stack),
            "TieredMemory, warm": await _warm(directory, size, stack),
        }
        costs = await in_turn(gets, times, ROUNDS)
    rows = []
    for name, measured in costs.items():
        cost, faster = usual(measured), ratio(costs["stock Memory"], measured)
        rows.append([name, f"{cost.wall:.1f}", f"{faster.wall:.1f}", f"{cost.cpu:.1f}", f"{faster.cpu:.1f}"])
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


async def _cold(directory: Path, size: int, times: int, stack: AsyncExitStack) -> Work:
    """Sessions that this process has not read yet, in an open storage; stock's engine is open as well."""
    storage = await stack.enter_async_context(Storage(await _fill(directory, size, times)))
    memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
    await memory.aget()
    sessions = iter(range(1, times + 1))
    return lambda: memory.for_session(str(next(sessions))).aget()


async def _warm(directory: Path, size: int, stack: AsyncExitStack) -> Work:
    storage = await stack.enter_async_context(Storage(await _fill(directory, size, 0)))
    memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
    await memory.aget()
    return memory.aget


async def _stock(directory: Path, size: int, stack: AsyncExitStack) -> Work:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-get-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    await memory.aget()
    stack.push_async_callback(memory.sql_store._async_engine.dispose)
    return memory.aget
