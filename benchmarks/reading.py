"""The price of a get: a window of a thousand messages, cold and warm."""

from __future__ import annotations

from pathlib import Path

from llama_index.core.memory import Memory

from benchmarks.timing import message, table, timed
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9


async def report(directory: Path, *, quick: bool) -> str:
    """Measure gets.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    size, times = (100, 3) if quick else (1000, 20)
    stock = await _stock(directory, size, times)
    cold = await _cold(directory, size, times)
    warm = await _warm(directory, size, times)
    rows = [
        [name, f"{wall:.1f}", f"{stock[0] / wall:.1f}", f"{cpu:.1f}", f"{stock[1] / cpu:.1f}"]
        for name, (wall, cpu) in (("stock Memory", stock), ("TieredMemory, cold", cold), ("TieredMemory, warm", warm))
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


async def _cold(directory: Path, size: int, times: int) -> tuple[float, float]:
    """Sessions that this process has not read yet, in an open storage; stock's engine is open as well."""
    async with Storage(await _fill(directory, size, times)) as storage:
        memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
        await memory.aget()
        sessions = iter(range(1, times + 1))
        return await timed(lambda: memory.for_session(str(next(sessions))).aget(), times)


async def _warm(directory: Path, size: int, times: int) -> tuple[float, float]:
    async with Storage(await _fill(directory, size, times)) as storage:
        memory = TieredMemory(storage=storage, session_id="0", token_limit=NO_FLUSH)
        await memory.aget()
        return await timed(memory.aget, times)


async def _stock(directory: Path, size: int, times: int) -> tuple[float, float]:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-get-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    await memory.aget()
    result = await timed(memory.aget, times)
    await memory.sql_store._async_engine.dispose()
    return result
