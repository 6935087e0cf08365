"""Many writers in many processes: nothing lost, nothing doubled, nothing out of order."""

from __future__ import annotations

import asyncio
from pathlib import Path

from doubles import (
    NewestBlock,
    RecordingBlock,
    Workers,
    absorb_all,
    acknowledged,
    assert_in_order,
    assert_once,
    assert_tiled,
    heads,
    rows,
    told,
)
from running import SOAK

from llama_index_memory_tiers import Storage, TieredMemory

PROCESSES = 3
TASKS = 50
PUTS_PER_TASK = {"file": 2, "postgres": 40 if SOAK else 2}


def address(storage: Storage) -> dict[str, str | None]:
    return {
        "address": storage._address.url.render_as_string(hide_password=False),
        "schema": storage.db_schema,
    }


async def test_fifty_tasks_in_each_of_three_halting_processes_share_a_session(
    workers: Workers, storage: Storage, storage_kind: str, tmp_path: Path
) -> None:
    await storage.aopen()
    acks = tmp_path / "acks"
    puts = PUTS_PER_TASK[storage_kind]
    writers = [[f"p{process}t{task}" for task in range(TASKS)] for process in range(PROCESSES)]
    started = [
        workers.start(
            acks,
            writers=names,
            puts=puts,
            delivery="background" if names[0] != "p2t0" else "inline",
            claim_seconds=0.05,
            **address(storage),
        )
        for names in writers
    ]
    for stall in range(9):
        await workers.stall(started[stall % PROCESSES], 0.12)
        await asyncio.sleep(0.03)
    assert [workers.wait(pid) for pid in started] == [0] * PROCESSES

    wanted = [f"{name}/{number}" for names in writers for name in names for number in range(puts)]
    assert_once(acknowledged(acks), wanted)
    memory = TieredMemory(
        storage=storage, user_id="ada", session_id="chat", memory_blocks=[RecordingBlock()], delivery="inline"
    )
    stored = await memory.amessages()
    contents = [message.message.content or "" for message in stored]
    assert_once(contents, wanted)
    assert_in_order(contents)
    assert [message.seq for message in stored] == list(range(1, len(wanted) + 1))

    await absorb_all(memory)
    heard = await told(storage)
    assert heard.texts == contents
    assert_tiled(heard.ranges, {"chat": len(wanted)})
    [sums] = await rows(
        storage,
        "SELECT active_tokens, (SELECT SUM(tokens) FROM {t}_messages WHERE status = 'active') AS tokens FROM {t}_sessions",
    )
    assert sums.active_tokens == sums.tokens
    await memory.aclose()


async def test_two_sessions_of_a_user_merge_into_one_bounded_set(
    workers: Workers, storage: Storage, storage_kind: str, tmp_path: Path
) -> None:
    await storage.aopen()
    acks = tmp_path / "acks"
    puts = 5 * PUTS_PER_TASK[storage_kind]
    started = [
        workers.start(
            acks, session=f"chat {side}", writers=[f"{side}{n}" for n in range(5)], puts=puts, newest=True,
            delivery=delivery, **address(storage),
        )
        for side, delivery in (("left", "inline"), ("right", "background"))
    ]  # fmt: skip
    assert [workers.wait(pid) for pid in started] == [0, 0]

    block = NewestBlock()
    memory = TieredMemory(
        storage=storage,
        user_id="ada",
        session_id="chat left",
        memory_blocks=[block, RecordingBlock()],
        delivery="inline",
    )
    await absorb_all(memory)
    wanted = [f"{side}{n}/{number}" for side in ("left", "right") for n in range(5) for number in range(puts)]
    for name in ("Newest", "Recorder"):
        found = [
            row.text
            for row in await rows(
                storage, "SELECT text FROM {t}_records WHERE block = :b AND kind = 'heard' ORDER BY id", b=name
            )
        ]
        assert_once(found, wanted)
        assert_in_order(found)
    kept = await rows(storage, "SELECT text FROM {t}_records WHERE block = 'Newest' AND archived_at IS NULL")
    assert len(kept) == block.keep
    assert_tiled((await told(storage)).ranges, await heads(storage))
    owners = await rows(storage, "SELECT owner, epoch FROM {t}_owners")
    assert [tuple(row) for row in owners] == [("u:ada", 0)]
    await memory.aclose()
