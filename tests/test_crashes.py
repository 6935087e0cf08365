"""A process may be killed at any moment: what it acknowledged is there, once, in order, and reaches every block."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from doubles import (
    RecordingBlock,
    Workers,
    absorb_all,
    acknowledged,
    assert_in_order,
    assert_once,
    assert_tiled,
    rows,
    told,
)
from running import SOAK

from llama_index_memory_tiers import Storage, TieredMemory

KILLS = {"file": 700, "postgres": 300} if SOAK else {"file": 35, "postgres": 15}
KILLS_PER_SESSION = 7
CLAIM_SECONDS = 0.05


async def kill_somewhere(workers: Workers, pid: int, acks: Path, puts: int, dice: random.Random) -> None:
    """Kill a worker after some more puts, and then a little later: in a statement, a commit, at its start."""
    before = len(acknowledged(acks))
    for _ in range(5000):
        if len(acknowledged(acks)) - before >= puts:
            break
        await asyncio.sleep(0.001)
    await asyncio.sleep(dice.uniform(0, 0.03 if puts == 0 else 0.004))
    assert workers.kill(pid) == -9


async def check(storage: Storage, session: str, acks: Path) -> None:
    memory = TieredMemory(
        storage=storage,
        user_id=session,
        session_id=session,
        memory_blocks=[RecordingBlock()],
        delivery="inline",
        claim_seconds=CLAIM_SECONDS,
    )
    stored = await memory.amessages()
    contents = [message.message.content or "" for message in stored]
    assert set(acknowledged(acks)) <= set(contents)
    assert_once(contents, set(contents))
    assert_in_order(contents)
    assert [message.seq for message in stored] == list(range(1, len(stored) + 1))
    await absorb_all(memory)
    heard = await told(storage)
    assert [text for text in heard.texts if text.startswith(f"{session}/")] == contents
    assert_tiled([span for span in heard.ranges if span[0] == session], {session: len(stored)})
    [sums] = await rows(
        storage,
        "SELECT active_tokens, (SELECT SUM(tokens) FROM {t}_messages m WHERE m.sid = s.sid AND status = 'active') "
        "AS tokens FROM {t}_sessions s WHERE session_id = :session UNION ALL SELECT 0, 0 LIMIT 1",
        session=session,
    )
    assert sums.active_tokens == sums.tokens
    await memory.aclose()


async def test_no_kill_loses_or_doubles_anything(
    workers: Workers, make_storage: Callable[..., Storage], storage_kind: str, tmp_path: Path
) -> None:
    dice = random.Random(7)
    acknowledged_in_all = 0
    opened = await make_storage(storage_kind).aopen()
    for kill in range(KILLS[storage_kind]):
        session = f"chat{kill // KILLS_PER_SESSION}"
        acks = tmp_path / f"{session}.acks"
        first = len(acknowledged(acks))
        # Most die between two statements, where a half-done change would show; the others wherever they are.
        statement = dice.randrange(1, 150) if kill % 3 else 0
        pid = workers.start(
            acks,
            address=opened._address.url.render_as_string(hide_password=False),
            schema=opened.db_schema,
            user=session,
            session=session,
            writers=[session],
            first=first,  # the put that was cut off is repeated, under its old id
            puts=1000,
            delivery=dice.choice(["background", "inline"]),
            claim_seconds=CLAIM_SECONDS,
            window=6,
            dies_at_statement=statement,
        )
        if statement:
            assert workers.wait(pid) == -9
        else:
            await kill_somewhere(workers, pid, acks, dice.choice([0, 1, 2, 3, 5, 8, 13]), dice)
        reopened = make_storage(storage_kind)
        await check(reopened, session, acks)
        acknowledged_in_all += len(acknowledged(acks)) - first
        await reopened.aclose()
    assert acknowledged_in_all > KILLS[storage_kind]  # or the kills came too early to prove anything
    if storage_kind == "file":
        assert [tuple(row) for row in await rows(opened, "PRAGMA integrity_check")] == [("ok",)]
