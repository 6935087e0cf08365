"""A process that talks to a heat block and is killed at a failpoint; imported once and forked for each kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from typing import Any

import aiosqlite  # noqa: F401  # imported before the fork
from heat_doubles import TOPICS, Analyst, block, note, said
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers import Storage, TieredMemory, failpoints

PAIRS = [*TOPICS["cat"], *TOPICS["train"]]
LEARNT = note("Ann's cat Tom weighs six kilos.", subject="Tom", relation="weighs", value="six kilos")


def memory_of(storage: Storage) -> TieredMemory:
    """A memory whose block files every second pair, and analyses what is hot."""
    heat = block(Analyst(knowledge=LEARNT), short_term_capacity=0, absorb_every=2, mid_term_heat_threshold=3.0)
    return TieredMemory(
        storage=storage, user_id="ann", session_id="s", memory_blocks=[heat], delivery="inline", claim_seconds=0.05
    )


async def talk(job: dict[str, Any]) -> None:
    """Say what was not said yet; ends where the job says."""
    left = job["nth"]

    def reached(name: str) -> None:
        nonlocal left
        left -= name == job["failpoint"]
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async with Storage(job["path"]) as storage:
        chat = memory_of(storage)
        first = len(await chat.amessages()) // 2
        with failpoints.armed(reached):
            for asked, answered in PAIRS[first:]:
                await chat.aput_messages([said("user", asked), said("assistant", answered)])


def main() -> None:
    """Fork for each line of JSON, and answer how the child ended."""
    get_tokenizer()("loads its table before the fork")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(talk(json.loads(line)))
            except BaseException:  # noqa: BLE001  # a child never returns into the parent's code
                traceback.print_exc()
            finally:
                os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
