"""Roles over one shared memory: lookups, what is new for whom, and who said what in a multi-agent run."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore
from running import MakeStorage

from llama_index_memory_tiers import (
    ConfigurationError,
    MemoryView,
    MessageBoard,
    Storage,
    StoredMessage,
    TieredMemory,
    attributed,
)
from llama_index_memory_tiers.records import MessageMeta
from llama_index_memory_tiers.testing import ScriptedFunctionCallingLLM
from llama_index_memory_tiers.testing.models import ToolCall
from llama_index_memory_tiers.views import is_news, reaches
from tests.doubles import said


class WriteDesign:
    """An action."""


class WriteCode:
    """Another one."""


@pytest.fixture
async def one_file(tmp_path: Path) -> AsyncIterator[Storage]:
    async with Storage(tmp_path / "team.db") as opened:
        yield opened


def team(storage: Storage, session: str = "project", **fields: Any) -> TieredMemory:
    return TieredMemory(storage=storage, user_id="firm", session_id=session, memory_blocks=[], **fields)


def texts(messages: Any) -> list[str]:
    return [message.text if isinstance(message, StoredMessage) else message.content for message in messages]


# --- lookups --------------------------------------------------------------------------------------------------

CAUSES: list[str | type] = ["", "plan", "code", "test", WriteCode]
ROLES = ["", "ann", "bob"]


async def test_every_lookup_equals_a_linear_scan_after_a_thousand_random_adds_and_deletes(one_file: Storage) -> None:
    memory = team(one_file)
    board = memory.board()
    chance = random.Random(46)
    kept: list[tuple[str, str, str, str, str]] = []  # id, text, cause, sender, chat role
    for number in range(1000):
        if kept and chance.random() < 0.3:
            gone = kept.pop(chance.randrange(len(kept)))
            deleted = await board.delete(gone[0])
            assert deleted is not None
            assert deleted.text == gone[1]
        else:
            cause, sender = chance.choice(CAUSES), chance.choice(ROLES)
            role = chance.choice(["user", "assistant"])
            text = f"message {number} {chance.choice(['red', 'green', 'blue'])}"
            made = await board.add(said(role, text), sent_from=sender, cause_by=cause)
            assert made is not None
            name = cause if isinstance(cause, str) else f"{cause.__module__}.{cause.__qualname__}"
            kept.append((made, text, name, sender, role))
        if number % 100 == 99:
            await _same_as_scan(board, kept)
    await _same_as_scan(memory.board(), kept)


async def _same_as_scan(board: Any, kept: list[tuple[str, str, str, str, str]]) -> None:
    assert await board.count() == len(kept)
    for names in (["plan"], ["plan", "test"], [""], ["nothing"]):
        assert texts(await board.by_cause(*names)) == [one[1] for one in kept if one[2] in names]
    name = f"{WriteCode.__module__}.WriteCode"
    for causes in ([WriteCode, "code"], [{WriteCode, "code"}], [name, "code", "code"]):
        assert texts(await board.by_cause(*causes)) == [one[1] for one in kept if one[2] in {name, "code"}]
    for role in ("ann", "user", "assistant", "nobody"):
        assert texts(await board.by_role(role)) == [one[1] for one in kept if role in one[3:]]
    assert texts(await board.containing("green")) == [one[1] for one in kept if "green" in one[1]]
    for k in (0, 1, 7, 5000):
        assert texts(await board.latest(k)) == [one[1] for one in kept][-k if k else 0 :]
    observed = await board.latest(20)
    assert texts(await board.news(observed, 5)) == [one[1] for one in kept[-20:-5]]
    assert await board.news(observed) == []


async def test_looking_creates_nothing_and_an_unknown_cause_has_no_messages(one_file: Storage) -> None:
    board = team(one_file).board()
    assert (await board.by_cause("plan"), await board.latest(), await board.count()) == ([], [], 0)
    assert await one_file.log.sessions("firm") == []
    assert (await board.delete("nothing"), await board.delete_newest(), await board.clear()) == (None, None, 0)
    assert await board.get("nothing") is None


async def test_the_callers_message_is_not_changed_and_neither_is_a_stored_one(one_file: Storage) -> None:
    board = team(one_file).board()
    message = said("user", "build a game")
    before = message.model_dump()
    await board.add(message, cause_by=WriteDesign, send_to="ann", uid="m1")
    assert message.model_dump() == before
    (found,) = await board.latest()
    found.message.additional_kwargs["x"] = 1
    assert (await board.latest())[0].message.additional_kwargs == {}
    assert found.id == "m1"


async def test_an_identical_message_is_refused_by_id_or_by_content(storage: Storage) -> None:
    board = team(storage).board()
    assert await board.add(said("user", "a"), uid="1") == "1"
    assert await board.add(said("user", "b"), uid="1") is None
    assert len([one for one in [await board.add(said("user", "a")) for _ in range(2)] if one]) == 2
    strict = team(storage, "other").board(deduplicate="content")
    assert await strict.add(said("user", "a"), cause_by="plan") is not None
    assert await strict.add(said("user", "a"), cause_by="plan") is None
    assert await strict.add(said("user", "a"), cause_by="code") is not None
    made = await strict.add_batch([said("user", "b"), said("user", "a"), said("user", "b")], cause_by="plan")
    assert texts(await strict.latest()) == ["a", "a", "b"]
    assert made == [(await strict.latest(1))[0].id]


async def test_of_two_writers_of_one_content_one_is_refused(make_storage: MakeStorage, storage_kind: str) -> None:
    boards = [team(make_storage(storage_kind)).board(deduplicate="content") for _ in range(4)]
    await boards[0].add(said("user", "first"))
    made = await asyncio.gather(*(board.add(said("user", "same")) for board in boards))
    assert len([one for one in made if one]) == 1
    assert texts(await boards[1].latest()) == ["first", "same"]


async def test_deleting_the_newest_and_clearing_keep_every_lookup_right(one_file: Storage) -> None:
    memory = team(one_file)
    board = memory.board()
    await board.add_batch([said("user", text) for text in "abc"], cause_by="plan")
    newest = await board.delete_newest()
    assert newest is not None
    assert newest.text == "c"
    assert texts(await board.by_cause("plan")) == ["a", "b"]
    assert texts(await memory.aget()) == ["a", "b"]
    assert await board.clear() == 2
    assert (await board.by_cause("plan"), await board.count(), await memory.aget()) == ([], 0, [])


async def test_another_writer_is_seen_and_a_lookup_costs_one_statement(make_storage: MakeStorage) -> None:
    here, there = team(make_storage("file")), team(make_storage("file"))
    board = here.board()
    await here.aput(said("user", "a"), cause_by="plan")
    assert texts(await board.by_cause("plan")) == ["a"]
    await there.aput(said("user", "b"), cause_by="plan")
    assert texts(await board.by_cause("plan")) == ["a", "b"]
    before = here.storage.statements
    await board.by_cause("plan")
    assert here.storage.statements - before == 1


async def test_a_new_message_is_told_from_known_ones_by_its_content(one_file: Storage) -> None:
    board = team(one_file).board()
    await board.add(said("user", "my password is hunter2secret!9"))
    observed: list[StoredMessage | ChatMessage] = [said("user", "my password is hunter2secret!9"), said("user", "b")]
    assert texts(await board.news(observed)) == ["b"]


async def test_the_log_of_another_user_or_session_is_not_seen(one_file: Storage) -> None:
    memory = team(one_file)
    await memory.aput(said("user", "secret plan"), cause_by="plan", send_to="ann", uid="m1")
    for other in (memory.for_session("other"), memory.for_session("project", "rival")):
        assert await other.board().by_cause("plan") == []
        assert await other.board().delete("m1") is None
        assert await other.view("ann", watch="plan").observe() == []
    assert await memory.board().count() == 1


@pytest.mark.parametrize("k", [-1, True, 1.5])
async def test_a_count_that_is_none_is_refused(one_file: Storage, k: Any) -> None:
    memory = team(one_file)
    with pytest.raises(ConfigurationError, match="k="):
        await memory.board().latest(k)
    with pytest.raises(ConfigurationError, match="k="):
        await memory.view("ann").history(k)


async def test_what_cannot_work_is_refused(one_file: Storage) -> None:
    memory = team(one_file)
    with pytest.raises(ConfigurationError, match="deduplicate"):
        memory.board(deduplicate="name")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigurationError, match="name"):
        memory.view("  ")
    foreign = TieredMemory(session_id="s", chat_store=SQLAlchemyChatStore(table_name="stock"))
    with pytest.raises(ConfigurationError, match="chat_store"):
        foreign.view("ann")
    await foreign.aclose()


# --- what is new for whom -------------------------------------------------------------------------------------

TRUTH = [  # cause, send_to, sent_from → reaches ann, is news for ann, who watches "plan"
    ("plan", (), "bob", True, True),
    ("plan", ("ann",), "bob", True, True),
    ("plan", ("all",), "bob", True, True),
    ("plan", ("carl",), "bob", False, False),
    ("plan", (), "ann", True, False),
    ("code", (), "bob", True, False),
    ("code", ("all",), "bob", True, False),
    ("code", ("ann",), "bob", True, True),
    ("code", ("carl", "ann"), "bob", True, True),
    ("code", ("carl",), "bob", False, False),
    ("", (), "bob", True, False),
    ("", ("ann",), "bob", True, True),
    ("", ("ann",), "ann", True, True),
    ("", ("anna",), "bob", False, False),
]


@pytest.mark.parametrize(("cause", "send_to", "sent_from", "reached", "news"), TRUTH)
async def test_a_watch_filter_is_not_bypassed(
    one_file: Storage, cause: str, send_to: tuple[str, ...], sent_from: str, reached: bool, news: bool
) -> None:
    memory = team(one_file)
    await memory.aput(said("assistant", "x"), cause_by=cause, send_to=send_to, sent_from=sent_from)
    view, all_ = memory.view("ann", watch={"plan", ""}), memory.view("ann", watch="plan", observe_all=True)
    assert texts(await view.observe()) == (["x"] if news else [])
    own = sent_from == "ann"
    assert texts(await view.history()) == (["x"] if news or own else [])
    assert texts(await all_.history()) == (["x"] if reached or own else [])
    assert texts(await view.important()) == (["x"] if (news or own) and cause == "plan" else [])
    assert await view.observe() == []  # already seen


@given(
    cause=st.sampled_from(["", "plan", "code"]),
    send_to=st.lists(st.sampled_from(["ann", "bob", "all"]), max_size=2).map(tuple),
    sent_from=st.sampled_from(["", "ann", "bob"]),
    watch=st.frozensets(st.sampled_from(["plan", "code", ""])),
)
def test_news_always_reaches_its_role(
    cause: str, send_to: tuple[str, ...], sent_from: str, watch: frozenset[str]
) -> None:
    meta = MessageMeta(sent_from=sent_from, send_to=send_to, cause_by=cause)
    assert reaches(meta, "ann") or not is_news(meta, "ann", watch)


async def test_after_an_exception_a_message_is_observed_again_and_after_a_success_never(storage: Storage) -> None:
    memory = team(storage)
    await memory.aput(said("user", "a"), send_to="ann")
    view = memory.view("ann")

    async def fail() -> None:
        async with view.observe() as news:
            assert texts(news) == ["a"]
            raise RuntimeError("the model is down")

    with pytest.raises(RuntimeError):
        await fail()
    assert await view.history() == []
    async with view.observe() as news:
        await memory.aput(said("user", "b"), send_to="ann")  # said meanwhile
        assert texts(news) == ["a"]
    assert texts(await memory.view("ann").observe()) == ["b"]
    assert texts(await view.history()) == ["a", "b"]
    assert texts(await view.history(1)) == ["b"]


async def test_a_cancelled_observation_is_observed_again_at_once(one_file: Storage) -> None:
    memory = team(one_file)
    await memory.aput(said("user", "a"), send_to="ann")
    entered = asyncio.Event()

    async def handle() -> None:
        async with memory.view("ann").observe():
            entered.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(handle())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert texts(await memory.view("ann").observe()) == ["a"]


async def test_an_observation_cancelled_while_it_claims_leaves_no_claim(
    one_file: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = team(one_file)
    await memory.aput(said("user", "a"), send_to="ann")
    claimed, claim = asyncio.Event(), one_file.cursors.claim

    async def slow(*args: Any, **kwargs: Any) -> int | None:
        found = await claim(*args, **kwargs)
        claimed.set()
        await asyncio.sleep(0.05)  # its answer is on the way
        return found

    monkeypatch.setattr(one_file.cursors, "claim", slow)
    task = asyncio.ensure_future(memory.view("ann").observe()._at_once())
    await claimed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert texts(await memory.view("ann").observe()) == ["a"]


async def test_an_observation_that_cannot_read_its_messages_leaves_no_claim(
    one_file: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = team(one_file)
    await memory.aput(said("user", "a"), send_to="ann")

    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a disk error")

    with monkeypatch.context() as patched:
        patched.setattr(one_file.log, "read", broken)
        with pytest.raises(RuntimeError, match="a disk error"):
            await memory.view("ann").observe()
    assert texts(await memory.view("ann").observe()) == ["a"]


def test_a_view_prints_as_one_short_line(tmp_path: Path) -> None:
    assert (
        repr(TieredMemory(storage=tmp_path / "m.db", session_id="s").view("ann"))
        == "MemoryView(name='ann', session_id='s')"
    )


async def test_two_workers_of_one_role_handle_each_message_once(make_storage: MakeStorage, storage_kind: str) -> None:
    memories = [team(make_storage(storage_kind)) for _ in range(3)]
    for number in range(6):
        await memories[0].aput(said("user", str(number)), send_to="ann")
    seen: list[str] = []

    async def handle(memory: TieredMemory) -> None:
        for _ in range(4):
            async with memory.view("ann").observe() as news:
                await asyncio.sleep(0)
                seen.extend(texts(news))

    await asyncio.gather(*(handle(memory) for memory in memories))
    assert seen == [str(number) for number in range(6)]


async def test_while_one_handles_what_is_new_there_is_nothing_new_for_others(one_file: Storage) -> None:
    memory = team(one_file)
    await memory.aput(said("user", "a"), send_to="ann")
    view = memory.view("ann")
    async with view.observe() as news:
        assert await view.observe() == []
        assert texts(news) == ["a"]
    assert (await view.observe(), texts(await view.history())) == ([], ["a"])


async def test_a_view_lasts_over_a_restart_and_roles_do_not_share_it(make_storage: MakeStorage) -> None:
    first = team(make_storage("file"))
    await first.aput(said("user", "a"), cause_by=WriteDesign)
    assert texts(await first.view("ann", watch=WriteDesign).observe()) == ["a"]
    again = team(make_storage("file"))
    assert await again.view("ann", watch=[WriteDesign]).observe() == []
    assert texts(await again.view("bob", watch={WriteDesign}).observe()) == ["a"]


async def test_without_remembering_a_view_filters_and_keeps_no_history(one_file: Storage) -> None:
    memory = team(one_file)
    view = memory.view("ann", watch="plan", remember=False)
    await memory.aput(said("user", "a"), cause_by="plan")
    assert texts(await view.observe()) == ["a"]
    assert (await view.observe(), await view.history(), await view.important()) == ([], [], [])


async def test_a_deleted_message_is_neither_news_nor_history(one_file: Storage) -> None:
    memory = team(one_file)
    view = memory.view("ann")
    for text in "ab":
        await memory.aput(said("user", text), send_to="ann", uid=text)
    await memory.board().delete("a")
    assert texts(await view.observe()) == ["b"]
    await memory.board().delete("b")
    assert await view.history() == []


async def test_a_message_that_left_the_window_is_still_news_and_history(one_file: Storage) -> None:
    memory = team(one_file, token_limit=100, window_messages=2)
    view = memory.view("ann")
    for number in range(8):
        await memory.aput(said("user", f"question {number}"), send_to="ann")
        await memory.aput(said("assistant", f"answer {number}"))
    assert texts(await view.observe()) == [f"question {number}" for number in range(8)]
    assert len(await view.history()) == 8


async def test_recalled_text_in_a_message_of_a_role_is_not_stored_again(one_file: Storage) -> None:
    memory = team(one_file)
    recalled = "<memory>\n<ExtractedFacts>\n<fact>Maya has a cat.</fact>\n</ExtractedFacts>\n</memory>\nbuild it"
    await memory.view("ann").say(said("user", recalled), send_to="bob")
    assert texts(await memory.view("bob").observe()) == ["build it"]


# --- who said what in a multi-agent run -----------------------------------------------------------------------


def _agents(*scripts: Any) -> AgentWorkflow:
    names = ["product", "architect", "engineer"]
    agents: list[BaseWorkflowAgent] = [
        FunctionAgent(
            name=name,
            description=f"The {name}.",
            llm=ScriptedFunctionCallingLLM(script),  # type: ignore[misc, call-arg]  # pydantic's own signature
            tools=[_note],
            can_handoff_to=[other for other in names if other != name],
        )
        for name, script in zip(names, scripts, strict=False)
    ]
    return AgentWorkflow(agents=agents, root_agent="product")


def _note(text: str) -> str:
    """Write a note."""
    return f"noted: {text}"


async def test_messages_of_a_run_of_several_agents_get_their_senders(one_file: Storage) -> None:
    memory = team(one_file)
    hand = ToolCall("handoff", {"to_agent": "architect", "reason": "design"}, "c1")
    workflow = _agents([hand], [ToolCall("_note", {"text": "two modules"}, "c2"), "The design has two modules."])
    board = memory.board()
    run = workflow.run("Build a game, password: hunter2secret!9", memory=memory)
    events = [event async for event in attributed(run, board, causes={"architect": WriteDesign})]
    await run
    assert len(events) > 5
    (design,) = await board.by_cause(WriteDesign)
    assert (design.text, design.meta.sent_from) == ("The design has two modules.", "architect")
    (noted,) = await board.by_cause("_note")
    assert (noted.role, noted.meta.sent_from) == (MessageRole.TOOL, "")
    assert await memory.view("architect").observe() == []
    assert [message.role.value for message in await board.by_role("architect")] == ["assistant", "assistant"]
    (asked,) = await board.by_role("user")
    assert asked.meta.sent_from == ""
    assert texts(await memory.view("engineer", watch=WriteDesign).observe()) == ["The design has two modules."]


async def test_what_was_said_before_a_run_and_what_has_a_sender_stays(one_file: Storage) -> None:
    memory = team(one_file)
    await memory.aput(said("assistant", "done"), sent_from="somebody")
    await memory.aput(said("assistant", "done"))
    run = _agents(["done"]).run("go", memory=memory)
    async for _ in attributed(run, memory.board()):
        pass
    await run
    found = [message.meta.sent_from for message in await memory.board().by_role(MessageRole.ASSISTANT)]
    assert found == ["somebody", "", "product"]


def test_every_name_in_the_table_of_metagpt_exists() -> None:
    table = (Path(__file__).parents[1] / "docs" / "metagpt.md").read_text("utf-8")
    owners = {"board": MessageBoard, "view": MemoryView, "memory": TieredMemory}
    named = {(owner, name) for owner, name in re.findall(r"`(?:async with )?(board|view|memory)\.(\w+)\(", table)}
    ours = {(owner, name) for owner, name in named if owner != "memory" or name in {"aput", "view", "board"}}
    assert len(ours) >= 15
    for owner, name in ours:
        assert callable(getattr(owners[owner], name)), (owner, name)
