"""The price of a put: flat in the length of the session, and next to a bare INSERT."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import aiosqlite
from llama_index.core.memory import Memory
from llama_index.core.utils import get_tokenizer

from benchmarks.timing import Work, in_turn, message, ratio, table, usual
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9
ROUNDS = 10


async def report(directory: Path, *, quick: bool) -> str:
    """Measure puts.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    sizes, times = ([10, 200], 5) if quick else ([10, 100, 1000, 5000], 20)
    async with AsyncExitStack() as stack:
        ours = {str(size): await _ours(directory, size, stack) for size in sizes}
        bare = {"bare": await _bare(directory, stack)}
        costs = await in_turn({**ours, **bare}, times, ROUNDS)
        # Apart, as its long sessions take a second per put.
        stock = {str(size): await _stock(directory, size, stack) for size in sizes}
        theirs = {size: usual(cost) for size, cost in (await in_turn(stock, 1, 2 if quick else 4)).items()}
    mine = {size: usual(costs[size]) for size in ours}
    rows = [
        [size, f"{mine[size].cpu:.2f}", f"{theirs[size].cpu:.2f}", f"{theirs[size].cpu / mine[size].cpu:.1f} ×"]
        for size in ours
    ]
    first, last = costs[str(sizes[0])], costs[str(sizes[-1])]
    return (
        "## Put\n\nCPU milliseconds of one put by active messages in the session.\n\n"
        + table(["active messages", "TieredMemory", "stock Memory", "stock / ours"], rows)
        + f"\n\nFrom {sizes[0]} to {sizes[-1]} active messages ours grows by {ratio(last, first).cpu:.2f} ×. "
        f"One put takes {ratio(first, costs['bare']).wall:.1f} × the wall time of a bare aiosqlite INSERT, COMMIT and "
        f"tokenisation ({usual(costs['bare']).wall:.2f} ms), both with synchronous=FULL."
    )


async def _ours(directory: Path, size: int, stack: AsyncExitStack) -> Work:
    storage = await stack.enter_async_context(Storage(directory / f"ours-{size}.db"))
    memory = TieredMemory(storage=storage, session_id="s", token_limit=NO_FLUSH)
    await memory.aput_messages([message(number) for number in range(size)])
    numbers = itertools.count(size)
    for _ in range(10):
        await memory.aput(message(next(numbers)))
    return lambda: memory.aput(message(next(numbers)))


async def _stock(directory: Path, size: int, stack: AsyncExitStack) -> Work:
    uri = f"sqlite+aiosqlite:///{directory / f'stock-{size}.db'}"
    memory = Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_database_uri=uri)
    await memory.aput_messages([message(number) for number in range(size)])
    stack.push_async_callback(memory.sql_store._async_engine.dispose)
    numbers = itertools.count(size)
    return lambda: memory.aput(message(next(numbers)))


async def _bare(directory: Path, stack: AsyncExitStack) -> Work:
    tokenizer = get_tokenizer()
    connection = await stack.enter_async_context(aiosqlite.connect(directory / "bare.db"))
    await connection.execute("PRAGMA journal_mode=WAL")
    await connection.execute("PRAGMA synchronous=FULL")
    await connection.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
    numbers = itertools.count()

    async def put() -> None:
        said = message(next(numbers))
        tokenizer(said.content)
        await connection.execute("INSERT INTO messages (data) VALUES (?)", (said.model_dump_json(),))
        await connection.commit()

    return put
