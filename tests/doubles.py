"""Blocks that write down what reaches them, and what the tests count them with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from pydantic import Field
from sqlalchemy import text

from llama_index_memory_tiers import Storage, TieredMemory, TieredMemoryBlock
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.errors import MemoryTiersError
from llama_index_memory_tiers.events import dispatcher
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Reads, Record
from llama_index_memory_tiers.storage import OwnerReader

HEARD = "heard"
RANGE = "range"


def said(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=MessageRole(role), content=content)


def user(content: str) -> ChatMessage:
    return said("user", content)


def answer(content: str) -> ChatMessage:
    return said("assistant", content)


def turn(number: int) -> list[ChatMessage]:
    """A complete turn."""
    return [said("user", f"question {number}"), said("assistant", f"answer {number}")]


def unclear_parts(error: MemoryTiersError) -> list[str]:
    """Parts of an error that are no sentence, or missing in what is printed."""
    parts = (error.given, error.allowed, error.remedy)
    ends = (".", "…")
    return [
        part
        for part in parts
        # A command to be copied has no full stop.
        if len(part) <= 10 or not (part.endswith(ends) or part.startswith("Run: ")) or part not in str(error)
    ]


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class RecordingBlock(TieredMemoryBlock):
    """Writes one record per message and one per batch, under ids made anew each time: a double shows."""

    name: str = "Recorder"
    on_prepare: Callable[[Batch], Awaitable[None] | None] | None = Field(default=None, exclude=True)
    batches: list[list[str]] = Field(default_factory=list, exclude=True)

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Batch:
        self.batches.append([shown(stored.message) for stored in batch.messages])
        if self.on_prepare is not None:
            waiting = self.on_prepare(batch)
            if waiting is not None:
                await waiting
        return batch

    def merge(self, draft: Batch, records: Sequence[Record]) -> Changes:
        heard = [
            NewRecord(
                id=str(uuid.uuid4()),
                kind=HEARD,
                text=shown(stored.message),
                data={"uid": stored.id, "session": stored.session_id},
                sources=(stored.place,),
            )
            for stored in draft.messages
        ]
        span = NewRecord(
            id=str(uuid.uuid4()),
            kind=RANGE,
            data={"session": draft.scope.session_id, "lo": draft.lo, "hi": draft.hi},
        )
        return Changes(add=(*heard, span))

    async def recall(self, query: Any, reader: OwnerReader) -> Sequence[Item]:
        return []


class ModelRecordingBlock(RecordingBlock):
    """A recording block whose every batch costs a model call."""

    uses_model: ClassVar[bool] = True


class NewestBlock(TieredMemoryBlock):
    """Keeps the newest few messages of a user, whatever session they come from; the rest it puts aside."""

    name: str = "Newest"
    keep: int = 70  # more than a batch

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Batch:
        return batch

    def reads(self, draft: Batch) -> Reads:
        return Reads(kinds=(HEARD,))

    def merge(self, draft: Batch, records: Sequence[Record]) -> Changes:
        new = [
            NewRecord(id=str(uuid.uuid4()), kind=HEARD, text=shown(stored.message), sources=(stored.place,))
            for stored in draft.messages
        ]
        surplus = len(records) + len(new) - self.keep
        return Changes(add=tuple(new), archive=tuple(record.id for record in records[: max(0, surplus)]))

    async def recall(self, query: Any, reader: OwnerReader) -> Sequence[Item]:
        return [Item(record.text) for record in await reader.records(HEARD)]


class ListeningBlock(BaseMemoryBlock[str]):
    """A third-party block that knows nothing of us: keeps what it is given in RAM."""

    name: str = "Listener"
    given: list[tuple[str | None, list[ChatMessage]]] = Field(default_factory=list)
    refuse: int = 0

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        return ""

    async def _aput(self, messages: list[ChatMessage]) -> None:
        raise NotImplementedError

    async def aput(
        self, messages: list[ChatMessage], from_short_term_memory: bool = False, session_id: str | None = None
    ) -> None:
        self.given.append((session_id, messages))
        if self.refuse:
            self.refuse -= 1
            raise ValueError("not now")


class BadContentError(Exception):
    """What a block raises when a message itself is at fault."""


def refuse_content(*words: str) -> Callable[[Batch], None]:
    """An `on_prepare` that fails for every batch with one of these words in it."""

    def check(batch: Batch) -> None:
        if any(word in shown(stored.message) for stored in batch.messages for word in words):
            raise BadContentError("unreadable")

    return check


@dataclass
class Outage:
    """An `on_prepare` whose model cannot be reached while it is down."""

    down: bool = True
    calls: int = 0

    def __call__(self, batch: Batch) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionError("no route to the model")


@dataclass
class Gate:
    """An `on_prepare` that holds every batch until it is opened."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    passed: int = 0

    async def __call__(self, batch: Batch) -> None:
        self.entered.set()
        await self.opened.wait()
        self.passed += 1


# --- looking at what was written ------------------------------------------------------------------------------


def shown(message: ChatMessage) -> str:
    """A message as one string that tells it from all others of a test."""
    return message.content or json.dumps(message.model_dump(mode="json"), sort_keys=True)


async def until(condition: Callable[[], Awaitable[bool] | bool], *, what: str) -> None:
    """Let the loop run until something holds; five seconds are for a machine that stands still."""
    for _ in range(1000):
        holds = condition()
        if await holds if not isinstance(holds, bool) else holds:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never came: {what}")


async def rows(storage: Storage, query: str, **values: Any) -> list[Any]:
    """Read rows past the package; `{t}` stands for the prefix of the tables."""
    prefix = f'"{storage.db_schema}".{storage.table_name}' if storage.db_schema else storage.table_name

    async def work(connection: Any) -> list[Any]:
        return list(await connection.execute(text(query.format(t=prefix)), values))

    return await storage._database.read(work)


@dataclass(frozen=True)
class Told:
    """What a block wrote down.

    Args:
        texts: Of every record, in the order of writing.
        uids: Of the messages.
        ranges: (session, lo, hi) of every batch.
    """

    texts: list[str]
    uids: list[str]
    ranges: list[tuple[str, int, int]]


async def told(storage: Storage, block: str = "Recorder") -> Told:
    """Everything that a recording block wrote, of all owners, in order."""
    found = await rows(
        storage, "SELECT kind, text, data FROM {t}_records WHERE block = :block ORDER BY id", block=block
    )
    heard = [row for row in found if row.kind == HEARD]
    spans = [json.loads(row.data) for row in found if row.kind == RANGE]
    return Told(
        texts=[row.text for row in heard],
        uids=[json.loads(row.data)["uid"] for row in heard],
        ranges=[(span["session"], span["lo"], span["hi"]) for span in spans],
    )


def assert_tiled(ranges: Iterable[tuple[str, int, int]], heads: dict[str, int]) -> None:
    """Check that the ranges of each session follow each other from 0 to its head, without gap or overlap."""
    ends: dict[str, int] = dict.fromkeys(heads, 0)
    for session, lo, hi in ranges:
        assert lo == ends[session], f"{session}: a range begins at {lo}, the one before ended at {ends[session]}"
        assert hi > lo
        ends[session] = hi
    assert ends == heads


def assert_once(found: Iterable[str], wanted: Iterable[str]) -> None:
    """Check that each wanted text is there exactly once, and nothing else."""
    counted, expected = Counter(found), Counter(wanted)
    assert not expected - counted, f"lost: {sorted((expected - counted).elements())[:10]}"
    assert not counted - expected, f"doubled or invented: {sorted((counted - expected).elements())[:10]}"


def assert_in_order(found: Sequence[str]) -> None:
    """Check that each writer's numbers rise: texts read `<writer>/<number> …`."""
    newest: dict[str, int] = {}
    for content in found:
        writer, _, rest = content.partition("/")
        number = int(rest.split()[0])
        assert number > newest.get(writer, -1), f"{writer}: {number} after {newest[writer]}"
        newest[writer] = number


async def heads(storage: Storage) -> dict[str, int]:
    """Newest sequence number of each session."""
    found = await rows(storage, "SELECT session_id, head_seq FROM {t}_sessions")
    return {row.session_id: row.head_seq for row in found}


async def absorb_all(memory: TieredMemory, *, most: int = 200) -> int:
    """Flush until nothing waits.

    Returns:
        How many calls it took.
    """
    for calls in range(1, most + 1):
        report = await memory.aflush()
        if report.complete:
            return calls
        await asyncio.sleep(0.01)
    raise AssertionError(f"still waiting after {most} flushes:\n{report}")


_MARK = re.compile(r"mark\d{4}z")


def mark(number: int) -> str:
    """What stands in every text of one owner."""
    return f"mark{number:04d}z"


def marks_in(*values: Any) -> set[str]:
    """Whose text stands anywhere in what was returned."""
    return {found for value in values for found in _MARK.findall(repr(value))}


class _Handler(BaseEventHandler):
    hear: Callable[[BaseEvent], None]

    @classmethod
    def class_name(cls) -> str:
        return "Handler"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.hear(event)


@contextlib.contextmanager
def hearing(kind: type[BaseEvent], read: Callable[[Any], Any] = lambda event: event) -> Iterator[list[Any]]:
    """Every event of ours of a kind, as it comes.

    Args:
        kind: Which.
        read: What is kept of each; default: all of it.
    """
    found: list[Any] = []
    handler = _Handler(hear=lambda event: found.append(read(event)) if isinstance(event, kind) else None)
    dispatcher.add_event_handler(handler)
    try:
        yield found
    finally:
        dispatcher.event_handlers.remove(handler)


# --- other processes ------------------------------------------------------------------------------------------


class Workers:
    """The process of `children/workers.py`: starts, kills and awaits workers that put messages."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self._server = subprocess.Popen(
            [sys.executable, here / "children" / "workers.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
            text=True,
        )

    def start(self, acks: Path, **job: Any) -> int:
        """Start a worker; see `children/workers.py`."""
        defaults = {
            "schema": None, "connections": 3, "user": "ada", "session": "chat", "first": 0, "newest": False,
            "delivery": "background", "claim_seconds": 5.0, "window": 20, "dies_at_statement": 0,
        }  # fmt: skip
        return self._ask({"start": {**defaults, **job, "acks": str(acks)}})

    def wait(self, pid: int) -> int:
        """Wait for a worker; its exit status, negative for the signal that ended it."""
        return os.waitstatus_to_exitcode(self._ask({"wait": pid}))

    async def stall(self, pid: int, seconds: float) -> None:
        """Let a worker stand still, as a suspended host does: others take over, then it goes on."""
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def kill(self, pid: int) -> int:
        """End a worker as a crash would, wherever it is."""
        os.kill(pid, signal.SIGKILL)
        return self.wait(pid)

    def _ask(self, command: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._server.communicate()


def acknowledged(acks: Path) -> list[str]:
    """What workers wrote down as put, in order; each line is one write, so that a crash cuts none."""
    return acks.read_text().splitlines() if acks.exists() else []
