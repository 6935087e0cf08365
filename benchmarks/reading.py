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
    sessions = times * ROUNDS + 1
    path = directory / f"get-{size}.db"
    await _fill(path, size, sessions)
    async with AsyncExitStack() as stack:
        gets = {
            "stock Memory": await _stock(directory, size, stack),
            "TieredMemory, cold": await _cold(path, size, sessions, stack),
            "TieredMemory, warm": await _warm(path, size, stack),
        }
        costs = await in_turn(gets, times, ROUNDS)
    rows = []
    for name, measured in costs.items():
        cost, faster = usual(measured), ratio(costs["stock Memory"], measured)
        rows.append([name, f"{cost.wall:.1f}", f"{faster.wall:.1f}", f"{cost.cpu:.1f}", f"{faster.cpu:.1f}"])
    heads = ["", "wall ms", "times as fast as stock", "CPU ms", "times as fast as stock"]
    return f"## Get\n\nMilliseconds of `aget` over {size} active messages.\n\n" + table(heads, rows)


async def _fill(path: Path, size: int, sessions: int) -> None:
    async with Storage(path) as storage:
        memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
        for session in range(sessions):
            await memory.for_session(str(session)).aput_messages([message(number) for number in range(size)])


async def _cold(path: Path, size: int, sessions: int, stack: AsyncExitStack) -> Work:
    """Sessions that this storage has not read yet, each once; it is open, as stock's engine is."""
    memory = await _ours(path, size, stack)
    unread = iter(range(1, sessions))
    return lambda: _get(memory.for_session(str(next(unread))), size)


async def _warm(path: Path, size: int, stack: AsyncExitStack) -> Work:
    memory = await _ours(path, size, stack)
    return lambda: _get(memory, size)


async def _ours(path: Path, size: int, stack: AsyncExitStack) -> TieredMemory:
    """The first session in a storage of its own, read once."""
    storage = await stack.enter_async_context(Storage(path))
    memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
    await _get(memory, size)
    return memory


async def _stock(directory: Path, size: int, stack: AsyncExitStack) -> Work:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-get-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    stack.push_async_callback(memory.sql_store._async_engine.dispose)
    await _get(memory, size)
    return lambda: _get(memory, size)


async def _get(memory: Memory, size: int) -> None:
    assert len(await memory.aget()) == size  # an empty window would be read fast
