"""The price of a put: flat in the length of the session, and next to a bare INSERT."""

from __future__ import annotations

from pathlib import Path

import aiosqlite
from llama_index.core.memory import Memory
from llama_index.core.utils import get_tokenizer

from benchmarks.timing import message, table, timed
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9


async def report(directory: Path, *, quick: bool) -> str:
    """Measure puts.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    sizes = [10, 200] if quick else [10, 100, 1000, 5000]
    puts = 20 if quick else 200
    ours = [await _ours(directory, size, puts) for size in sizes]
    stock = [await _stock(directory, size, max(3, puts // (1 + size // 100))) for size in sizes]
    bare = await _bare(directory, puts)
    rows = [
        [str(size), f"{mine[1]:.2f}", f"{theirs[1]:.2f}", f"{theirs[1] / mine[1]:.1f} ×"]
        for size, mine, theirs in zip(sizes, ours, stock, strict=True)
    ]
    growth = ours[-1][1] / ours[0][1]
    price = ours[0][0] / bare[0]
    return (
        "## Put\n\nCPU milliseconds of one put by active messages in the session.\n\n"
        + table(["active messages", "TieredMemory", "stock Memory", "stock / ours"], rows)
        + f"\n\nFrom {sizes[0]} to {sizes[-1]} active messages ours grows by {growth:.2f} ×. "
        f"One put takes {price:.1f} × the wall time of a bare aiosqlite INSERT, COMMIT and tokenisation "
        f"({bare[0]:.2f} ms), both with synchronous=FULL."
    )


async def _ours(directory: Path, size: int, puts: int) -> tuple[float, float]:
    async with Storage(directory / f"ours-{size}.db") as storage:
        memory = TieredMemory(storage=storage, session_id="s", token_limit=NO_FLUSH)
        await memory.aput_messages([message(number) for number in range(size)])
        numbers = iter(range(size, size + puts + 10))
        for _ in range(10):
            await memory.aput(message(next(numbers)))
        return await timed(lambda: memory.aput(message(next(numbers))), puts)


async def _stock(directory: Path, size: int, puts: int) -> tuple[float, float]:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    numbers = iter(range(size, size + puts + 1))
    result = await timed(lambda: memory.aput(message(next(numbers))), puts)
    await memory.sql_store._async_engine.dispose()
    return result


async def _bare(directory: Path, puts: int) -> tuple[float, float]:
    tokenizer = get_tokenizer()
    async with aiosqlite.connect(directory / "bare.db") as connection:
        await connection.execute("PRAGMA journal_mode=WAL")
        await connection.execute("PRAGMA synchronous=FULL")
        await connection.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
        numbers = iter(range(puts))

        async def put() -> None:
            said = message(next(numbers))
            tokenizer(said.content)
            await connection.execute("INSERT INTO messages (data) VALUES (?)", (said.model_dump_json(),))
            await connection.commit()

        return await timed(put, puts)
