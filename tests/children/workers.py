"""A process that imports everything once and forks a worker for each job: starting one costs milliseconds.

It reads commands from its standard input, one JSON line each, and answers each with one line:
`{"start": job}` → the worker's process id; `{"wait": pid}` → its exit status as `os.waitpid` gives it.
A worker writes each acknowledged text to the job's `acks` file the moment the put has returned. Nothing is
started before the fork: no event loop, no engine, no thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

import aiosqlite  # noqa: F401  # imported before the fork
import asyncpg  # noqa: F401  # imported before the fork
from doubles import NewestBlock, RecordingBlock, said
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers import Storage, TieredMemory


async def _slow(_: Any) -> None:
    await asyncio.sleep(random.uniform(0, 0.003))


def _memory(job: dict[str, Any]) -> TieredMemory:
    blocks = [RecordingBlock(on_prepare=_slow), NewestBlock()] if job["newest"] else [RecordingBlock(on_prepare=_slow)]
    return TieredMemory(
        storage=Storage(job["address"], db_schema=job["schema"], pool_size=job["connections"]),
        user_id=job["user"],
        session_id=job["session"],
        memory_blocks=blocks,
        delivery=job["delivery"],
        claim_seconds=job["claim_seconds"],
        window_messages=job["window"],
    )


def _die_at(storage: Storage, statement: int) -> None:
    """Fall dead between two statements, as a power cut would have it."""

    def count(*_: Any) -> None:
        storage._database.statements += 1
        if storage._database.statements == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    storage._database._count = count  # type: ignore[method-assign]


async def _writer(job: dict[str, Any], memory: TieredMemory, writer: str, acks: int) -> None:
    for number in range(job["first"], job["first"] + job["puts"]):
        content = f"{writer}/{number}"
        role = "assistant" if number % 2 else "user"
        await memory.aput(said(role, content), uid=content)
        os.write(acks, f"{content}\n".encode())
        if number % 10 == 9:
            await memory.aget(f"what was {writer}?")


async def _work(job: dict[str, Any]) -> None:
    memory = _memory(job)
    if job["dies_at_statement"]:
        _die_at(memory.storage, job["dies_at_statement"])
    acks = os.open(job["acks"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    await asyncio.gather(*(_writer(job, memory, writer, acks) for writer in job["writers"]))
    await memory.aclose()
    await memory.storage.aclose()


def _start(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)  # the answers' pipe belongs to the parent
        random.seed()
        asyncio.run(_work(job))
        status = 0
    except BaseException:  # noqa: BLE001  # a worker never returns into the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    """Serve until the input ends."""
    get_tokenizer()("loads its table before the fork")
    for line in sys.stdin:
        command = json.loads(line)
        answer = _start(command["start"]) if "start" in command else os.waitpid(command["wait"], 0)[1]
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
