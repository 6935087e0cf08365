"""Whatever is passed to a public method by mistake is taken as it is meant, or refused by an error of ours.

The methods and their arguments are found by `inspect.signature`, so that a new one is covered as soon as it is there.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from llama_index.core.llms import MockLLM
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

import llama_index_memory_tiers as package
from llama_index_memory_tiers import (
    Chat,
    EpisodeStep,
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    ForgetFilter,
    HeatMemoryBlock,
    JournalMemoryBlock,
    MemoryTiersError,
    MemoryView,
    Redactor,
    Storage,
    TieredChatStore,
    TieredMemory,
    TieredMemoryBlock,
    TokenBudget,
    VectorMemoryBlock,
    WorkingMemoryBlock,
    WritePolicy,
)
from tests.doubles import said

WRONG: list[Any] = [None, 3, "x", b"x", ["x"], {"a": 1}, float("nan"), -1, 10**30, 1e300, "long " * 2_000]
LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)

# What a block is asked by its memory only, and what rooms of the package ask each other: they are given what was
# checked before.
INNER = {
    TieredMemoryBlock: {"forget", "forget_owner", "holding", "mentions", "merge", "prepare", "reads", "recall"},
    FactExtractionMemoryBlock: {"written"},
    VectorMemoryBlock: {"find", "remember", "validate_vector_store"},
    TokenBudget: {"check_blocks"},
    ForgetFilter: {"matches_message", "matches_record"},
    WritePolicy: {"kept"},
    MemoryView: {"concerns"},
}


class World:
    """A memory with one of everything in it, and what stands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = Storage(folder / "memory.db")
        self.facts_block = FactExtractionMemoryBlock(extractor=lambda _: [])
        self.episodes_block = EpisodicMemoryBlock(embed_model=None)
        self.journal_block = JournalMemoryBlock(directory=folder / "journal")
        self.working_block = WorkingMemoryBlock()
        self.heat_block = HeatMemoryBlock(llm=None, embed_model=None)
        self.vector_block = VectorMemoryBlock(embed_model=None)
        self.memory = TieredMemory(
            storage=self.storage,
            user_id="ann",
            session_id="s",
            delivery="inline",
            memory_blocks=[
                self.facts_block,
                self.episodes_block,
                self.journal_block,
                self.working_block,
                self.heat_block,
                self.vector_block,
            ],
        )
        self.facts = self.facts_block.of(self.memory)
        self.episodes = self.episodes_block.of(self.memory)
        self.made: dict[str, Any] = {}
        self._watcher = sqlite3.connect(folder / "memory.db")

    async def valid(self, name: str) -> Any:
        """A good value for an argument of this name; one that was used up is made anew."""
        if name not in self.made:
            value = GOOD[name]
            value = value(self) if callable(value) else value
            self.made[name] = await value if inspect.iscoroutine(value) else value
        return self.made[name]

    def stored(self) -> tuple[Any, ...]:
        """Changes whenever anything is written."""
        files = ((path, path.stat().st_mtime_ns) for path in sorted((self.folder / "journal").rglob("*")))
        return (self._watcher.execute("PRAGMA data_version").fetchone(), *files)

    async def close(self) -> None:
        self._watcher.close()
        for run in {"handler", "run"} & set(self.made):
            await self.made[run]
        await self.memory.aclose()
        for block in self.memory.memory_blocks:
            if isinstance(block, TieredMemoryBlock):
                await block.aclose()  # used without a memory, it has a storage of its own
        await self.storage.aclose()


async def _episode(world: World) -> str:
    return (await world.episodes.start("t")).id


class Nothing(Workflow):
    @step
    async def only(self, _: StartEvent) -> StopEvent:
        return StopEvent(result="done")


GOOD: dict[str, Any] = {
    "action": "do it",
    "content": "a note",
    "day": LONG_AGO.date(),
    "days": 9,
    "embed_model": None,
    "episode_id": _episode,
    "error": "it broke",
    "fact": lambda world: world.facts.add("Ann likes plums."),
    "folder": lambda world: world.folder,
    "handler": lambda _: Nothing().run(),
    "path": lambda world: world.folder / "chat.jsonl",
    "questions": (),
    "run": lambda _: Nothing().run(),
    "board": lambda world: world.memory.board(),
    "given": {"total": 1000},
    "id": "unknown",
    "idx": 1,
    "k": 1,
    "key": "s",
    "memory": lambda world: world.memory,
    "message": lambda _: said("user", "hello"),
    "messages": lambda _: [said("user", "hello")],
    "n": 1,
    "name": "architect",
    "notes": (),
    "observed": (),
    "outcome": "success",
    "pattern": "x",
    "query": "plums",
    "role": "user",
    "said_at": LONG_AGO,
    "segment": "unknown",
    "seq": 1,
    "session_id": "s",
    "source": lambda world: world.folder / "none.jsonl",
    "step": EpisodeStep("do it"),
    "target": lambda world: world.folder / "out.jsonl",
    "task": "a task",
    "text": "some words",
    "time": LONG_AGO,
    "user_id": "ann",
    "user_message": "hello",
    "assistant_message": "hello",
    "value": "some words",
    "version": 1,
    "block": "Episodes",
    "handle": lambda world: world.memory.to_handle(),
    "ratio": 0.5,
}

# The same for what is made by name.
MADE_OF: dict[str, dict[str, Any]] = {
    "Chat": {"name": "mine", "messages": ()},
    "ChatTurn": {"id": "1", "text": "hello"},
    "FactExtractionMemoryBlock": {"extractor": lambda _: []},
    "FactProposal": {"text": "Ann likes plums."},
    "ForgetFilter": {"contains": "plums"},
    "JournalMemoryBlock": {"directory": "journal"},
    "Partition": {"name": "facts"},
    "RecallQuestion": {"text": "What?"},
    "StaticMemoryBlock": {"static_content": "Be kind."},
    "SummaryMemoryBlock": {"llm": MockLLM()},
    "TokenBudget": {"total": 1000},
    "WritePolicy": {"keeps": bool},
}
# What the package hands out, and what is looked at where it is handed in.
HANDED_OUT = {
    "AgentStatement", "ContextReport", "Episode", "Fact", "FlushReport", "ForgetReceipt", "MaintenanceReport", "MemoryView",
    "MessageBoard", "ProfileVersion", "Provenance", "RecallOutcome", "RecallReport", "Recollection", "StoredMessage",
    "Takeover", "TieredMemoryBlock", "TiersReport", "TransferReport", "EpisodeStep", "ToolUse",
}  # fmt: skip


async def _task(world: World) -> Any:
    return await world.working_block.of(world.memory).task("t").__aenter__()


TARGETS: dict[str, Callable[[World], Any]] = {
    "memory": lambda world: world.memory,
    "storage": lambda world: world.storage,
    "store": lambda world: TieredChatStore(world.storage, user_id="ann"),
    "board": lambda world: world.memory.board(),
    "view": lambda world: world.memory.view("architect"),
    "facts": lambda world: world.facts,
    "facts block": lambda world: world.facts_block,
    "episodes": lambda world: world.episodes,
    "episode": lambda world: world.episodes.start("t"),
    "episodes block": lambda world: world.episodes_block,
    "journal": lambda world: world.journal_block.of(world.memory),
    "journal block": lambda world: world.journal_block,
    "working": lambda world: world.working_block.of(world.memory),
    "task": _task,
    "working block": lambda world: world.working_block,
    "heat block": lambda world: world.heat_block,
    "vector block": lambda world: world.vector_block,
    "budget": lambda _: TokenBudget(1000),
    "write policy": lambda _: WritePolicy.survey(),
    "redactor": lambda _: Redactor(),
    "chat": lambda _: Chat("mine", ()),
    "functions": lambda _: package,
}


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.chdir(tmp_path)  # 'x' is a good path
    made = World(tmp_path)
    await made.memory.aput(said("user", "I like plums."))
    yield made
    await made.close()


def methods(thing: Any) -> list[str]:
    """What the package itself defines with arguments, without synchronous twins and what is asked inside."""
    if inspect.ismodule(thing):
        return [name for name in thing.__all__ if inspect.isfunction(getattr(thing, name))]
    inner = {name for base, names in INNER.items() if isinstance(thing, base) for name in names}
    found = []
    for name in dir(type(thing)):
        function = inspect.getattr_static(type(thing), name)
        function = getattr(function, "__func__", function)
        if name.startswith("_") or name in inner or not inspect.isfunction(function):
            continue
        twin = (function.__doc__ or "").startswith("See `a")
        if function.__module__.startswith(package.__name__) and not twin:
            found.append(name)
    return found


def arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return [one for one in found if one.name not in {"self", "cls"} and one.kind is not one.VAR_KEYWORD]


async def call(function: Callable[..., Any], given: dict[str, Any], world: World) -> None:
    """Call, and open what is to be opened by `async with`."""
    several = [one.name for one in arguments(function) if one.kind is one.VAR_POSITIONAL and one.name in given]
    result = function(*[given.pop(name) for name in several], **given)
    if inspect.isasyncgen(result):
        _ = [event async for event in result]
        return
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__") and result is not world.memory:
        async with result:
            pass


async def faults(target: str, name: str, world: World) -> list[str]:
    """Call a method with each of its arguments wrong in every way, the others being good."""
    found = []
    function = getattr(await make(target, world), name)
    for one in arguments(function):
        for value in WRONG:
            shown = f"{target}.{name}({one.name}={value!r:.12})"
            needed = [each.name for each in arguments(function) if each.default is each.empty]
            several = [each.name for each in arguments(function) if each.kind is each.VAR_POSITIONAL]
            given = {each: await world.valid(each) for each in needed if each not in {one.name, *several}}
            before = world.stored()
            try:
                await call(function, {**given, one.name: value}, world)
            except MemoryTiersError as error:
                if not (error.given and error.allowed and error.remedy):
                    found.append(f"{shown}: an error of less than three parts")
                if world.stored() != before:
                    found.append(f"{shown}: refused, but something was stored")
            except Exception as error:  # noqa: BLE001  # what this test is looking for
                found.append(f"{shown}: {type(error).__name__}: {error!s:.80}")
            else:
                if not named_by(get_type_hints(function)[one.name], value):
                    found.append(f"{shown}: taken, though it is not {one.annotation}")
                world.made.clear()
                function = getattr(await make(target, world), name)
    return found


async def make(target: str, world: World) -> Any:
    thing = TARGETS[target](world)
    return await thing if inspect.isawaitable(thing) else thing


def named_by(hint: Any, value: Any) -> bool:
    """Whether an annotation names this kind of value; pydantic judges, which the package does not use for it."""
    try:
        judge: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return True  # a protocol, which has a check of its own
    try:
        judge.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("target", TARGETS)
async def test_wrong_kinds_are_refused_by_the_methods_of(target: str, world: World) -> None:
    found = []
    for name in methods(await make(target, world)):
        found += await faults(target, name, world)
    assert not found, "\n".join(found)


def made_by_users() -> list[str]:
    values = {name: getattr(package, name) for name in package.__all__}
    kinds = [name for name, value in values.items() if inspect.isclass(value) and not issubclass(value, Exception)]
    return sorted(set(kinds) - HANDED_OUT)


@pytest.mark.parametrize("name", made_by_users())
async def test_wrong_kinds_are_refused_by(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # as above
    kind, good = getattr(package, name), MADE_OF.get(name, {})
    names = [one.name for one in arguments(kind)] + list(getattr(kind, "model_fields", ()))
    found = []
    for argument in dict.fromkeys(names):
        for value in WRONG:
            try:
                made = kind(**{**good, argument: value})
            except MemoryTiersError as error:
                if not (error.given and error.allowed and error.remedy):
                    found.append(f"{name}({argument}={value!r:.12}): an error of less than three parts")
            except Exception as error:  # noqa: BLE001  # what this test is looking for
                found.append(f"{name}({argument}={value!r:.12}): {type(error).__name__}: {error!s:.80}")
            else:
                if hasattr(made, "aclose"):
                    await made.aclose()
    assert not found, "\n".join(found)
