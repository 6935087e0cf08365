"""The price of a put: flat in the length of the session, and next to a bare INSERT."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import aiosqlite
from llama_index.core.memory import Memory
from llama_index.core.utils import get_tokenizer
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.timing import Begin, Work, in_fresh_turns, message, ratio, table, usual
from llama_index_memory_tiers import Storage, TieredMemory

NO_FLUSH = 10**9
ROUNDS = 40
PUTS = 5  # in a round: a session grows by so many while it is measured
WARM_UPS = 3


async def report(directory: Path, *, quick: bool) -> str:
    """Measure puts.

    Args:
        directory: For database files.
        quick: Small sizes.

    Returns:
        Markdown.
    """
    sizes, rounds, apart = ([10, 200], 5, 2) if quick else ([10, 100, 1000, 5000], ROUNDS, 4)
    async with AsyncExitStack() as stack:
        ours = {str(size): await _ours(directory, size, stack) for size in sizes}
        bare = {"bare": await _bare(directory, stack)}
        costs = await in_fresh_turns({**ours, **bare}, PUTS, rounds)
        # Apart and in fewer rounds, as its long sessions take up to a second per put.
        stock = {str(size): _stock(directory, size, stack) for size in sizes}
        theirs = {size: usual(cost) for size, cost in (await in_fresh_turns(stock, PUTS, apart)).items()}
    mine = {size: usual(costs[size]) for size in ours}
    rows = [
        [size, f"{mine[size].cpu:.2f}", f"{theirs[size].cpu:.2f}", f"{theirs[size].cpu / mine[size].cpu:.1f} ×"]
        for size in ours
    ]
    first, last = costs[str(sizes[0])], costs[str(sizes[-1])]
    return (
        "## Put\n\nCPU milliseconds of one put by active messages in the session. Each round has a fresh session of "
        f"that size, the last {WARM_UPS} put one by one to warm up, and times the next {PUTS} puts. Stock is measured "
        f"after ours and in {apart} rounds instead of {rounds}, as its long sessions take up to a second per put.\n\n"
        + table(["active messages", "TieredMemory", "stock Memory", "stock / ours"], rows)
        + f"\n\nFrom {sizes[0]} to {sizes[-1]} active messages ours grows by {ratio(last, first).cpu:.2f} ×. "
        f"One put takes {ratio(first, costs['bare']).wall:.1f} × the wall time of a bare aiosqlite INSERT, COMMIT and "
        f"tokenisation ({usual(costs['bare']).wall:.2f} ms), both with synchronous=FULL."
    )


async def _ours(directory: Path, size: int, stack: AsyncExitStack) -> Begin:
    storage = await stack.enter_async_context(Storage(directory / f"ours-{size}.db"))
    first = TieredMemory(storage=storage, session_id="first", token_limit=NO_FLUSH)
    rounds = itertools.count()
    return lambda: _filled(first.for_session(str(next(rounds))), size)


def _stock(directory: Path, size: int, stack: AsyncExitStack) -> Begin:
    rounds = itertools.count()

    async def begin() -> Work:
        # A database of its own: beside other sessions a statement by status might read them all.
        engine = create_async_engine(f"sqlite+aiosqlite:///{directory / f'stock-{size}-{next(rounds)}.db'}")
        stack.push_async_callback(engine.dispose)
        return await _filled(Memory.from_defaults(session_id="s", token_limit=NO_FLUSH, async_engine=engine), size)

    return begin


async def _bare(directory: Path, stack: AsyncExitStack) -> Begin:
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

    return lambda: _warmed_up(put)


async def _filled(memory: Memory, size: int) -> Work:
    """Puts into a session of a stated size; the last messages of it are the warm-up."""
    numbers = itertools.count(size - WARM_UPS)
    await memory.aput_messages([message(number) for number in range(size - WARM_UPS)])
    return await _warmed_up(lambda: memory.aput(message(next(numbers))))


async def _warmed_up(put: Work) -> Work:
    for _ in range(WARM_UPS):
        await put()
    return put
