"""Facts that change: what takes the place of what, by when it was said; history; changes by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers import ConfigurationError, FactExtractionMemoryBlock, FactProposal, Storage, TieredMemory
from llama_index_memory_tiers.blocks.facts.changes import Move, Outcome, decide, key_of
from llama_index_memory_tiers.blocks.facts.desk import Facts
from llama_index_memory_tiers.records import NewRecord, Record, StoredMessage
from llama_index_memory_tiers.testing import ScriptedLLM
from tests.doubles import Clock, said

DIALOGUES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "fact_dialogues.jsonl").read_text("utf-8").splitlines()
]
DAY = datetime(2025, 3, 8, 9, 30, tzinfo=timezone.utc)


class Told(ScriptedLLM):
    """A scripted model that names known facts by a piece of their text, and gives the numbers that it is shown."""

    def __init__(self, *answers: Any) -> None:
        given = list(answers)

        def reply(messages: Sequence[ChatMessage]) -> str:
            prompt = "\n".join(message.content or "" for message in messages)
            return "\n".join(json.dumps(_numbered(one, prompt), ensure_ascii=False) for one in given.pop(0)) or "[]"

        super().__init__(reply)

    @property
    def prompts(self) -> list[str]:
        return ["\n".join(message.content or "" for message in call) for call in self.calls]


def _numbered(proposal: dict[str, Any], prompt: str) -> dict[str, Any]:
    known = prompt.partition("<known_facts>")[2].partition("</known_facts>")[0]
    lines = dict(re.findall(r"^\[(\d+)\] (.*)$", known, re.MULTILINE))

    def numbers(pieces: Sequence[str]) -> list[int]:
        return [
            number
            for piece in pieces
            for number in (
                [int(piece[1:])] if piece[0] == "#" else [int(at) for at, line in lines.items() if piece in line]
            )
        ]

    return {
        name: numbers(held) if name in {"replaces", "retract", "confirm"} else held for name, held in proposal.items()
    }


def fact(subject: str, relation: str, value: str, *, said: Sequence[int] = (1,), **more: Any) -> dict[str, Any]:
    return {
        "subject": subject,
        "relation": relation,
        "value": value,
        "fact": f"{subject} {relation} {value}.",
        "said": list(said),
        **more,
    }


def make(storage: Storage, *answers: Any, user: str = "maya", **fields: Any) -> tuple[TieredMemory, Facts]:
    block = FactExtractionMemoryBlock(**{"llm": Told(*answers), **fields})
    memory = TieredMemory(storage=storage, user_id=user, session_id="one", memory_blocks=[block], delivery="inline")
    return memory, block.of(memory)


async def tell(memory: TieredMemory, *texts: str, at: datetime = DAY, session: str = "one", speaker: str = "") -> None:
    there = memory.for_session(session)
    for number, text in enumerate(texts):
        await there.aput(said("user", text), created_at=at + timedelta(seconds=number), sent_from=speaker)
    report = await there.aflush()
    assert report.complete, report


def texts(facts: Sequence[Any]) -> list[str]:
    return sorted(one.text for one in facts)


# --- labelled dialogues ---------------------------------------------------------------------------------------


def test_the_labelled_set_covers_both_languages_and_every_kind() -> None:
    assert len(DIALOGUES) >= 80
    kinds = {(one["kind"], one["language"]) for one in DIALOGUES}
    assert len(kinds) == 2 * len({kind for kind, _ in kinds})
    assert len({json.dumps(one["steps"]) for one in DIALOGUES}) == len(DIALOGUES)


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=[one["id"] for one in DIALOGUES])
async def test_after_each_step_of_a_dialogue_the_facts_and_what_held_are_right(
    storage: Storage, clock: Clock, dialogue: dict[str, Any]
) -> None:
    memory, facts = make(storage, *(step["answer"] for step in dialogue["steps"]))
    clock.now = datetime.fromisoformat(dialogue["steps"][0]["said_at"])
    for step in dialogue["steps"]:
        at = datetime.fromisoformat(step["said_at"])
        clock.now = max(clock.now, at + timedelta(minutes=1))
        await tell(memory, step["text"], at=at, session=step["session"])
        assert texts(await facts.all()) == sorted(step["current"]), step["text"]
        assert texts(await facts.as_of(at)) == sorted(step["now"]), step["text"]
    for at_text, held in dialogue["as_of"]:
        assert texts(await facts.as_of(datetime.fromisoformat(at_text))) == sorted(held), at_text


# --- what a model proposes ------------------------------------------------------------------------------------


async def test_a_model_is_shown_numbers_and_what_another_fact_must_share(storage: Storage) -> None:
    memory, facts = make(storage, [fact("Maya", "lives in", "Porto")], [])
    await tell(memory, "I live in Porto")
    await tell(memory, "hello")
    block = memory.memory_blocks[0]
    assert isinstance(block, FactExtractionMemoryBlock)
    assert isinstance(block.llm, Told)
    assert "[1] Maya lives in Porto. (Maya / lives in, since 2025-03-08)" in block.llm.prompts[1]
    assert (await facts.all())[0].id not in block.llm.prompts[1]


async def test_a_seed_fact_is_replaced_by_no_proposal(storage: Storage) -> None:
    memory, facts = make(
        storage, [fact("Maya", "lives in", "Porto", replaces=["Lisbon"])], facts=["Maya lives in Lisbon."]
    )
    await tell(memory, "I live in Porto")
    assert texts(await facts.all()) == ["Maya lives in Porto."]
    assert "Lisbon" in str((await memory.aget("where?"))[0].content)


async def test_a_retraction_without_a_line_that_says_so_is_refused(storage: Storage) -> None:
    memory, facts = make(
        storage, [fact("Maya", "lives in", "Porto")], [{"retract": ["Porto"]}, {"retract": ["Porto"], "said": [9]}]
    )
    await tell(memory, "I live in Porto")
    await tell(memory, "What a day")
    assert texts(await facts.all()) == ["Maya lives in Porto."]


async def test_a_late_retraction_does_not_end_what_was_said_since(storage: Storage) -> None:
    memory, facts = make(storage, [fact("Maya", "lives in", "Porto")], [{"retract": ["Porto"], "said": [1]}])
    await tell(memory, "I live in Porto")
    await tell(memory, "I have left Porto", at=DAY - timedelta(days=9), session="two")
    assert texts(await facts.all()) == ["Maya lives in Porto."]


async def test_who_takes_back_and_says_in_one_breath_keeps_what_was_said(storage: Storage) -> None:
    memory, facts = make(
        storage,
        [fact("Maya", "likes", "tea")],
        [fact("Maya", "likes", "tea", replaces=["tea"]), {"retract": ["tea"], "said": [1]}],
    )
    await tell(memory, "I like tea")
    await tell(memory, "I still like tea", at=DAY + timedelta(days=1))
    assert texts(await facts.all()) == ["Maya likes tea."]


async def test_the_day_of_a_relative_date_is_that_of_the_speakers_zone(storage: Storage) -> None:
    memory, facts = make(storage, [fact("Maya", "lives in", "Kyoto", since="yesterday")])
    east = timezone(timedelta(hours=9))
    await tell(memory, "I moved yesterday", at=datetime(2023, 5, 8, 0, 30, tzinfo=east))
    (found,) = await facts.all()
    assert found.valid_from == datetime(2023, 5, 7, tzinfo=east)


@pytest.mark.parametrize(
    ("text", "dated"),
    [
        ("Maya saw the doctor yesterday.", "Maya saw the doctor yesterday (2023-05-07)."),
        ("Maya flies next month.", "Maya flies next month (2023-06)."),
        ("Maya flies in three days.", "Maya flies in three days (2023-05-11)."),
        ("李明昨天去了医院。", "李明昨天 (2023-05-07)去了医院。"),
        ("李明上周五搬家，下个月开学。", "李明上周五 (2023-05-05)搬家，下个月 (2023-06)开学。"),
        ("李明三天后去北京。", "李明三天后 (2023-05-11)去北京。"),
        ("Maya was born on 3 May 1990.", "Maya was born on 3 May 1990."),
    ],
)
async def test_a_relative_date_in_a_fact_and_in_the_prompt_is_worked_out_by_code(
    storage: Storage, text: str, dated: str
) -> None:
    memory, facts = make(storage, [{"fact": text, "said": [1]}])
    await tell(memory, text, at=datetime(2023, 5, 8, 22, tzinfo=timezone.utc))
    assert texts(await facts.all()) == [dated]
    block = memory.memory_blocks[0]
    assert isinstance(block, FactExtractionMemoryBlock)
    assert isinstance(block.llm, Told)
    assert f": {dated}" in block.llm.prompts[0]


async def test_a_pinned_fact_is_neither_replaced_taken_back_nor_put_aside(storage: Storage) -> None:
    memory, facts = make(
        storage,
        [fact("Maya", "lives in", "Porto"), fact("Maya", "has", "a cat")],
        [fact("Maya", "lives in", "Lisbon", replaces=["Porto"]), {"retract": ["Porto"], "said": [1]}],
        [],
        max_facts=2,
    )
    await tell(memory, "I live in Porto and have a cat")
    await facts.pin(next(one for one in await facts.all() if "Porto" in one.text))
    await tell(memory, "I live in Lisbon", at=DAY + timedelta(days=1))
    assert texts(await facts.all()) == ["Maya lives in Lisbon.", "Maya lives in Porto."]


async def test_a_condensed_fact_stands_for_its_facts_from_the_newest_of_them_on(storage: Storage) -> None:
    memory, facts = make(
        storage,
        [fact("Maya", "has", "a cat")],
        [fact("Maya", "has", "a dog")],
        [{"fact": "Maya has a cat and a dog.", "from": [1, 2]}],
        max_facts=1,
    )
    await tell(memory, "I have a cat")
    await tell(memory, "I have a dog", at=DAY + timedelta(days=10))
    assert texts(await facts.all()) == ["Maya has a cat and a dog."]
    assert texts(await facts.as_of(DAY + timedelta(days=5))) == ["Maya has a cat."]
    assert texts(await facts.as_of(DAY + timedelta(days=15))) == ["Maya has a cat and a dog."]


# --- looking and changing by hand -----------------------------------------------------------------------------


async def test_a_fact_answers_what_it_replaced_and_which_messages_say_so(storage: Storage) -> None:
    memory, facts = make(
        storage, [fact("Maya", "lives in", "Porto")], [fact("Maya", "lives in", "Lisbon", replaces=["Porto"])]
    )
    await tell(memory, "I live in Porto")
    await tell(memory, "I moved to Lisbon", at=DAY + timedelta(days=1), session="two")
    (now,) = await facts.all()
    old, new = await facts.history(now)
    assert (old.text, new.id, old.replaced_by) == ("Maya lives in Porto.", now.id, now.id)
    assert old.valid_until == new.valid_from == DAY + timedelta(days=1)
    assert await facts.history(old) == [old, new]
    why, before = await facts.why(now), await facts.why(old)
    assert why is not None
    assert before is not None
    assert [(message.text, message.session_id) for message in why.messages] == [("I moved to Lisbon", "two")]
    assert (why.model, why.prompt) == ("Told", "facts-2")
    assert [message.text for message in before.messages] == ["I live in Porto"]
    assert [message.text for message in before.ended_by] == ["I moved to Lisbon"]
    assert await facts.why("unknown") is None
    assert await facts.history("unknown") == []


async def test_facts_are_written_corrected_and_removed_by_hand_without_secrets(storage: Storage) -> None:
    memory, facts = make(storage)
    made = await facts.add("Maya's password is hunter2secret!9", subject="Maya", relation="logs in with")
    assert "hunter2secret" not in made.text
    assert await facts.edit(made, "Maya logs in with a key.", value="a key") == (await facts.all())[0]
    for _ in range(3):
        again = await facts.add("Maya logs in with a key")
    assert again.id == made.id
    assert again.confirmed_at is not None
    assert str((await memory.aget("how does Maya log in?"))[0].content).count("logs in") == 1
    gone = await facts.delete(made)
    assert gone is not None
    assert gone.text == "Maya logs in with a key."
    assert await facts.delete(made) is None
    assert (await facts.all(), await facts.history(made), await facts.as_of(storage.clock())) == ([], [], [])


async def test_by_hand_any_fact_takes_the_place_of_any_other(storage: Storage, clock: Clock) -> None:
    _, facts = make(storage)
    old = await facts.add("Maya lives in Porto.")
    clock.pass_seconds(60)
    new = await facts.add("She is in Lisbon.", replaces=old)
    assert texts(await facts.all()) == ["She is in Lisbon."]
    assert [one.id for one in await facts.history(new)] == [old.id, new.id]
    clock.pass_seconds(60)
    over = await facts.retract(new)
    assert (over.retracted, over.current) == (True, False)
    assert await facts.all() == []
    with pytest.raises(ConfigurationError, match="nobody"):
        await facts.add("x y", replaces="nobody")
    with pytest.raises(ConfigurationError, match="text"):
        await facts.add("  ")


async def test_nobody_sees_or_changes_the_facts_of_another_user(storage: Storage) -> None:
    _, mine = make(storage)
    _, theirs = make(storage, user="tom")
    made = await mine.add("Maya lives in Porto.")
    assert (await theirs.all(), await theirs.history(made), await theirs.delete(made)) == ([], [], None)
    assert await theirs.why(made) is None
    for attempt in (theirs.pin(made), theirs.edit(made, "x is y"), theirs.retract(made), theirs.confirm(made)):
        with pytest.raises(ConfigurationError):
            await attempt
    assert texts(await mine.all()) == ["Maya lives in Porto."]


async def test_the_review_list_holds_what_nobody_has_confirmed_for_long(storage: Storage, clock: Clock) -> None:
    clock.now = DAY
    memory, facts = make(
        storage, [fact("Maya", "has", "a cat"), fact("Maya", "has", "a dog")], [{"confirm": ["dog"], "said": [1]}]
    )
    await tell(memory, "I have a cat and a dog")
    pinned = await facts.add("Maya is 34.", pinned=True)
    clock.now = DAY + timedelta(days=60)
    await tell(memory, "My dog is well", at=clock.now)
    clock.now = DAY + timedelta(days=100)
    assert texts(await facts.unconfirmed(90)) == ["Maya has a cat."]
    await facts.confirm((await facts.unconfirmed(90))[0])
    assert await facts.unconfirmed(90) == []
    assert pinned.text not in texts(await facts.unconfirmed(1))


async def test_a_block_that_the_memory_does_not_have_gives_no_facts(storage: Storage) -> None:
    memory, _ = make(storage)
    with pytest.raises(ConfigurationError, match="Others"):
        FactExtractionMemoryBlock(name="Others", llm=Told()).of(memory)


# --- without a model ------------------------------------------------------------------------------------------


def _city(messages: list[StoredMessage]) -> list[FactProposal]:
    return [
        FactProposal(
            subject="user", relation="lives in", value=found[1], action="supersede", since=found[2], said=(message.id,)
        )
        for message in messages
        if (found := re.search(r"I live in (\w+)(?: since (.+))?", message.text))
    ] + [
        FactProposal(subject="user", relation="lives in", action="retract", said=(message.id,))
        for message in messages
        if "homeless" in message.text
    ]


async def _later(messages: list[StoredMessage]) -> list[FactProposal]:
    return _city(messages)


@pytest.mark.parametrize("extractor", [_city, _later])
async def test_an_extractor_of_ones_own_does_what_a_model_does(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, extractor: Any
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    memory, facts = make(storage, llm=None, extractor=extractor)
    await tell(memory, "I live in Porto")
    await tell(memory, "I live in Lisbon since yesterday", at=DAY + timedelta(days=5))
    assert texts(await facts.all()) == ["user lives in Lisbon"]
    assert texts(await facts.as_of(DAY + timedelta(days=3))) == ["user lives in Porto"]
    assert texts(await facts.as_of(DAY + timedelta(days=4))) == ["user lives in Lisbon"]
    why = await facts.why((await facts.all())[0])
    assert why is not None
    assert (why.prompt, [message.text for message in why.messages]) == (
        "extractor",
        ["I live in Lisbon since yesterday"],
    )
    await tell(memory, "I am homeless", at=DAY + timedelta(days=6))
    assert await facts.all() == []


async def test_an_extractor_that_returns_something_else_fails_visibly(storage: Storage) -> None:
    memory, _ = make(storage, llm=None, extractor=lambda messages: ["Maya has a cat"])
    await memory.aput(said("user", "I have a cat"))
    (progress,) = (await memory.aflush()).blocks
    assert (progress.error, progress.pending) == ("ExtractionError", 1)


def test_without_model_and_extractor_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigurationError, match=r"llm=.*extractor="):
        FactExtractionMemoryBlock()


@pytest.mark.parametrize(
    "given", [{}, {"action": "retract", "text": "x"}, {"action": "supersede", "subject": "a"}, {"action": "forget"}]
)
def test_a_proposal_about_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="action="):
        FactProposal(**given)


# --- the decision, by itself ----------------------------------------------------------------------------------

KEY = key_of("Maya", "lives in")


def statement(number: int, *, day: int, value: str | None = None) -> Move:
    value = value or f"town{number}"
    data = {"subject": "Maya", "relation": "lives in", "value": value}
    at = DAY + timedelta(days=day)
    record = NewRecord(f"f{number}", "fact", f"Maya lives in {value}.", data, said_at=at)
    return Move("supersede", at, record, None, KEY)


def applied(records: Sequence[Record], outcome: Outcome) -> list[Record]:
    """What a storage makes of an outcome."""
    done = []
    stored = [
        *records,
        *(
            Record(one.id, one.kind, "Facts", one.text, one.data, DAY, one.said_at, one.expires_at)
            for one in (*outcome.current, *outcome.past)
        ),
    ]
    for record in stored:
        data = outcome.amended[record.id].data if record.id in outcome.amended else record.data
        done.append(
            Record(
                record.id, record.kind, record.block, record.text, data, record.created_at, record.said_at,
                superseded_by=outcome.superseded.get(record.id, record.superseded_by),
                archived_at=DAY if record.id in outcome.archived else record.archived_at,
            )
        )  # fmt: skip
    return done


def told(moves: Sequence[Move]) -> list[Record]:
    records: list[Record] = []
    for move in moves:
        records = applied(records, decide([move], records))
    return records


def intervals(records: Sequence[Record]) -> set[tuple[str, Any, Any]]:
    return {
        (record.text, record.data.get("valid_from", record.said_at), record.data.get("valid_until"))
        for record in records
    }


@given(days=st.permutations(range(6)), order=st.permutations(range(6)))
def test_the_history_is_the_same_whatever_the_order_in_which_statements_came(days: list[int], order: list[int]) -> None:
    moves = [statement(number, day=day) for number, day in enumerate(days)]
    by_time = told(sorted(moves, key=lambda move: move.said_at))
    as_came = told([moves[at] for at in order])
    assert intervals(as_came) == intervals(by_time)
    live = [record.text for record in as_came if record.live]
    assert live == [moves[days.index(5)].record.text]  # type: ignore[union-attr]  # each has one


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["add", "supersede"]),
            st.integers(0, 5),
            st.sampled_from("abc"),
            st.sampled_from(["lives in", "works at"]),
            st.frozensets(st.sampled_from([f"f{number}" for number in range(8)]), max_size=3),
        ),
        max_size=8,
    ),
    together=st.booleans(),
)
def test_whatever_is_proposed_something_of_each_place_stays(
    moves: list[tuple[str, int, str, str, frozenset[str]]], together: bool
) -> None:
    made = []
    for number, (action, day, value, relation, targets) in enumerate(moves):
        at = DAY + timedelta(days=day)
        data = {"subject": "Maya", "relation": relation, "value": value}
        new = NewRecord(f"f{number}", "fact", f"Maya {relation} {value}.", data, said_at=at)
        made.append(Move(action, at, new, targets, key_of("Maya", relation)))  # type: ignore[arg-type]  # one of two
    records = applied([], decide(made, [])) if together else told(made)
    live = {record.data["relation"] for record in records if record.live}
    assert live == {relation for _, _, _, relation, _ in moves}
    ids = {record.id for record in records}
    for record in records:
        if record.superseded_by is not None:
            assert record.superseded_by in ids
            heir = next(one for one in records if one.id == record.superseded_by)
            assert heir.data["relation"] == record.data["relation"]


def test_a_decision_changes_nothing_that_it_was_given() -> None:
    records = told([statement(1, day=1)])
    before = repr(records)
    decide([statement(2, day=2)], records)
    assert repr(records) == before
