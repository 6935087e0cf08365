"""The database may be restarted, or fall dead, at any moment: no put is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
from doubles import (
    RecordingBlock,
    absorb_all,
    assert_in_order,
    assert_once,
    assert_tiled,
    heads,
    rows,
    said,
    told,
)
from running import SOAK, PostgresServer

from llama_index_memory_tiers import Storage, TieredMemory
from llama_index_memory_tiers.errors import StorageUnavailableError

SESSIONS = ("left", "right")
WRITERS = 10  # per session
PUTS = 250 if SOAK else 10  # per writer
FIRST_RESTARTS = ("immediate", "fast")


@pytest.fixture
def durable_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """A server that answers a commit when it is kept, as one in production does."""
    postgres_server.psql("ALTER DATABASE postgres SET synchronous_commit = on;")
    yield postgres_server
    postgres_server.psql("ALTER DATABASE postgres RESET synchronous_commit;")


class Chaos:
    """Writers on two hosts, and how far they have come."""

    def __init__(self, hosts: list[Storage]) -> None:
        self.acknowledged: list[str] = []
        self.repeated = 0
        self.memories = [
            TieredMemory(
                storage=host,
                user_id="ada",
                session_id=session,
                memory_blocks=[RecordingBlock()],
                claim_seconds=0.2,
                window_messages=20,
            )
            for session in SESSIONS
            for host in hosts
        ]

    async def write(self, memory: TieredMemory, writer: str) -> None:
        for number in range(PUTS):
            content = f"{writer}/{number}"
            message = said("assistant" if number % 2 else "user", content)
            while True:
                try:
                    await memory.aput(message, uid=content)
                    break
                except StorageUnavailableError:
                    self.repeated += 1  # stored or not, nobody knows: the same id settles it
            self.acknowledged.append(content)

    async def run(self, server: PostgresServer) -> int:
        """Let all write while the server is restarted again and again; how often it was."""
        jobs = [
            asyncio.ensure_future(self.write(memory, f"{memory.session_id}-{host}-{task}"))
            for host, memory in enumerate(self.memories)
            for task in range(WRITERS // 2)
        ]
        dice, restarts, all_puts = random.Random(5), 0, len(jobs) * PUTS
        while not all(job.done() for job in jobs):
            due = len(self.acknowledged) >= (restarts + 1) * all_puts / (len(FIRST_RESTARTS) + 1)
            if restarts < len(FIRST_RESTARTS) and (due or SOAK):
                mode = FIRST_RESTARTS[restarts]
            elif SOAK:
                mode = dice.choice(FIRST_RESTARTS)
            else:
                await asyncio.wait(jobs, timeout=0.01)
                continue
            await asyncio.to_thread(server.restart, mode)
            restarts += 1
            await asyncio.wait(jobs, timeout=dice.uniform(0.2, 3) if SOAK else 0)
        await asyncio.gather(*jobs)
        return restarts


async def test_no_restart_of_the_database_loses_doubles_or_reorders_anything(
    durable_server: PostgresServer, make_storage: Callable[..., Storage]
) -> None:
    hosts = [await make_storage("postgres").aopen() for _ in range(2)]
    chaos = Chaos(hosts)
    restarts = await chaos.run(durable_server)
    assert restarts >= len(FIRST_RESTARTS)

    wanted = [
        f"{memory.session_id}-{host}-{task}/{number}"
        for host, memory in enumerate(chaos.memories)
        for task in range(WRITERS // 2)
        for number in range(PUTS)
    ]
    assert_once(chaos.acknowledged, wanted)
    stored = {session: [] for session in SESSIONS}
    for session, memory in zip(SESSIONS, chaos.memories[::2], strict=True):
        messages = await memory.amessages()
        assert [message.seq for message in messages] == list(range(1, len(messages) + 1))
        stored[session] = [message.message.content or "" for message in messages]
        assert_in_order(stored[session])
        await absorb_all(memory)
    assert_once([text for texts in stored.values() for text in texts], wanted)

    heard = await told(hosts[0])
    assert_once(heard.texts, wanted)
    for session in SESSIONS:
        assert [text for text in heard.texts if text.startswith(f"{session}-")] == stored[session]
    assert_tiled(heard.ranges, await heads(hosts[0]))
    sums = await rows(
        hosts[0],
        "SELECT active_tokens, (SELECT SUM(tokens) FROM {t}_messages m WHERE m.sid = s.sid AND status = 'active') "
        "AS tokens FROM {t}_sessions s",
    )
    assert [row.active_tokens for row in sums] == [row.tokens for row in sums]
    for memory in chaos.memories:
        await memory.aclose()
    print(f"{len(wanted)} puts, {restarts} restarts, {chaos.repeated} repeated by their writer")  # noqa: T201  # for the soak
