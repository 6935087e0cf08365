"""WorkingMemoryBlock: the notes, plan and results of a task, for as long as it is open."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from pydantic import Field
from typing_extensions import Self

from llama_index_memory_tiers.blocks.base import Query
from llama_index_memory_tiers.blocks.by_hand import HandWrittenBlock
from llama_index_memory_tiers.blocks.desk import Desk, Holder
from llama_index_memory_tiers.budget import Item
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Changes, NewRecord, Reads, Record
from llama_index_memory_tiers.storage import OwnerReader, codec
from llama_index_memory_tiers.text import escape

Sort = Literal["plan", "note", "result"]

_KIND = "working"
_MAX_CHARS = 4000
_MAX_ENTRIES = 200
_MAX_STEPS = 100

_Path = tuple[str, ...]
_INSIDE: ContextVar[Mapping[tuple[str, str], _Path]] = ContextVar("inside", default=MappingProxyType({}))
"""In which task the running code is, per owner and block: what is opened there is part of it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing written down.

    Args:
        sort: A step of the `plan`, a `note`, or a `result`.
        text: What.
        at: When, aware.
    """

    sort: Sort
    text: str
    at: datetime


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task that is open.

    Args:
        path: Its name, after those of the tasks that it is part of.
        entries: What was written down, in order.
        attempt: 1, and one more for each redo.
        opened_at: When it was opened, aware.
    """

    path: tuple[str, ...]
    entries: tuple[Entry, ...]
    attempt: int
    opened_at: datetime

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path[-1]

    def texts(self, sort: Sort) -> tuple[str, ...]:
        """What was written down of one sort, in order."""
        return tuple(entry.text for entry in self.entries if entry.sort == sort)


class WorkingMemoryBlock(HandWrittenBlock):
    """Keeps the notes, plan and results of a task and shows them while it is open; a confirmed task leaves nothing.

    Tasks are opened through `of(memory)`: `async with working.task("name") as task:`. Nothing is taken from the chat.

    Args:
        priority: Default 1: it claims its tokens before blocks that search.
        scope: A task belongs to the `session` that works on it (default), or to the `user` in all sessions.
        max_tokens: At most so much of all open tasks is shown, headings not counted: the plan of the newest task
            first, then its newest entries; default 1 000.
    """

    name: str = "WorkingMemory"
    priority: int = Field(default=1, ge=0)
    scope: Literal["user", "session"] = "session"
    max_tokens: int = Field(default=1000, ge=1)

    def of(self, memory: Holder) -> WorkingMemory:
        """The tasks of one memory, to be opened and written in.

        Args:
            memory: A `TieredMemory` that has this block.

        Returns:
            Its working memory.

        Raises:
            ConfigurationError: The memory has no such block, or is none of ours.
        """
        return WorkingMemory(self._desk(memory))

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer what is written down in open tasks, the task opened last first."""
        states = _states(await reader.records(_KIND))
        items = [item for rank, state in enumerate(reversed(states)) for item in _items(state, rank)]
        kept: list[Item] = []
        left = self.max_tokens
        for item in items:
            left -= query.counter.text(f"{item.text}\n")
            if left < 0:
                break
            kept.append(item)
        return kept


class WorkingMemory:
    """The open tasks of one memory; made by `WorkingMemoryBlock.of`.

    Args:
        desk: Where they are written.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @checked
    def task(self, name: str) -> Task:
        """A task, opened by `async with`; one that is open already, perhaps since before a restart, goes on.

        Inside of it, another one is part of it: equal names at different places never mix.

        Args:
            name: Not blank.

        Returns:
            The task. At the end of the `async with` it is confirmed, unless the code raised or asked to `redo()`:
            then it stays open with all that was written down.

        Raises:
            ConfigurationError: The name is blank.
        """
        if not isinstance(name, str) or not name.strip():
            raise ConfigurationError(
                f"name={name!r:.100} was given.",
                allowed="A task's name is a text with at least one visible character.",
                remedy="Say in a few words what is to be done.",
            )
        return Task(self._desk, codec.storable(self._desk.redacted(name.strip()))[:_MAX_CHARS])

    async def open_tasks(self) -> list[TaskState]:
        """Tasks that are open, in the order in which they were opened."""
        return _states(await (await self._desk.reader()).records(_KIND))


class Task:
    """One task; see `WorkingMemory.task`.

    Args:
        desk: Where it is written.
        name: Its name.
    """

    def __init__(self, desk: Desk, name: str) -> None:
        self._desk = desk
        self.name = name
        self._path: _Path = ()
        self._id = ""
        self._outside: _Path = ()
        self._kept = False

    async def __aenter__(self) -> Self:
        where = await self._where()
        self._outside = _INSIDE.get().get(where, ())
        self._path = (*self._outside, self.name)
        # The same task has the same id in every process, so that it goes on after a restart.
        self._id = str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join((*where, *map(repr, self._path)))))
        await self._desk.change(self._opened, Reads(ids=(self._id,)))
        self._kept = False
        _INSIDE.set({**_INSIDE.get(), where: self._path})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _INSIDE.set({**_INSIDE.get(), await self._where(): self._outside})
        if error is None and not self._kept:
            await self.confirm()

    @checked
    async def note(self, text: str) -> None:
        """Write a note down.

        Args:
            text: Not blank.

        Raises:
            ConfigurationError: The text is blank, or the task is not open.
        """
        await self._write("note", [text])

    @checked
    async def plan(self, *steps: str) -> None:
        """Write the plan down, in place of the one before.

        Args:
            steps: Its steps, in order.

        Raises:
            ConfigurationError: There is none, one is blank, or the task is not open.
        """
        await self._write("plan", steps)

    @checked
    async def result(self, text: str) -> None:
        """Write a result down.

        Args:
            text: Not blank.

        Raises:
            ConfigurationError: The text is blank, or the task is not open.
        """
        await self._write("result", [text])

    async def state(self) -> TaskState | None:
        """What is written down; `None` when the task is not open."""
        records = await (await self._desk.reader()).records(_KIND)
        return next((_state(record) for record in records if record.id == self._id), None)

    async def redo(self) -> None:
        """Keep what was written down for another attempt: the end of the `async with` leaves the task open.

        Raises:
            ConfigurationError: The task is not open.
        """
        await self._change(lambda state: replace(state, attempt=state.attempt + 1))
        self._kept = True

    async def confirm(self) -> None:
        """The task is done: it and the tasks in it are cleared."""
        self._kept = True

        def cleared(records: Sequence[Record]) -> Changes:
            mine = [r for r in records if tuple(r.data["path"])[: len(self._path)] == self._path]
            emptied = tuple(NewRecord(id=record.id, kind=_KIND, data={"path": []}) for record in mine)
            return Changes(revise=emptied, archive=tuple(record.id for record in mine))

        await self._desk.change(cleared, Reads(kinds=(_KIND,)))

    async def _where(self) -> tuple[str, str]:
        return await self._desk.owner(), self._desk.block

    def _opened(self, records: Sequence[Record]) -> Changes:
        if records and records[0].live:
            return Changes()
        new = _record(self._id, TaskState(self._path, (), 1, self._desk.now()))
        return Changes(revise=(new,), restore=(self._id,)) if records else Changes(add=(new,))

    async def _write(self, sort: Sort, texts: Iterable[str]) -> None:
        given = list(texts)
        cleaned = [self._clean(text) if isinstance(text, str) else "" for text in given]
        if len(given) > _MAX_STEPS:
            raise ConfigurationError(
                f"A {sort} of {len(given)} steps was given.",
                allowed=f"A plan has at most {_MAX_STEPS} steps.",
                remedy="Open a task for each part of it, inside this one, with a plan of its own.",
            )
        if not cleaned or not all(cleaned):
            raise ConfigurationError(
                f"{sort}={given!r:.100} was given.",
                allowed="What is written down is text with at least one visible character.",
                remedy="Pass the text, a plan as plan('first', 'second'), or leave the call out.",
            )
        new = tuple(Entry(sort, text, self._desk.now()) for text in cleaned)

        def written(state: TaskState) -> TaskState:
            kept = tuple(entry for entry in state.entries if sort != "plan" or entry.sort != "plan")
            return replace(state, entries=_bounded((*kept, *new)))

        await self._change(written)

    def _clean(self, text: str) -> str:
        # First cut wide, so that no secret is cut in two before it is seen.
        return codec.storable(self._desk.redacted(text[: 2 * _MAX_CHARS])).strip()[:_MAX_CHARS]

    async def _change(self, change: Any) -> None:
        def merge(records: Sequence[Record]) -> Changes:
            live = [record for record in records if record.live]
            if not live:
                raise ConfigurationError(
                    f"The task {self.name!r:.100} is not open.",
                    allowed="An open task is written in: inside its async with, before it is confirmed.",
                    remedy="Open it with async with working.task(…).",
                )
            return Changes(revise=(_record(self._id, change(_state(live[0]))),))

        await self._desk.change(merge, Reads(ids=(self._id,)))


def _bounded(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Of too many entries the plan and the newest stay."""
    surplus = len(entries) - _MAX_ENTRIES
    if surplus <= 0:
        return entries
    old = [entry for entry in entries if entry.sort != "plan"][:surplus]
    return tuple(entry for entry in entries if not any(entry is one for one in old))[-_MAX_ENTRIES:]


# --- as records -----------------------------------------------------------------------------------------------


def _record(number: str, state: TaskState) -> NewRecord:
    entries = [{**asdict(entry), "at": entry.at.isoformat()} for entry in state.entries]
    return NewRecord(
        id=number,
        kind=_KIND,
        text="\n".join((state.name, *(entry.text for entry in state.entries))),
        data={
            "path": list(state.path),
            "entries": entries,
            "attempt": state.attempt,
            "opened_at": state.opened_at.isoformat(),
        },
        said_at=state.opened_at,
    )


def _state(record: Record) -> TaskState:
    data = record.data
    entries = tuple(Entry(e["sort"], e["text"], datetime.fromisoformat(e["at"])) for e in data["entries"])
    return TaskState(tuple(data["path"]), entries, data["attempt"], datetime.fromisoformat(data["opened_at"]))


def _states(records: Iterable[Record]) -> list[TaskState]:
    """Open tasks in the order in which they were opened; a task that is part of another comes after it."""
    return sorted(map(_state, records), key=lambda state: (state.opened_at, len(state.path)))


# --- in a context ---------------------------------------------------------------------------------------------


def _items(state: TaskState, rank: int) -> list[Item]:
    """The plan, then entries from the newest to the oldest; rendered in the order in which they were written."""
    path = escape(" > ".join(" ".join(name.split()) for name in state.path)).replace('"', "&quot;")
    attempt = f' attempt="{state.attempt}"' if state.attempt > 1 else ""
    header, footer, group = f'<task name="{path}"{attempt}>', "</task>", f"task {rank}"
    places = list(enumerate(state.entries))
    plan = [(at, entry) for at, entry in places if entry.sort == "plan"]
    others = [(at, entry) for at, entry in places if entry.sort != "plan"]
    return [
        Item(
            f"{entry.sort}: {escape(entry.text)}",
            score=-float(rank),
            group=group,
            header=header,
            footer=footer,
            order=(-float(rank), float(entry.sort != "plan"), float(at)),
        )
        for at, entry in (*plan, *reversed(others))
    ]
