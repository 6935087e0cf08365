"""What a question asks for, and which messages tell it."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from doubles import said
from hypothesis import given
from hypothesis import strategies as st

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.text import analyse, message_terms
from llama_index_memory_tiers.wanted import NUMBER, TIME, told_in, wanted_by


@pytest.mark.parametrize(
    ("question", "kinds"),
    [
        ("When did she move?", {TIME}),
        ("Which year was the wedding?", {TIME}),
        ("How many cats has he?", {NUMBER}),
        ("How long did it take?", {TIME, NUMBER}),
        ("I forgot when was the dinner", {TIME}),
        ("What did Tom say when he moved?", set()),
        ("你什么时候搬家？", {TIME}),
        ("他有几只猫？", {NUMBER}),
        ("等了多久？", {TIME, NUMBER}),
        ("茶几是什么颜色？", set()),
        ("What is the cat called?", set()),
        ("Whenever", set()),
        ("", set()),
    ],
)
def test_a_question_asks_for_a_time_or_a_number(question: str, kinds: set[str]) -> None:
    assert set(wanted_by(question)) == kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("I moved last Tuesday.", {TIME}),
        ("We have three cats.", {NUMBER}),
        ("It was in 2019.", {TIME, NUMBER}),
        ("It took three hours.", {TIME, NUMBER}),
        ("Dinner is in the evening.", {TIME}),
        ("We met at 18:30.", {TIME, NUMBER}),
        ("That was the last straw.", set()),
        ("The sun was shining next to the door.", set()),
        ("You may go in May.", {TIME}),
        ("You may go.", set()),
        ("我上周搬家了", {TIME}),
        ("我养了三只猫", {NUMBER}),
        ("我养了一只猫", {NUMBER}),
        ("我们一起去吧", set()),
        ("The cat sleeps.", set()),
        ("", set()),
    ],
)
def test_a_message_tells_a_time_or_a_number(text: str, kinds: set[str]) -> None:
    assert set(told_in(text)) == kinds
    assert {TIME, NUMBER} & set(message_terms(text, when=datetime(2026, 5, 8, tzinfo=timezone.utc))) == kinds


@given(st.lists(st.sampled_from([TIME, NUMBER, " ", "time", "?", "a"]), max_size=6).map("".join))
def test_no_question_finds_the_marks_by_words(text: str) -> None:
    assert not {TIME, NUMBER} & set(analyse(text))


async def test_of_messages_that_are_alike_the_one_that_tells_what_is_wanted_comes_first() -> None:
    async with Storage() as storage:
        memory = TieredMemory(
            storage=storage, user_id="ann", session_id="s", memory_blocks=[VectorMemoryBlock(embed_model=None)]
        )
        for text in ("The house move tired us.", "The house move was yesterday.", "The house move took four vans."):
            await memory.for_session(text).aput(said("user", text))
        await memory.aflush()
        for question, told in (("When was the house move?", "yesterday"), ("How many vans for the move?", "four")):
            report = await memory.for_session("asking").aexplain(question)
            best = report.parts[0].kept[0]
            assert told in best.text
            assert best.legs["answer"] > 0
        report = await memory.for_session("asking").aexplain("Who carried the house move?")
        assert all("answer" not in item.legs for item in report.parts[0].kept)
