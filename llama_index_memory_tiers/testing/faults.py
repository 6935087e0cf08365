"""The fault matrix: a fixed piece of work, one fault at one failpoint, and what must be there afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.blocks import TieredMemoryBlock, VectorMemoryBlock
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.errors import MemoryTiersError, StorageUnavailableError
from llama_index_memory_tiers.events import ForgetReceipt
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Record
from llama_index_memory_tiers.storage import OwnerReader, Storage
from llama_index_memory_tiers.storage.selection import ForgetFilter

Fault = Literal["exception", "cancellation", "kill", "gone", "lost reply"]
"""What goes wrong: something raises; the caller is cancelled; the process is killed; the database is gone until the
storage is opened anew; the database does the next commit and its reply gets lost."""
FAULTS: tuple[Fault, ...] = get_args(Fault)

MakeStorage = Callable[[], Storage]

_SECRET = "quetzal"  # noqa: S105  # a word to look for, not a password
_CLAIM_SECONDS = 0.05
_LATE_SECONDS = 0.01
_WITNESSED = "witnessed"


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


class WitnessBlock(TieredMemoryBlock):
    """Writes one record per message, under an id made anew each time, so that a double shows."""

    name: str = "Witness"

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Batch:  # noqa: ARG002
        """Take the batch as it is."""
        return batch

    def merge(self, draft: Batch, records: Sequence[Record]) -> Changes:  # noqa: ARG002
        """Write down what was heard."""
        return Changes(
            add=tuple(
                NewRecord(
                    id=f"{os.urandom(8).hex()}-{stored.id}",
                    kind=_WITNESSED,
                    text=stored.text,
                    data={"uid": stored.id, "session": stored.session_id},
                    sources=(stored.place,),
                )
                for stored in draft.messages
            )
        )

    async def recall(self, query: Any, reader: OwnerReader) -> Sequence[Item]:  # noqa: ARG002
        """Offer everything that was heard."""
        return [Item(record.text) for record in await reader.records(_WITNESSED)]


# --- the work ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """One call, safe to repeat.

    Args:
        act: `put`, `get`, `flush` or `forget`.
        session: In which session.
        uids: Messages that it puts, or that are gone after it.
    """

    act: Literal["put", "get", "flush", "forget"]
    session: str = "chat"
    uids: tuple[str, ...] = ()
    how: str = ""

    def text(self, uid: str) -> str:
        """What a message says."""
        return f"{_SECRET} {uid}." if uid.startswith("s") else f"note {uid}."


_WORK: tuple[_Step, ...] = (
    _Step("put", uids=("q1", "a1")),
    _Step("put", uids=("s1",)),
    _Step("put", uids=("a2",)),
    _Step("get"),
    _Step("put", session="aside", uids=("s2", "b1")),
    _Step("put", uids=("q3", "a3")),
    _Step("forget", uids=("s1",), how="ids"),
    _Step("put", uids=("s3",)),
    _Step("put", uids=("a4",)),
    _Step("get"),
    _Step("forget", uids=("s3",), how="filter"),
    _Step("forget", session="aside", uids=("s2", "b1"), how="session"),
    _Step("flush"),
)


@dataclass(slots=True)
class _Model:
    """What must be there: a list per session, in plain Python."""

    messages: dict[str, list[str]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def done(self, step: _Step) -> None:
        if step.act == "put":
            self.messages.setdefault(step.session, []).extend(step.uids)
        elif step.act == "forget":
            self.gone.update(step.uids)

    def left(self, session: str) -> list[str]:
        return [uid for uid in self.messages.get(session, ()) if uid not in self.gone]


def _memory(storage: Storage, user_id: str) -> TieredMemory:
    return TieredMemory(
        storage=storage,
        user_id=user_id,
        session_id="chat",
        memory_blocks=[WitnessBlock(), VectorMemoryBlock(embed_model=None)],
        delivery="inline",
        claim_seconds=_CLAIM_SECONDS,
        window_messages=4,
    )


async def _do(memory: TieredMemory, step: _Step) -> ForgetReceipt | None:
    mine = memory if step.session == memory.session_id else memory.for_session(step.session)
    if step.act == "put":
        roles = [MessageRole.ASSISTANT if uid[0] in "ab" else MessageRole.USER for uid in step.uids]
        messages = [ChatMessage(role=role, content=step.text(uid)) for role, uid in zip(roles, step.uids, strict=True)]
        await mine.aput_messages(messages, uids=step.uids)
    elif step.act == "get":
        await mine.aget("note q1")
    elif step.act == "flush":
        await mine.aflush()
    elif step.how == "ids":
        return await mine.aforget(ids=step.uids)
    elif step.how == "filter":
        return await mine.aforget(scope="session", filter=ForgetFilter(contains=_SECRET.upper()))
    else:
        return await mine.aforget(scope="session")
    return None


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
    return StorageUnavailableError("The database is gone.", allowed="It must be reachable.", remedy="Wait.")


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
            memory = _memory(storage, self._user())
            for step in _WORK:
                await _do(memory, step)
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
            memory = _memory(storage, user)
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
        memory = _memory(storage, user)
        with _trapped(case) as trap:
            try:
                await storage.aopen()
                for step in _WORK:
                    receipt = await _do(memory, step)
                    done += 1
                    if receipt is not None and receipt.complete and await _is_there(memory, step.uids):
                        problems.append("a receipt says that it is complete, and the text is there")
                await asyncio.sleep(_LATE_SECONDS)  # a cancellation from another thread may be on its way
            except (_InjectedError, asyncio.CancelledError, MemoryTiersError):
                if not trap.fired:
                    raise
        await memory.aclose()
        await storage.aclose()
        return done, trap.fired

    async def _finish(self, memory: TieredMemory, done: int, *, noted: bool) -> list[str]:
        model = _Model()
        problems = []
        step = _WORK[min(done, len(_WORK) - 1)]
        if noted and step.act == "forget" and await _is_there(memory, step.uids):
            problems.append("the start has not finished what was to be forgotten")
        for at, step in enumerate(_WORK):
            if at >= done:  # the first of them may have been done all the same
                receipt = await _do(memory, step)
                if receipt is not None and not receipt.complete:
                    problems.append(f"after the restart a receipt is incomplete: {receipt.pending}")
            model.done(step)
        for _ in range(100):
            if (await memory.aflush()).complete:
                break
            await asyncio.sleep(_CLAIM_SECONDS)
        else:
            problems.append("blocks never absorbed everything")
        return [*problems, *await _compare(memory, model)]


async def _is_there(memory: TieredMemory, uids: Sequence[str]) -> bool:
    stored = [one.id for each in ("chat", "aside") for one in await memory.for_session(each).amessages()]
    return any(uid in stored for uid in uids)


async def _compare(memory: TieredMemory, model: _Model) -> list[str]:
    """What is not as the model says."""
    stream = io.BytesIO()
    await memory.aexport(stream)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    heard = [line["record"] for line in lines if line.get("record", {}).get("kind") == _WITNESSED]
    problems = []
    if _SECRET in stream.getvalue().decode():
        problems.append("forgotten text is in the export")
    if _SECRET in repr(await memory.aget("what about the note?")):
        problems.append("forgotten text is in a context")
    for session in model.messages:
        wanted = model.left(session)
        mine = memory if session == memory.session_id else memory.for_session(session)
        stored = await mine.amessages()
        if [one.id for one in stored] != wanted:
            problems.append(f"{session} holds {[one.id for one in stored]}, not {wanted}")
        told = [json.loads(one["data"])["uid"] for one in heard if json.loads(one["data"])["session"] == session]
        if told != wanted:
            problems.append(f"a block was told {told} of {session}, not {wanted}")
        row = await memory.storage.log.session(memory.user_id or "", session)
        active = sum(one.tokens for one in stored if one.status.value == "active")
        if row is None or row.active_tokens != active:
            problems.append(f"the window of {session} has {active} tokens, its session says otherwise")
    return problems


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
        memory = _memory(await storage.aopen(), job["user"])
        for step in _WORK:
            await _do(memory, step)
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
