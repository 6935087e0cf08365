"""Kill a process in mid-delivery and count what is left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.storage import owner_key
from llama_index_memory_tiers.testing import HashEmbedding

MESSAGES = 80
_USER, _SESSION = "kim", "errands"
_CLAIM_SECONDS = 0.3
_EMBEDDING_SECONDS = 0.1
_MOST_FLUSHES = 200
_REPEATED = 10


@dataclass(frozen=True, slots=True)
class Crash:
    """What was found after a kill and a restart.

    Args:
        acknowledged: Puts that had returned when the process died.
        waiting: Messages that the block had still to absorb then.
        found: Acknowledged messages that are in the log.
        doubled: Messages that are in the log more than once.
        recalled: Acknowledged messages that the block holds.
        recalled_twice: Messages that the block holds more than once.
        exit_code: Of the killed process.
    """

    acknowledged: int
    waiting: int
    found: int
    doubled: int
    recalled: int
    recalled_twice: int
    exit_code: int

    @property
    def lost(self) -> int:
        """Acknowledged messages that are missing in the log or in the block."""
        return (self.acknowledged - self.found) + (self.acknowledged - self.recalled)

    @property
    def twice(self) -> int:
        """Messages that stand more than once in the log or in the block."""
        return self.doubled + self.recalled_twice


class _SlowEmbedding(HashEmbedding):
    """As slow as a model behind a network, and it tells when it begins: the moment to be killed."""

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        _tell("embedding")
        await asyncio.sleep(_EMBEDDING_SECONDS)
        return self._get_text_embeddings(texts)


def _tell(line: str) -> None:
    # Past all buffers: what the parent has not read was not acknowledged.
    os.write(1, f"{line}\n".encode())


def _memory(storage: Storage, embed_model: HashEmbedding) -> TieredMemory:
    return TieredMemory.from_defaults(
        storage=storage,
        user_id=_USER,
        session_id=_SESSION,
        token_limit=1500,
        chat_history_token_ratio=0.3,
        memory_blocks=[VectorMemoryBlock(name="Recall", embed_model=embed_model, priority=1)],
        claim_seconds=_CLAIM_SECONDS,
    )


async def _put(memory: TieredMemory, number: int) -> None:
    role = MessageRole.ASSISTANT if number % 2 else MessageRole.USER
    await memory.aput(ChatMessage(role=role, content=f"Errand number {number}."), uid=f"errand-{number}")


async def put_until_killed(database: Path) -> None:
    """The child: put messages and tell the number of each one that was acknowledged."""
    memory = _memory(Storage(database), _SlowEmbedding())
    for number in range(100 * MESSAGES):
        await _put(memory, number)
        _tell(str(number))


async def kill_in_delivery(command: Sequence[str], *, after: int) -> tuple[list[int], int]:
    """Start a child and kill it while it embeds.

    Args:
        command: Starts the child.
        after: Acknowledged puts to wait for.

    Returns:
        The numbers that were acknowledged, and the exit code.

    Raises:
        RuntimeError: The child ended before it was killed.
    """
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None  # noqa: S101  # a pipe, as asked
    acknowledged: list[int] = []
    killed = False
    async for line in child.stdout:
        if line.strip() != b"embedding":
            acknowledged.append(int(line))
        elif len(acknowledged) >= after:
            child.kill()
            killed = True
            break
    # What stood in the pipe had been acknowledged too; a line that was cut off had not.
    rest = (await child.stdout.read()).split(b"\n")[:-1]
    acknowledged += [int(line) for line in rest if line != b"embedding"]
    exit_code = await child.wait()
    if not killed:
        raise RuntimeError(f"The process that was to be killed ended by itself, with {exit_code}.")
    return acknowledged, exit_code


async def crash(folder: Path, *, after: int = MESSAGES) -> Crash:
    """Kill a process, start again, and count.

    Args:
        folder: For the database.
        after: Acknowledged puts before the kill; default 80.

    Returns:
        What was found.
    """
    database = folder / "crash.db"
    command = [sys.executable, "-m", "llama_index_memory_tiers.demo", "--act", "put", "--database", str(database)]
    acknowledged, exit_code = await kill_in_delivery(command, after=after)
    async with Storage(database) as storage:
        waiting = len(acknowledged) - sum((await _records(storage)).values())
        memory = _memory(storage, HashEmbedding())
        # A client that does not know what became of its last puts repeats them, and goes on.
        for number in range(max(0, len(acknowledged) - _REPEATED), len(acknowledged) + _REPEATED):
            await _put(memory, number)
        await _absorb_all(memory)
        log = Counter(stored.id for stored in await memory.amessages())
        records = await _records(storage)
        places = {stored.id: stored.place for stored in await memory.amessages()}
        await memory.aclose()
    wanted = [f"errand-{number}" for number in acknowledged]
    return Crash(
        acknowledged=len(acknowledged),
        waiting=max(0, waiting),
        found=sum(name in log for name in wanted),
        doubled=sum(times > 1 for times in log.values()),
        recalled=sum(places.get(name) in records for name in wanted),
        recalled_twice=sum(times > 1 for times in records.values()),
        exit_code=exit_code,
    )


async def _absorb_all(memory: TieredMemory) -> None:
    """Flush until nothing waits: the dead process's claim has to run out first."""
    for _ in range(_MOST_FLUSHES):
        if (await memory.aflush()).complete:
            return
        await asyncio.sleep(_CLAIM_SECONDS / 4)


async def _records(storage: Storage) -> Counter[Any]:
    """How often the block holds each place of the log."""
    owner = owner_key(Scope(_SESSION, _USER), 0)
    records = await storage.records.records(owner, kinds=["message"])
    return Counter(place for record in records for place in record.sources)
