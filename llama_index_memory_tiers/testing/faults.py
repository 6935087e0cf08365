"""The fault matrix: a fixed piece of work, one fault at one failpoint, and what must be there afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.errors import MemoryTiersError, StorageUnavailableError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.testing.chores import CLAIM_SECONDS, WORK, Model, compare, do, is_there, memory_of

Fault = Literal["exception", "cancellation", "kill", "gone", "lost reply"]
"""What goes wrong: something raises; the caller is cancelled; the process is killed; the database is gone until the
storage is opened anew; the database does the next commit and its reply gets lost."""
FAULTS: tuple[Fault, ...] = get_args(Fault)

MakeStorage = Callable[[], Storage]

_LATE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class FaultCase:
    """One cell of the matrix.

    Args:
        failpoint: One of `failpoints.FAILPOINTS`.
        fault: What happens there.
        nth: At which time that it is reached, from 1.
    """

    failpoint: str
    fault: Fault
    nth: int = 1


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What a case showed.

    Args:
        fired: Whether the failpoint was reached so often.
        problems: What is not as it must be, in words; empty when all is well.
    """

    fired: bool
    problems: tuple[str, ...] = ()


# --- faults -----------------------------------------------------------------------------------------------------


class _InjectedError(Exception):
    """What a failpoint raises."""


class _Trap:
    """Springs at one failpoint, once, and stays gone when the database shall."""

    def __init__(self, case: FaultCase, cancel: Callable[[], None]) -> None:
        self._case = case
        self._cancel = cancel
        self._left = case.nth
        self._losing = False
        self.fired = False

    def __call__(self, name: str) -> None:
        if self.fired and self._case.fault == "gone":
            raise _unavailable()
        if self._losing and name == "transaction.committed":
            self._losing = False
            raise ConnectionResetError("the reply got lost")
        if self.fired or name != self._case.failpoint:
            return
        self._left -= 1
        if self._left == 0:
            self.fired = True
            self._spring(name)

    def _spring(self, name: str) -> None:
        fault = self._case.fault
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "gone":
            raise _unavailable()
        if fault == "exception":
            raise _InjectedError(name)
        if fault == "cancellation":
            self._cancel()
        elif name == "transaction.committed":
            raise ConnectionResetError("the reply got lost")
        else:
            self._losing = True


def _unavailable() -> StorageUnavailableError:
    return StorageUnavailableError(
        "The database is gone.", allowed="It must be reachable.", remedy="Wait until it is back."
    )


@contextlib.contextmanager
def _trapped(case: FaultCase) -> Iterator[_Trap]:
    """Arm a failpoint for the running task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101  # a coroutine runs in a task

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    trap = _Trap(case, cancel)
    with failpoints.armed(trap):
        yield trap


# --- the matrix -------------------------------------------------------------------------------------------------


class FaultMatrix:
    """Runs cases on a database of yours; each uses a user of its own in it.

    Args:
        make_storage: Opens your database anew, as another start of your program would.
    """

    def __init__(self, make_storage: MakeStorage) -> None:
        self._make_storage = make_storage
        self._number = 0
        self._killed: _Killable | None = None

    async def reaches(self) -> Counter[str]:
        """How often the work reaches each failpoint when nothing goes wrong."""
        found: Counter[str] = Counter()
        storage = await self._make_storage().aopen()
        with failpoints.armed(lambda name: found.update([name])):
            memory = memory_of(storage, self._user())
            for step in WORK:
                await do(memory, step)
        await storage.aclose()
        return found

    async def run(self, case: FaultCase) -> FaultOutcome:
        """Do the work with one fault in it, start again, finish it, and compare.

        Args:
            case: Which fault, and where.

        Returns:
            What is not as it must be.
        """
        user, problems = self._user(), list[str]()
        if case.fault == "kill":
            done, fired = await asyncio.to_thread(self._kill, case, user)
        else:
            done, fired = await asyncio.create_task(self._spoil(case, user, problems))
        storage = await self._make_storage().aopen()
        try:
            memory = memory_of(storage, user)
            noted = fired and case.failpoint.startswith("forget.")
            problems += await self._finish(memory, done, noted=noted)
            await memory.aclose()
        finally:
            await storage.aclose()
        return FaultOutcome(fired, tuple(problems))

    def close(self) -> None:
        """End the process that is killed."""
        if self._killed is not None:
            self._killed.close()
            self._killed = None

    def _user(self) -> str:
        self._number += 1
        return f"fault-{os.getpid()}-{self._number}"

    def _kill(self, case: FaultCase, user: str) -> tuple[int, bool]:
        if self._killed is None:
            self._killed = _Killable()
        return self._killed.run(case, self._make_storage(), user)

    async def _spoil(self, case: FaultCase, user: str, problems: list[str]) -> tuple[int, bool]:
        """Do the work until the fault stops it; how many steps were done."""
        done = 0
        storage = self._make_storage()
        memory = memory_of(storage, user)
        with _trapped(case) as trap:
            try:
                await storage.aopen()
                for step in WORK:
                    receipt = await do(memory, step)
                    done += 1
                    if receipt is not None and receipt.complete and await is_there(memory, step.uids):
                        problems.append("a receipt says that it is complete, and the text is there")
                await asyncio.sleep(_LATE_SECONDS)  # a cancellation from another thread may be on its way
            except (_InjectedError, asyncio.CancelledError, MemoryTiersError):
                if not trap.fired:
                    raise
        await memory.aclose()
        await storage.aclose()
        return done, trap.fired

    async def _finish(self, memory: TieredMemory, done: int, *, noted: bool) -> list[str]:
        model = Model()
        problems = []
        step = WORK[min(done, len(WORK) - 1)]
        if noted and step.act == "forget" and await is_there(memory, step.uids):
            problems.append("the start has not finished what was to be forgotten")
        for at, step in enumerate(WORK):
            if at >= done:  # the first of them may have been done all the same
                receipt = await do(memory, step)
                if receipt is not None and not receipt.complete:
                    problems.append(f"after the restart a receipt is incomplete: {receipt.pending}")
            model.done(step)
        for _ in range(100):
            if (await memory.aflush()).complete:
                break
            await asyncio.sleep(CLAIM_SECONDS)
        else:
            problems.append("blocks never absorbed everything")
        return [*problems, *await compare(memory, model)]


# --- a process to be killed -------------------------------------------------------------------------------------


class _Killable:
    """A process that imports everything once and forks another for each case."""

    def __init__(self) -> None:
        self._acks = tempfile.TemporaryDirectory(prefix="memory-tiers-faults-")
        self._server = subprocess.Popen(  # noqa: S603  # this module itself
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: FaultCase, storage: Storage, user: str) -> tuple[int, bool]:
        """Do the work in a process that dies; how many steps it had acknowledged, and whether it died."""
        acks = Path(self._acks.name) / user
        job = {
            "address": storage._address.url.render_as_string(hide_password=False),  # noqa: SLF001  # with its password
            "table_name": storage.table_name,
            "db_schema": storage.db_schema,
            "user": user,
            "acks": str(acks),
            "failpoint": case.failpoint,
            "nth": case.nth,
        }
        assert self._server.stdin is not None  # noqa: S101  # they are pipes
        assert self._server.stdout is not None  # noqa: S101  # they are pipes
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        status = os.waitstatus_to_exitcode(int(self._server.stdout.readline()))
        return len(acks.read_bytes()) if acks.exists() else 0, status == -signal.SIGKILL

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
        self._acks.cleanup()


async def _work(job: dict[str, Any]) -> None:
    acks = os.open(job["acks"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with _trapped(FaultCase(job["failpoint"], "kill", job["nth"])):
        storage = Storage(job["address"], table_name=job["table_name"], db_schema=job["db_schema"])
        memory = memory_of(await storage.aopen(), job["user"])
        for step in WORK:
            await do(memory, step)
            os.write(acks, b".")
        await storage.aclose()


def _start(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        os.dup2(2, 1)  # the answers' pipe belongs to the parent
        asyncio.run(_work(job))
        status = 0
    except BaseException:  # noqa: BLE001  # a child never returns into the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _serve() -> None:
    get_tokenizer()("loads its table before the fork")
    for driver in ("aiosqlite", "asyncpg"):
        with contextlib.suppress(ImportError):
            importlib.import_module(driver)
    for line in sys.stdin:
        sys.stdout.write(f"{_start(json.loads(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
