"""Every block gets every message of every session, when it is due, whatever fails in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from doubles import (
    Clock,
    Gate,
    ListeningBlock,
    ModelRecordingBlock,
    Outage,
    RecordingBlock,
    absorb_all,
    assert_once,
    assert_tiled,
    heads,
    refuse_content,
    rows,
    said,
    told,
    turn,
    until,
)
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers import Storage, TieredChatStore, TieredMemory, pacing
from llama_index_memory_tiers.errors import StorageUnavailableError
from llama_index_memory_tiers.records import Batch
from llama_index_memory_tiers.storage import DeadLetter

Make = Callable[..., TieredMemory]


@pytest.fixture
async def make(make_storage: Callable[..., Storage]) -> AsyncIterator[Make]:
    """`make(block, …)`: memories of one user's session `chat` over one file; closed in the end."""
    made: list[TieredMemory] = []
    shared: list[Storage] = []

    def memory(*blocks: BaseMemoryBlock[Any], storage: Storage | None = None, **arguments: Any) -> TieredMemory:
        if storage is None:
            shared[:] = shared or [make_storage("file")]
            storage = shared[0]
        settings = {"session_id": "chat", "user_id": "ada", "delivery": "inline", **arguments}
        made.append(TieredMemory(storage=storage, memory_blocks=list(blocks), **settings))
        return made[-1]

    yield memory
    for each in made:
        await each.aclose()


def settled(memory: TieredMemory) -> Awaitable[None]:
    """Wait for background work."""
    return until(lambda: not memory._shared.delivery._workers, what="the end of background work")


def tool_round(number: int) -> list[ChatMessage]:
    call = ToolCallBlock(tool_call_id=f"c{number}", tool_name="look", tool_kwargs={})
    return [
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(role="tool", content=f"result {number}", additional_kwargs={"tool_call_id": f"c{number}"}),
    ]


# --- when a batch is due --------------------------------------------------------------------------------------


async def test_a_turn_is_absorbed_when_it_is_complete_and_not_before(make: Make) -> None:
    block = RecordingBlock()
    memory = make(block)
    await memory.aput(said("user", "question"))
    for message in tool_round(1):
        await memory.aput(message)
    assert block.batches == []
    await memory.aput(said("assistant", "answer"))
    assert [len(batch) for batch in block.batches] == [4]
    assert block.batches[0][-1] == "answer"


@pytest.mark.parametrize("role", ["assistant", "chatbot", "model"])
async def test_a_turn_is_complete_whatever_the_answering_role_is_called(make: Make, role: str) -> None:
    block = RecordingBlock()
    await make(block).aput_messages([said("user", "question"), said(role, "answer")])
    assert block.batches == [["question", "answer"]]


async def test_instructions_before_the_first_question_are_no_turn(make: Make) -> None:
    block = RecordingBlock()
    memory = make(block)
    await memory.aput(said("developer", "be brief"))
    await memory.aput(said("user", "question"))
    assert block.batches == []


async def test_an_unanswered_turn_is_complete_when_the_next_one_begins(make: Make) -> None:
    block = RecordingBlock()
    memory = make(block)
    await memory.aput(said("user", "first"))
    await memory.aput(said("user", "second"))
    assert block.batches == [["first"]]


async def test_a_block_may_wait_for_several_turns(make: Make) -> None:
    block = RecordingBlock(absorb_every=3)
    memory = make(block)
    for number in range(7):
        await memory.aput_messages(turn(number))
    assert [len(batch) for batch in block.batches] == [6, 6]


async def test_a_block_that_waits_for_more_turns_than_a_batch_holds_is_served_all_the_same(make: Make) -> None:
    block = RecordingBlock(absorb_on=frozenset({"turn"}), absorb_every=50)
    memory = make(block)
    for number in range(40):
        await memory.aput_messages(turn(number))
    assert [len(batch) for batch in block.batches] == [64]


async def test_a_turn_longer_than_a_batch_does_not_close_a_session_to_a_block(make: Make) -> None:
    block = RecordingBlock(absorb_on=frozenset({"turn"}))
    memory = make(block, token_limit=100_000)
    await memory.aput(said("user", "a long task"))
    for number in range(50):
        await memory.aput_messages(tool_round(number))
    await memory.aput(said("assistant", "done"))
    assert sum(map(len, block.batches)) == 102
    assert max(map(len, block.batches)) == 64


async def test_a_flush_block_absorbs_what_leaves_the_window_and_nothing_else(make: Make) -> None:
    block = RecordingBlock(absorb_on=frozenset({"flush"}))
    memory = make(block, window_messages=4)
    for number in range(4):
        await memory.aput_messages(turn(number))
        await memory.aflush()
    left = [stored.message.content for stored in await memory.amessages()][:4]
    assert left == ["question 0", "answer 0", "question 1", "answer 1"]
    assert [text for batch in block.batches for text in batch] == left


async def test_silence_makes_everything_due_by_the_storages_clock(make: Make, make_storage: Any) -> None:
    clock = Clock()
    storage = make_storage("file", clock=clock)
    await make(RecordingBlock(), storage=storage).aput(said("user", "unanswered"))
    for seconds, batches in ((59, []), (1, [["unanswered"]])):
        clock.pass_seconds(seconds)
        block = RecordingBlock(idle_seconds=60)
        memory = make(block, storage=storage)  # as after a restart
        await memory.aget()
        await settled(memory)
        assert block.batches == batches


async def test_silence_on_a_running_loop_needs_no_further_call(make: Make) -> None:
    block = RecordingBlock(idle_seconds=0.05)
    memory = make(block, delivery="background")
    await memory.aput(said("user", "unanswered"))
    await until(lambda: bool(block.batches), what="a batch after silence")
    assert block.batches == [["unanswered"]]


async def test_each_block_has_its_own_measure_of_silence(make: Make) -> None:
    quick, slow = RecordingBlock(name="Quick", idle_seconds=0.05), RecordingBlock(name="Slow", idle_seconds=0.4)
    memory = make(quick, slow, delivery="background")
    await memory.aput(said("user", "unanswered"))
    await until(lambda: bool(quick.batches), what="the quick block's batch")
    await settled(memory)
    assert slow.batches == []
    await until(lambda: bool(slow.batches), what="the slow block's batch")
    assert len(quick.batches) == 1


async def test_a_batch_is_bounded_by_messages_and_by_tokens(make: Make) -> None:
    many = RecordingBlock(name="Many", absorb_every=1000)
    large = RecordingBlock(name="Large", absorb_every=1000, batch_tokens=50)
    memory = make(many, large)
    await memory.aput_messages([said("user", f"word {number} " * 10) for number in range(80)])
    await absorb_all(memory)
    assert [len(batch) for batch in many.batches] == [64, 16]
    assert {len(batch) for batch in large.batches} == {1}
    assert_tiled((await told(memory.storage, "Large")).ranges, {"chat": 80})


# --- in the background, inline, on request --------------------------------------------------------------------


async def test_a_put_does_not_wait_for_a_slow_block_and_many_puts_are_few_batches(make: Make) -> None:
    gate = Gate()
    block = RecordingBlock(on_prepare=gate)
    memory = make(block, delivery="background")
    await memory.aput_messages(turn(0))
    await gate.entered.wait()
    for number in range(1, 20):
        await memory.aput_messages(turn(number))
    assert gate.passed == 0
    gate.opened.set()
    await settled(memory)
    assert [len(batch) for batch in block.batches] == [2, 38]


async def test_inline_delivery_is_done_when_the_put_returns(make: Make) -> None:
    memory = make(RecordingBlock(), delivery="inline")
    await memory.aput_messages(turn(0))
    assert (await told(memory.storage)).texts == ["question 0", "answer 0"]


async def test_a_flush_right_after_a_put_leaves_nothing_waiting(make: Make) -> None:
    memory = make(RecordingBlock(), delivery="background")
    for number in range(10):
        await memory.aput_messages(turn(number))
        report = await memory.aflush()
        assert report.complete, str(report)
        assert len((await told(memory.storage)).texts) == 2 * (number + 1)


async def test_a_flush_waits_for_what_a_slow_block_is_at(make: Make) -> None:
    gate = Gate()
    memory = make(RecordingBlock(on_prepare=gate), delivery="background")
    await memory.aput_messages(turn(0))
    await gate.entered.wait()
    flushing = asyncio.create_task(memory.aflush())
    await asyncio.sleep(0.02)
    assert not flushing.done()
    gate.opened.set()
    assert (await flushing).complete


async def test_the_report_of_a_flush_says_what_was_absorbed_what_waits_and_why(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    good = RecordingBlock(name="Good", absorb_every=100)
    bad = RecordingBlock(name="Bad", absorb_every=100, on_prepare=refuse_content("question"))
    late = RecordingBlock(name="Late", absorb_on=frozenset({"flush"}))
    memory = make(good, bad, late)
    await memory.aput_messages(turn(0))
    report = await memory.aflush()
    by_name = {block.block: block for block in report.blocks}
    assert (by_name["Good"].absorbed, by_name["Good"].pending, by_name["Good"].error) == (2, 0, None)
    assert (by_name["Bad"].absorbed, by_name["Bad"].pending, by_name["Bad"].error) == (0, 2, "BadContentError")
    assert (by_name["Late"].absorbed, by_name["Late"].pending, by_name["Late"].error) == (0, 2, None)
    assert [by_name[name].in_window for name in ("Good", "Bad", "Late")] == [0, 0, 2]
    assert not report.complete
    await memory.aflush()
    logged = [(record.message, record.__dict__["block"], record.__dict__["error"]) for record in caplog.records]
    assert logged == [("block Bad failed (BadContentError)", "Bad", "BadContentError")]
    assert "BadContentError" in str(report)
    assert "question 0" not in str(report)


async def test_a_flush_is_complete_while_what_a_block_does_not_take_yet_stands_in_the_window(make: Make) -> None:
    memory = make(RecordingBlock(absorb_on=frozenset({"flush"})), window_messages=4)
    await memory.aput_messages([*turn(0), *turn(1)])
    report = await memory.aflush()
    assert report.complete
    assert [(block.absorbed, block.pending, block.in_window) for block in report.blocks] == [(0, 4, 4)]
    assert "in window" in str(report)
    await memory.aput_messages([*turn(2), *turn(3)])
    report = await memory.aflush()
    assert report.complete
    left = len(await memory.amessages(MessageStatus.ACTIVE))
    assert [(block.pending, block.in_window) for block in report.blocks] == [(left, left)]


async def test_a_flush_passes_what_was_forgotten_before_what_stands_in_the_window(make: Make) -> None:
    memory = make(RecordingBlock(absorb_on=frozenset({"flush"})))
    await memory.aput_messages([*turn(0), *turn(1)])
    await memory.aforget(ids=[(await memory.amessages())[0].id])
    report = await memory.aflush()
    assert report.complete
    assert [(block.pending, block.in_window) for block in report.blocks] == [(3, 3)]


async def test_a_drain_says_what_waits_for_a_block_that_rests(make: Make) -> None:
    memory = make(RecordingBlock(on_prepare=refuse_content("question")), delivery="inline")
    await memory.aput_messages(turn(0))
    report = await memory.adrain()
    assert not report.complete
    assert [(block.pending, block.error) for block in report.blocks] == [(2, "BadContentError")]


async def test_a_flush_reaches_the_users_other_sessions(make: Make) -> None:
    memory = make(RecordingBlock(absorb_every=100))
    await memory.for_session("other").aput_messages(turn(1))
    await memory.aput_messages(turn(2))
    assert (await memory.aflush()).blocks[0].absorbed == 4
    assert_tiled((await told(memory.storage)).ranges, {"chat": 2, "other": 2})


async def test_flushing_twice_changes_nothing(make: Make) -> None:
    memory = make(RecordingBlock())
    await memory.aput_messages(turn(0))
    await memory.aflush()
    before = await told(memory.storage)
    report = await memory.aflush()
    assert report.blocks[0].absorbed == 0
    assert await told(memory.storage) == before


# --- failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_failing_block_fails_no_put_and_loses_nothing(make: Make, delivery: str) -> None:
    block = RecordingBlock(on_prepare=Outage())
    memory = make(block, delivery=delivery, window_messages=4)
    for number in range(10):
        await memory.aput_messages(turn(number))
        assert await memory.aget()
    assert len(await memory.aget_all()) == 20
    assert block.on_prepare is not None
    block.on_prepare.down = False  # type: ignore[union-attr]
    await absorb_all(memory)
    wanted = [message.content or "" for number in range(10) for message in turn(number)]
    assert (await told(memory.storage)).texts == wanted


async def test_a_failing_block_does_not_hold_up_its_siblings(make: Make) -> None:
    good, bad = RecordingBlock(name="Good"), RecordingBlock(name="Bad", on_prepare=Outage())
    memory = make(good, bad, delivery="background", user_id=None)
    await memory.aput_messages(turn(0))
    await until(lambda: len(good.batches) == 1, what="the first turn")
    await asyncio.sleep(0.05)  # the failing one is pausing now
    calls = len(bad.batches)
    await memory.aput_messages(turn(1))
    await until(lambda: len(good.batches) == 2, what="the second turn")
    assert len(bad.batches) == calls


async def test_a_block_that_failed_is_tried_again_without_another_call(make: Make) -> None:
    outage = Outage()
    memory = make(RecordingBlock(on_prepare=outage), delivery="background")
    await memory.aput_messages(turn(0))
    await until(lambda: outage.calls == 1, what="the first try")
    outage.down = False
    await settled(memory)
    assert outage.calls == 2
    assert len((await told(memory.storage)).texts) == 2


async def test_bad_content_halves_the_batch_and_parks_exactly_the_message_at_fault(make: Make) -> None:
    block = RecordingBlock(absorb_every=1000, on_prepare=refuse_content("poison"))
    memory = make(block)
    contents = [f"message {number}" if number != 40 else "poison pill" for number in range(70)]
    await memory.aput_messages([said("user", content) for content in contents])
    await absorb_all(memory)
    assert_once((await told(memory.storage)).texts, [content for content in contents if content != "poison pill"])
    failed = [len(batch) for batch in block.batches if "poison pill" in batch]
    assert failed[-8:] == [30, 30, 16, 8, 4, 2, 1, 1]
    [letter] = await memory.adead_letters()
    assert (letter.session_id, letter.block, letter.lo, letter.hi) == ("chat", "Recorder", 40, 41)
    assert letter.error == "BadContentError"
    assert "poison pill" not in repr(letter)


async def test_an_outage_pauses_a_block_without_counting_against_the_batch(make: Make) -> None:
    outage = Outage()
    memory = make(RecordingBlock(absorb_every=100, on_prepare=outage))
    await memory.aput_messages(turn(0))
    for _ in range(12):
        report = await memory.aflush()
        assert (report.blocks[0].pending, report.blocks[0].error) == (2, "ConnectionError")
    assert outage.calls == 12
    assert await memory.adead_letters() == []
    [row] = await rows(memory.storage, "SELECT attempts, error FROM {t}_cursors")
    assert tuple(row) == (0, "ConnectionError")
    outage.down = False
    assert (await memory.aflush()).complete
    assert len((await told(memory.storage)).texts) == 2


async def test_a_block_that_takes_too_long_is_given_less_at_a_time(make: Make) -> None:
    async def slow(batch: Batch) -> None:
        await asyncio.sleep(60 if len(batch.messages) > 20 else 0)

    block = RecordingBlock(absorb_every=1000, timeout_seconds=0.1, on_prepare=slow)
    memory = make(block)
    await memory.aput_messages([said("user", f"message {number}") for number in range(70)])
    report = await memory.aflush()
    assert (report.blocks[0].pending, report.blocks[0].error) == (70, "TimeoutError")
    await absorb_all(memory)
    assert [len(batch) for batch in block.batches[:3]] == [64, 32, 16]
    assert (await told(memory.storage)).texts == [f"message {number}" for number in range(70)]


async def test_a_block_that_always_takes_too_long_parks_nothing(make: Make) -> None:
    memory = make(RecordingBlock(timeout_seconds=0.01, absorb_every=100, on_prepare=Gate()))
    await memory.aput_messages(turn(0))
    for _ in range(12):
        report = await memory.aflush()
        assert (report.blocks[0].pending, report.blocks[0].error) == (2, "TimeoutError")
    assert await memory.adead_letters() == []
    # One alone at last, which has as many tries left as any other.
    assert [tuple(row) for row in await rows(memory.storage, "SELECT attempts, claim FROM {t}_cursors")] == [(6, None)]


class RefusedError(Exception):
    """What HTTP clients raise."""

    def __init__(self, status_code: int) -> None:
        super().__init__("refused")
        self.status_code = status_code


@pytest.mark.parametrize("error", [*map(RefusedError, (401, 402, 403, 404, 429, 503)), asyncio.TimeoutError()])
async def test_what_a_service_refuses_whatever_it_is_asked_is_held_against_no_message(
    make: Make, error: Exception
) -> None:
    def refuse(_: object) -> None:
        raise error

    memory = make(RecordingBlock(absorb_every=100, on_prepare=refuse))
    await memory.aput_messages(turn(0))
    for _ in range(9):
        await memory.aflush()
    assert await memory.adead_letters() == []
    assert (await rows(memory.storage, "SELECT attempts FROM {t}_cursors"))[0].attempts == 0


async def test_many_contexts_in_a_row_do_not_hurry_a_block_that_rests(make: Make) -> None:
    await make(session_id="monday").aput_messages(turn(0))
    block = RecordingBlock(on_prepare=refuse_content("question"))
    memory = make(block, session_id="today")
    for _ in range(20):
        await memory.aget("hello")
    assert 1 <= len(block.batches) < 8
    assert await memory.adead_letters() == []


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_put_that_was_stored_does_not_fail_because_of_what_follows(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, delivery: str
) -> None:
    memory = make(RecordingBlock(), delivery=delivery, window_messages=2)
    await memory.aput_messages(turn(0))
    await absorb_all(memory)
    await until(lambda: not memory._shared.delivery._tasks, what="the end of what went well")

    async def refuse(*_: object, **__: object) -> None:
        raise StorageUnavailableError("down", allowed="up", remedy="wait")

    with monkeypatch.context() as patch:
        patch.setattr(memory.storage.log, "archive", refuse)
        patch.setattr(memory.storage.cursors, "claim", refuse)
        await memory.aput_messages(turn(1))
        await until(lambda: not memory._shared.delivery._tasks, what="the end of what failed")
    # One for the flush, one for the delivery, and no text of a message in them.
    assert [getattr(record, "error", "StorageUnavailableError") for record in caplog.records] == [
        "StorageUnavailableError"
    ] * 2
    assert "question" not in caplog.text
    await memory.aput_messages(turn(2))
    await absorb_all(memory)
    wanted = [message.content or "" for number in range(3) for message in turn(number)]
    assert [message.content for message in await memory.aget_all()] == wanted
    assert (await told(memory.storage)).texts == wanted
    assert len((await memory._window.read()).messages) == 2


async def test_a_put_at_the_moment_a_worker_ends_is_not_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make(RecordingBlock(), delivery="background")
    await memory.aput_messages(turn(0))
    await settled(memory)
    delivery = memory._shared.delivery
    real, unattended = delivery.deliver, make()
    puts = [turn(1)]

    async def deliver(key: Any, **arguments: Any) -> Any:
        progress = await real(key, **arguments)
        if puts:
            await unattended.aput_messages(puts.pop())
            # Runs between the worker's return and the loop's notice that it has returned.
            asyncio.get_running_loop().call_soon(delivery.schedule, key)
        return progress

    monkeypatch.setattr(delivery, "deliver", deliver)
    delivery.schedule(("ada", "chat"))
    await until(lambda: not delivery._tasks, what="the end of background work")
    assert (await told(memory.storage)).texts == ["question 0", "answer 0", "question 1", "answer 1"]


@pytest.mark.parametrize("user_id", ["ada", None])
async def test_a_message_deleted_while_a_block_is_at_it_is_not_learnt(make: Make, user_id: str | None) -> None:
    gate = Gate()
    memory = make(RecordingBlock(on_prepare=gate), delivery="background", user_id=user_id)
    await memory.aput_messages(turn(0))
    await gate.entered.wait()
    await TieredChatStore(memory.storage, user_id=user_id).delete_message("chat", 1)
    gate.opened.set()
    await settled(memory)
    await absorb_all(memory)
    assert (await told(memory.storage)).texts == ["answer 0"]


async def parked(memory: TieredMemory) -> DeadLetter:
    await memory.aput(said("user", "poison"))
    await absorb_all(memory)
    [letter] = await memory.adead_letters()
    return letter


async def test_a_dead_letter_that_succeeds_later_is_absorbed_once_and_gone(make: Make) -> None:
    block = RecordingBlock(on_prepare=refuse_content("poison"))
    memory = make(block)
    await parked(memory)
    await memory.aput_messages(turn(0))
    block.on_prepare = None
    report = await memory.areplay()
    assert (report.blocks[0].absorbed, report.complete) == (1, True)
    assert await memory.adead_letters() == []
    assert (await memory.areplay()).blocks[0].absorbed == 0
    assert_once((await told(memory.storage)).texts, ["poison", "question 0", "answer 0"])


async def test_a_dead_letter_is_read_with_what_was_said_before_it(make: Make) -> None:
    before: list[list[str]] = []

    def note(batch: Batch) -> None:
        before.append([stored.text for stored in batch.before])

    block = ModelRecordingBlock(on_prepare=refuse_content("poison"))
    memory = make(block)
    await memory.aput_messages(turn(0))
    await parked(memory)
    block.on_prepare = note
    await memory.areplay()
    assert before == [["question 0", "answer 0"]]


async def test_a_dead_letter_that_fails_again_stays(make: Make) -> None:
    memory = make(RecordingBlock(on_prepare=refuse_content("poison")))
    letter = await parked(memory)
    report = await memory.areplay()
    assert (report.blocks[0].pending, report.blocks[0].error) == (1, "BadContentError")
    assert await memory.adead_letters() == [letter]


async def test_two_replays_at_once_absorb_a_letter_once(make: Make) -> None:
    block = RecordingBlock(on_prepare=refuse_content("poison"))
    memory = make(block)
    await parked(memory)
    block.on_prepare = None
    await asyncio.gather(memory.areplay(), memory.areplay())
    assert (await told(memory.storage)).texts == ["poison"]


# --- claims ---------------------------------------------------------------------------------------------------


async def test_a_dead_workers_claim_is_respected_until_it_expires(make: Make, make_storage: Any) -> None:
    clock = Clock()
    memory = make(RecordingBlock(absorb_every=100), storage=make_storage("file", clock=clock))
    await memory.aput_messages(turn(0))
    now = memory.storage.now()
    await memory.storage.cursors.claim(1, "Recorder", "dead worker", now=now, until=now + 30_000_000)
    for seconds in (0, 29, 1):
        clock.pass_seconds(seconds)
        report = await memory.aflush()
        assert (report.blocks[0].pending, report.blocks[0].error) == (2, "busy")
    clock.pass_seconds(0.001)
    assert (await memory.aflush()).blocks[0].absorbed == 2


async def test_a_clock_that_is_set_back_does_not_prolong_a_dead_workers_claim(make: Make, make_storage: Any) -> None:
    clock = Clock()
    memory = make(RecordingBlock(absorb_every=100), storage=make_storage("file", clock=clock))
    await memory.aput_messages(turn(0))
    now = memory.storage.now()
    await memory.storage.cursors.claim(1, "Recorder", "dead worker", now=now, until=now + 30_000_000)
    clock.pass_seconds(-60)  # as far as the clocks of two hosts may differ
    assert (await memory.aflush()).blocks[0].error == "busy"
    clock.pass_seconds(-86_400)
    assert (await memory.aflush()).blocks[0].absorbed == 2


async def test_the_background_waits_for_a_dead_workers_claim_by_itself(make: Make) -> None:
    memory = make(RecordingBlock(), delivery="background")
    await memory.aput(said("user", "first"))
    await settled(memory)
    now = memory.storage.now()
    await memory.storage.cursors.claim(1, "Recorder", "dead worker", now=now, until=now + 100_000)
    await memory.aput(said("assistant", "second"))
    await settled(memory)
    assert (await told(memory.storage)).texts == ["first", "second"]


async def test_a_living_worker_renews_its_claim_and_is_not_overtaken(make: Make, make_storage: Any) -> None:
    gate = Gate()
    first = make(RecordingBlock(on_prepare=gate), delivery="background", claim_seconds=1.0)
    await first.aput_messages(turn(0))
    await gate.entered.wait()
    block = RecordingBlock()
    second = make(block, storage=make_storage("file"), claim_seconds=1.0)  # as another process
    for _ in range(8):
        assert (await second.aflush()).blocks[0].error == "busy"
        await asyncio.sleep(0.25)
    gate.opened.set()
    await settled(first)
    assert (await second.aflush()).complete
    assert block.batches == []
    assert (await told(first.storage)).texts == ["question 0", "answer 0"]


async def test_a_claim_outlives_a_renewal_that_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    memory = make(RecordingBlock(on_prepare=gate), delivery="background", claim_seconds=1.0)
    real, calls = memory.storage.cursors.renew, []

    async def renew(*arguments: Any, **named: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise StorageUnavailableError("down", allowed="up", remedy="wait")
        await real(*arguments, **named)

    monkeypatch.setattr(memory.storage.cursors, "renew", renew)
    await memory.aput_messages(turn(0))
    await until(lambda: len(calls) > 1, what="another renewal")
    gate.opened.set()
    await settled(memory)
    assert (await told(memory.storage)).texts == ["question 0", "answer 0"]


async def test_a_worker_that_was_overtaken_writes_nothing(make: Make, make_storage: Any) -> None:
    gate, ahead = Gate(), Clock()
    behind = Clock()
    first = make(RecordingBlock(on_prepare=gate), storage=make_storage("file", clock=behind), delivery="background")
    await first.aput_messages(turn(0))
    await gate.entered.wait()
    ahead.pass_seconds(1000)  # for the other worker the claim has long expired
    block = RecordingBlock()
    second = make(block, storage=make_storage("file", clock=ahead))
    assert (await second.aflush()).blocks[0].absorbed == 2
    gate.opened.set()
    await settled(first)
    assert gate.passed == 1
    assert_once((await told(first.storage)).texts, ["question 0", "answer 0"])
    assert_tiled((await told(first.storage)).ranges, {"chat": 2})


async def test_closing_gives_claims_back(make: Make) -> None:
    gate = Gate()
    memory = make(RecordingBlock(on_prepare=gate), delivery="background")
    await memory.aput_messages(turn(0))
    await gate.entered.wait()
    await memory.aclose()
    [row] = await rows(memory.storage, "SELECT pos, claim, attempts FROM {t}_cursors")
    assert tuple(row) == (0, None, 0)


@pytest.mark.parametrize("steps", range(0, 40, 5))
async def test_closing_at_any_moment_leaves_no_claim_behind(make: Make, steps: int) -> None:
    memory = make(RecordingBlock(on_prepare=Gate()), delivery="background")
    await memory.aput_messages(turn(0))
    for _ in range(steps):
        await asyncio.sleep(0)
        await asyncio.sleep(0.0003)
    await memory.aclose()
    assert await rows(memory.storage, "SELECT 1 FROM {t}_cursors WHERE claim IS NOT NULL") == []


@pytest.mark.parametrize("what", ["delivery", "upkeep"])
async def test_a_close_that_is_cancelled_says_so(make: Make, what: str) -> None:
    memory = make(RecordingBlock())
    ending = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.shield(ending.wait())

    part = getattr(memory._shared, what)
    part._tasks.add(task := asyncio.ensure_future(slow_to_end()))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(part.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    ending.set()
    await asyncio.wait([task])


async def test_a_memory_whose_last_flush_fails_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = TieredMemory(session_id="s", storage=tmp_path / "memory.db", memory_blocks=[RecordingBlock()])
    await memory.aput_messages(turn(0))

    async def unavailable(*_: object, **__: object) -> None:
        raise StorageUnavailableError("The database did not answer.", allowed="It answers.", remedy="Wait for it.")

    monkeypatch.setattr(memory.storage.log, "session", unavailable)
    with pytest.raises(StorageUnavailableError):
        await memory.aclose(flush=True)
    assert memory.storage.closed


# --- cancellation, closed loops, restarts ---------------------------------------------------------------------


async def test_a_cancelled_put_is_stored_whole_or_not_at_all(make: Make) -> None:
    memory = make(RecordingBlock(), delivery="background", window_messages=6)
    acknowledged: list[str] = []

    async def put(number: int) -> None:
        await memory.aput_messages([said("user", f"{number} a"), said("assistant", f"{number} b")])
        acknowledged.extend([f"{number} a", f"{number} b"])

    for number in range(40):
        task = asyncio.create_task(put(number))
        await asyncio.sleep(0.0002 * (number % 20))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await memory.aput_messages(turn(0))
    stored = [message.content or "" for message in await memory.aget_all()]
    assert set(acknowledged) <= set(stored)
    assert len(set(stored)) == len(stored)
    assert all((f"{number} a" in stored) == (f"{number} b" in stored) for number in range(40))
    await absorb_all(memory)
    assert_once((await told(memory.storage)).texts, stored)
    assert_tiled((await told(memory.storage)).ranges, {"chat": len(stored)})


def test_a_delivery_cut_off_with_its_loop_is_made_up_by_the_next_call(tmp_path: Path) -> None:
    block = RecordingBlock()
    memory = TieredMemory(storage=tmp_path / "memory.db", user_id="ada", session_id="chat", memory_blocks=[block])

    async def cut_off() -> None:
        gate = Gate()
        block.on_prepare = gate
        await memory.aput_messages(turn(0))
        await gate.entered.wait()

    async def go_on() -> list[str]:
        block.on_prepare = None
        await memory.aput(said("user", "next"))
        found = (await told(memory.storage)).texts
        await memory.aclose()
        return found

    asyncio.run(cut_off())
    assert asyncio.run(go_on()) == ["question 0", "answer 0"]


def test_puts_in_loops_of_their_own_are_all_delivered(tmp_path: Path) -> None:
    memory = TieredMemory(
        storage=tmp_path / "memory.db", user_id="ada", session_id="chat", memory_blocks=[RecordingBlock()]
    )
    for number in range(5):
        asyncio.run(memory.aput_messages(turn(number)))

    async def finish() -> list[str]:
        await absorb_all(memory)
        found = (await told(memory.storage)).texts
        await memory.aclose()
        return found

    assert asyncio.run(finish()) == [message.content for number in range(5) for message in turn(number)]


async def test_a_restart_goes_on_where_the_last_process_stopped(make: Make, make_storage: Any) -> None:
    first = make(RecordingBlock(), delivery="background")
    await first.aput_messages(turn(0))
    await first.aclose()
    await first.storage.aclose()
    second = make(RecordingBlock(), storage=make_storage("file"), delivery="background")
    await second.aput_messages(turn(1))
    await absorb_all(second)
    wanted = [message.content or "" for number in range(2) for message in turn(number)]
    assert (await told(second.storage)).texts == wanted


async def test_a_crash_before_the_first_delivery_is_not_taken_for_a_block_attached_later(make: Make) -> None:
    first = make(ModelRecordingBlock(), delivery="background")
    await first.aput_messages(turn(0))
    await first.aclose()
    assert (await told(first.storage)).texts == []
    second = make(ModelRecordingBlock())
    assert (await second.aflush()).blocks[0].absorbed == 2


@pytest.mark.parametrize("kind", [RecordingBlock, ModelRecordingBlock])
async def test_a_session_that_two_memories_begin_at_once_is_read_by_the_blocks_of_both(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: type[RecordingBlock]
) -> None:
    one, other = make(RecordingBlock(name="One")), make(kind(name="Other"))
    real, arrived, both = one.storage.log.append, [], asyncio.Event()

    async def together(*args: Any, **kwargs: Any) -> Any:
        arrived.append(args)
        if len(arrived) == 2:
            both.set()
        await both.wait()  # neither knew of the other's session
        return await real(*args, **kwargs)

    monkeypatch.setattr(one.storage.log, "append", together)
    await asyncio.gather(one.aput_messages(turn(0)), other.aput_messages(turn(1)))
    await one.aput_messages(turn(2))
    for memory in (one, other):
        await memory.aflush()
        await memory.aflush()
    assert [len((await told(one.storage, name)).texts) for name in ("One", "Other")] == [6, 6]


async def test_nothing_waits_for_silence_once_a_memory_has_stopped(make: Make) -> None:
    memory = make(RecordingBlock(), delivery="background")
    await memory.aput_messages(turn(0))
    await memory.aflush()
    await memory.astop()
    await memory.aput(said("user", "are you there?"))
    assert memory._shared.delivery._timers == {}


async def test_the_first_use_sees_to_a_users_other_sessions(make: Make) -> None:
    unattended = make(delivery="inline")
    for session in ("monday", "tuesday"):
        await unattended.for_session(session).aput_messages(turn(0))
    await unattended.for_session("wednesday", user_id="bob").aput_messages(turn(0))
    memory = make(RecordingBlock(), session_id="today", delivery="background")
    await memory.aget("hello")
    await settled(memory)
    assert_tiled((await told(memory.storage)).ranges, {"monday": 2, "tuesday": 2})


async def test_a_session_that_failed_in_the_drain_is_tried_again(make: Make) -> None:
    await make(session_id="monday").aput_messages(turn(0))
    outage = Outage()
    memory = make(RecordingBlock(on_prepare=outage), session_id="today", delivery="background")
    await memory.aget("hello")
    await until(lambda: outage.calls >= 1, what="the drain")
    outage.down = False
    await settled(memory)
    assert len((await told(memory.storage)).texts) == 2


async def test_closing_calls_no_model_unless_asked(make: Make) -> None:
    block = ModelRecordingBlock(absorb_every=100)
    memory = make(block)
    await memory.aput_messages(turn(0))
    await memory.aclose()
    assert block.batches == []
    again = make(block)
    await again.aclose(flush=True)
    assert [len(batch) for batch in block.batches] == [2]


async def test_closing_stops_the_background_work_of_other_loops_as_well(make: Make) -> None:
    started: list[int] = []

    async def slow(_: object) -> None:
        started.append(threading.get_ident())
        await asyncio.sleep(0.05)

    memory = make(RecordingBlock(on_prepare=slow, batch_tokens=1), delivery="background")
    many = [message for number in range(20) for message in turn(number)]
    await memory.aput_messages(many)
    # From a script's thread, whose work goes on in a loop of its own.
    await asyncio.to_thread(memory.for_session("other").put_messages, many)
    await until(lambda: len(set(started)) == 2, what="both loops at work")
    await memory.aclose()
    await until(lambda: not memory._shared.delivery._tasks, what="the end of both")
    count = len(started)
    await asyncio.sleep(0.2)
    assert len(started) == count < 80


# --- blocks that come later, change their names, or are not ours ----------------------------------------------


@pytest.mark.parametrize(
    ("block", "batches"),
    [
        (RecordingBlock(), [["question 0", "answer 0"], ["question 1", "answer 1"]]),
        (ModelRecordingBlock(), [["question 1", "answer 1"]]),
        (ModelRecordingBlock(backfill=True), [["question 0", "answer 0"], ["question 1", "answer 1"]]),
    ],
    ids=["without a model at the beginning", "with a model at the head", "backfilled"],
)
async def test_a_block_on_an_old_session_starts(make: Make, block: RecordingBlock, batches: list[list[str]]) -> None:
    await make().aput_messages(turn(0))
    memory = make(block)
    await memory.aflush()
    await memory.aput_messages(turn(1))
    assert block.batches == batches


@pytest.mark.parametrize("delivery", ["inline", "background"])
async def test_a_block_on_an_old_session_sees_the_first_put_after_it_came(make: Make, delivery: str) -> None:
    await make().aput_messages(turn(0))
    block, foreign = ModelRecordingBlock(), ListeningBlock()
    memory = make(block, foreign, delivery=delivery)
    await asyncio.gather(memory.aput_messages(turn(1)), memory.aput_messages(turn(2)))
    await absorb_all(memory)
    assert_once(
        [text for batch in block.batches for text in batch],
        [message.content or "" for number in (1, 2) for message in turn(number)],
    )
    assert len([message for _, messages in foreign.given for message in messages]) == 4


async def test_a_renamed_block_begins_anew_and_leaves_the_old_records(make: Make) -> None:
    await make(RecordingBlock(name="Old")).aput_messages(turn(0))
    memory = make(RecordingBlock(name="New"))
    await memory.aflush()
    for name in ("Old", "New"):
        assert (await told(memory.storage, name)).texts == ["question 0", "answer 0"]
        assert_tiled((await told(memory.storage, name)).ranges, await heads(memory.storage))


async def test_a_foreign_block_gets_every_message_at_least_once_under_its_session(make: Make) -> None:
    block = ListeningBlock(refuse=2)
    memory = make(block)
    for number in range(3):
        await memory.aput_messages(turn(number))
        await memory.for_session("other").aput_messages(turn(10 + number))
    await absorb_all(memory)
    heard = {(session, message.content) for session, messages in block.given for message in messages}
    assert heard == {
        (session, message.content)
        for session, first in (("chat", 0), ("other", 10))
        for number in range(first, first + 3)
        for message in turn(number)
    }


async def test_a_foreign_block_that_succeeded_is_not_given_a_message_again(make: Make) -> None:
    block = ListeningBlock()
    memory = make(block)
    for number in range(3):
        await memory.aput_messages(turn(number))
        await memory.aflush()
    await memory.aflush()
    assert_once(
        [message.content or "" for _, messages in block.given for message in messages],
        [message.content or "" for number in range(3) for message in turn(number)],
    )


async def test_a_foreign_block_gets_copies(make: Make) -> None:
    block = ListeningBlock()
    memory = make(block)
    await memory.aput_messages(turn(0))
    await memory.aflush()
    [(_, messages)] = block.given
    messages[0].blocks.clear()
    messages[0].additional_kwargs["changed"] = True
    assert [message.content for message in await memory.aget_all()] == ["question 0", "answer 0"]


async def test_sessions_share_blocks_and_storage_and_keep_their_messages_apart(make: Make) -> None:
    block = RecordingBlock(scope="session")
    memory = make(block)
    twin, bob = memory.for_session("other"), memory.for_session("chat", user_id="bob")
    for each, number in ((memory, 0), (twin, 1), (bob, 2)):
        await each.aput_messages(turn(number))
        assert [message.content for message in await each.aget_all()] == [m.content for m in turn(number)]
    owners = await rows(memory.storage, "SELECT DISTINCT owner, text FROM {t}_records WHERE kind = 'heard'")
    assert len({row.owner for row in owners}) == 3
    await twin.aclose()
    await memory.aput_messages(turn(3))  # closing a twin leaves what is shared open


async def test_two_memories_that_know_nothing_of_each_other_absorb_once(make: Make, make_storage: Any) -> None:
    first = make(RecordingBlock(), delivery="background")
    second = make(RecordingBlock(), storage=make_storage("file"), delivery="background")
    for number in range(0, 20, 2):
        await asyncio.gather(first.aput_messages(turn(number)), second.aput_messages(turn(number + 1)))
    await absorb_all(first)
    await absorb_all(second)
    wanted = [message.content or "" for number in range(20) for message in turn(number)]
    assert_once((await told(first.storage)).texts, wanted)
    assert_tiled((await told(first.storage)).ranges, {"chat": 40})


async def test_a_message_said_long_ago_is_delivered_in_the_order_of_the_puts(make: Make) -> None:
    memory = make(RecordingBlock())
    await memory.aput(said("user", "first"), created_at=datetime(2026, 1, 1, tzinfo=timezone.utc))
    await memory.aput(said("user", "second"), created_at=datetime(1999, 1, 1, tzinfo=timezone.utc))
    await memory.aflush()
    assert (await told(memory.storage)).texts == ["first", "second"]


async def test_nothing_is_absorbed_while_a_put_of_another_session_is_under_way(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = RecordingBlock()
    memory = make(block, delivery="background")
    await memory.aput(said("user", "before"))
    real, go_on = memory.storage.log.append, asyncio.Event()

    async def slow(user_id: str, session_id: str, *args: Any, **kwargs: Any) -> Any:
        if session_id == "slow":
            await go_on.wait()
        return await real(user_id, session_id, *args, **kwargs)

    monkeypatch.setattr(memory.storage.log, "append", slow)
    monkeypatch.setattr(pacing, "_HOLD_BACK_SECONDS", 30)
    held = asyncio.create_task(memory.for_session("slow").aput(said("user", "held")))
    await memory.aput(said("assistant", "answer"))
    await asyncio.wait(memory._shared.delivery._tasks, timeout=0.1)
    assert block.batches == []
    go_on.set()
    await held
    await settled(memory)
    assert block.batches == [["before", "answer"]]


@pytest.mark.parametrize("steps", range(5))
async def test_closing_ends_what_begins_at_the_same_moment(make: Make, steps: int) -> None:
    def down(_: Batch) -> None:
        raise ConnectionError

    memory = make(RecordingBlock(on_prepare=down), delivery="background")
    await memory.aput_messages(turn(0))
    with memory._shared.delivery.serving():
        await memory.for_session("other").aput_messages(turn(1))
        await asyncio.sleep(0.05)  # its worker waits for the caller to have been served
    for _ in range(steps):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(memory.aclose())
    ended, _ = await asyncio.wait({closing}, timeout=3)
    for task in memory._shared.delivery._tasks:
        task.cancel()
    assert ended


async def test_deliveries_that_fall_behind_hold_up_no_put_and_wait_in_the_log(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of sessions is read at once, however many have something to say."""
    monkeypatch.setattr(pacing, "_AT_ONCE", 3)
    gate = Gate()
    running = most = 0

    async def held(batch: Batch) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate(batch)
        running -= 1

    block = RecordingBlock(on_prepare=held)
    memory = make(block, delivery="background")
    sessions = [memory.for_session(f"chat {number}", user_id=f"u{number}") for number in range(12)]
    for number in range(4):
        await asyncio.gather(*(session.aput_messages(turn(number)) for session in sessions))
    await until(lambda: running > 0, what="sessions are read")
    waiting = memory._shared.delivery
    assert len(waiting._tasks) <= 2 * len(sessions)  # for the session and for its user, whatever was put
    gate.opened.set()
    await until(lambda: not waiting._tasks, what="all deliveries have ended")
    assert 0 < most <= 3
    assert len((await told(memory.storage)).texts) == 12 * 4 * 2
