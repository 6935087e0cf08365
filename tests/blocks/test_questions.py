"""Questions and records at the edge: recall answers honestly and within its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.testing import HashEmbedding
from tests.doubles import said

NOW = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
LIMIT = 400
MODELS = pytest.mark.parametrize("model", [None, HashEmbedding(dims=32)], ids=["words", "hybrid"])
TOLD = [
    "My cat Tom is afraid of thunder.",
    "We moved to Porto.",
    "我的猫叫小雨。",
    "แมวของฉันชื่อส้ม",
    "うちの犬はポチです。",
]


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


async def told(
    storage: Storage, model: BaseEmbedding | None, texts: Sequence[str] = TOLD, **about: Any
) -> TieredMemory:
    """A user who said this in one session and asks in another."""
    block = VectorMemoryBlock(embed_model=model)
    memory = TieredMemory(
        storage=storage, user_id="ann", session_id="told", token_limit=LIMIT, memory_blocks=[block], delivery="inline"
    )
    for text in texts:
        await memory.aput(said("user", text), **about)
    await memory.aflush()
    return memory.for_session("asking")


async def context(memory: TieredMemory, question: str) -> str:
    """What is shown for a question; never more than allowed."""
    messages: list[ChatMessage] = await memory.aget(question)
    assert sum(TokenCounter(memory.tokenizer_fn).message(message) for message in messages) <= LIMIT
    return "\n".join(message.content or "" for message in messages)


@MODELS
@pytest.mark.parametrize("question", ["", "   ", "\n", "🙂🙂", "？！", "what is it?", "the of and", "的了吗", "\ud800"])
async def test_a_question_that_says_nothing_recalls_nothing_that_words_found(
    storage: Storage, model: BaseEmbedding | None, question: str
) -> None:
    """Without a word to look for nothing is recalled; with a model, function words have a meaning of sorts."""
    memory = await told(storage, model)
    shown = await context(memory, question)
    if model is None or not any(letter.isalpha() for letter in question):
        assert shown == ""


@MODELS
async def test_a_question_of_ten_thousand_words_is_answered(storage: Storage, model: BaseEmbedding | None) -> None:
    memory = await told(storage, model)
    question = "Is Tom afraid of thunder? " + " ".join(f"word{number}" for number in range(10_000))
    assert "Tom is afraid" in await context(memory, question)


@MODELS
@pytest.mark.parametrize(
    ("question", "answer"), [("小雨是谁的猫？", "小雨"), ("แมวชื่ออะไร", "ส้ม"), ("ポチはどんな犬ですか", "ポチです")]
)
async def test_a_language_without_spaces_is_searched_by_its_characters(
    storage: Storage, model: BaseEmbedding | None, question: str, answer: str
) -> None:
    memory = await told(storage, model)
    assert answer in await context(memory, question)


@MODELS
@pytest.mark.parametrize(
    "question", ["Where do we move on 3 June 2031?", "What about Porto tomorrow?", "明年搬到Porto吗？"]
)
async def test_a_date_in_the_future_names_no_record_and_hides_none(
    storage: Storage, model: BaseEmbedding | None, question: str
) -> None:
    memory = await told(storage, model, ["We moved to Porto."], created_at=NOW - timedelta(days=9))
    assert "We moved to Porto." in await context(memory, question)


@MODELS
async def test_a_record_from_the_future_is_recalled_like_others(storage: Storage, model: BaseEmbedding | None) -> None:
    memory = await told(storage, model, ["We moved to Porto."], created_at=NOW + timedelta(days=9000))
    assert "We moved to Porto." in await context(memory, "Where did we move?")


@MODELS
@pytest.mark.parametrize("jump", [timedelta(days=-4000), timedelta(days=4000)], ids=["back", "ahead"])
async def test_a_clock_that_jumps_loses_no_memory(tmp_path: Any, model: BaseEmbedding | None, jump: timedelta) -> None:
    clock = Clock()
    async with Storage(tmp_path / "m.db", clock=clock) as storage:
        memory = await told(storage, model, ["We moved to Porto."])
        clock.now += jump
        later = memory.for_session("told")
        await later.aput(said("user", "Our boat is called Bertha."))
        await later.aflush()
        shown = await context(memory, "Where did we move, and what is our boat called?")
        assert "We moved to Porto." in shown
        assert "Bertha" in shown


async def test_what_was_said_but_not_absorbed_is_recalled_from_another_session(storage: Storage) -> None:
    """No flush, no idle time: asking absorbs what waits."""
    block = VectorMemoryBlock(embed_model=None)
    memory = TieredMemory(storage=storage, user_id="ann", session_id="a", memory_blocks=[block], delivery="inline")
    await memory.aput(said("user", "The key is under the blue pot."))
    assert "blue pot" in repr(await memory.for_session("b").aget("Where is the key?"))
