"""A process may be killed while topics are filed and analysed: no page is lost, none is in two segments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children.heat import PAIRS, memory_of, said
from doubles import until
from heat_doubles import reader
from running import SOAK

from llama_index_memory_tiers import Storage, TieredMemory
from llama_index_memory_tiers.failpoints import FAILPOINTS

BOUNDARIES = [name for name in FAILPOINTS if name.split(".")[0] in {"transaction", "put", "prepare", "merge"}]
TIMES = (1, 2, 3, 4) if SOAK else (2,)
TESTS = Path(__file__).parent.parent

Kill = Callable[[Path, str, int], int]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    server = subprocess.Popen(  # our own script
        [sys.executable, "-W", "ignore", TESTS / "children" / "heat.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    asked, answered = server.stdin, server.stdout

    def at(path: Path, failpoint: str, nth: int) -> int:
        asked.write(json.dumps({"path": str(path), "failpoint": failpoint, "nth": nth}) + "\n")
        asked.flush()
        return int(answered.readline())

    yield at
    server.communicate()


async def finish(chat: TieredMemory) -> None:
    """Say the rest, and wait until all is filed; a dead worker's claim has to run out first."""
    for asked, answered in PAIRS[len(await chat.amessages()) // 2 :]:
        await chat.aput_messages([said("user", asked), said("assistant", answered)])

    async def done() -> bool:
        return (await chat.aflush()).complete

    await until(done, what="everything absorbed")


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_no_kill_loses_a_page_or_files_it_twice(kill: Kill, tmp_path: Path, boundary: str) -> None:
    for nth in TIMES:
        path = tmp_path / f"{nth}.db"
        assert kill(path, boundary, nth) == -signal.SIGKILL
        assert kill(path, boundary, 1) == -signal.SIGKILL  # and again while it goes on
        await check(path)


async def check(path: Path) -> None:
    """Finish, and look at every page and segment."""
    async with Storage(path) as storage:
        await finish(memory_of(storage))
        own = reader(storage)
        pages = await own.by_ids([page.id for page in await own.light("page")])
        places = Counter(place for page in pages for place in page.sources)
        assert sorted(seq for _, seq in places) == list(range(1, 2 * len(PAIRS) + 1))
        assert set(places.values()) == {1}
        segments = {record.id: record.data for record in await own.light("segment")}
        assert Counter(page.parent for page in pages) == {one: data["pages"] for one, data in segments.items()}
        assert {page.data["chain"] for page in pages} <= {page.id for page in pages}
        numbers = sorted((page.parent or "", page.data["n"]) for page in pages)
        assert len(set(numbers)) == len(pages)
        assert any(data["analysed"] for data in segments.values())
        assert [record.data["version"] for record in await own.history("profile")] == list(
            range(1, len(await own.history("profile")) + 1)
        )
        assert len(await own.light("fact")) == len(await own.light("profile")) == 1
