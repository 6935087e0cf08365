"""One context out: what blocks may see, what the window shows and recall therefore does not, and what is remembered."""

from __future__ import annotations

from typing import Any

from doubles import answer, user
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import StaticMemoryBlock, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.testing import HashEmbedding

KEY = "sk-" + "proj-" + "a1B2" * 10


def printed(messages: list[ChatMessage]) -> str:
    return "\n".join(message.content or "" for message in messages)


class Listening(HashEmbedding):
    heard: list[str] = []  # noqa: RUF012  # a pydantic field

    def _get_text_embedding(self, text: str) -> list[float]:
        self.heard.append(text)
        return super()._get_text_embedding(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        self.heard.append(query)
        return super()._get_query_embedding(query)


class Notebook(BaseMemoryBlock[str]):
    seen: list[str] = []  # noqa: RUF012  # a pydantic field

    async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
        self.seen.append(printed(messages or []))
        return "noted"

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.seen.append(printed(messages))


async def test_a_secret_reaches_the_agent_of_its_turn_and_no_model_block_or_report(storage):
    model, block = Listening(heard=[]), Notebook(name="notes", seen=[])
    memory = TieredMemory(
        storage=storage, user_id="maya", session_id="s", memory_blocks=[VectorMemoryBlock(embed_model=model), block]
    )
    await memory.aput(user(f"My key is {KEY}, use it."))
    assert KEY in printed(await memory.aget())
    assert KEY in printed(await memory.aget(input=f"What about {KEY}?"))
    report = await memory.aexplain(user(f"And {KEY}?"))
    await memory.aflush()
    assert KEY not in "\n".join([*model.heard, *block.seen, report.query])
    assert model.heard
    assert block.seen


async def test_a_turn_that_the_window_cannot_show_is_recalled(storage):
    static = StaticMemoryBlock(name="core", static_content="word " * 450, priority=0)
    memory = TieredMemory(
        storage=storage,
        user_id="maya",
        session_id="s",
        token_limit=1000,
        memory_blocks=[static, VectorMemoryBlock(embed_model=None)],
    )
    await memory.aput_messages([user("The zebra code is 7788."), answer("word " * 590)])
    await memory.aput(user("What is the zebra code?"))
    await memory.aflush()
    report = await memory.aexplain()
    assert report.window_left_out == 2
    assert any("7788" in item.text for item in report.parts[1].kept)


async def test_what_leaves_the_window_within_a_turn_is_recalled_in_its_next_round(storage):
    memory = TieredMemory(
        storage=storage,
        user_id="maya",
        session_id="s",
        token_limit=300,
        chat_history_token_ratio=0.5,
        memory_blocks=[VectorMemoryBlock(embed_model=None)],
    )
    await memory.aput_messages([user("The zebra code is 7788."), answer("I see, thank you.")])
    await memory.aflush()
    await memory.aput(user("What is the zebra code?"))
    first = await memory.aexplain()
    assert first.window_messages == 3
    await memory.aput(answer("word " * 140))
    assert len(await memory.aget_all(status=None)) == 4
    second = await memory.aexplain()
    assert second.window_messages == 2
    assert "7788" in printed(list(second.messages))


async def test_the_running_turn_is_shown_as_it_was_said_when_the_history_is_set_again(storage):
    memory = TieredMemory(storage=storage, session_id="s")
    history = [user("hello"), answer("hi"), user(f"My key is {KEY}.")]
    for _ in range(2):
        await memory.aset(history)
        assert KEY in printed(await memory.aget())
    assert len(await memory.aget_all()) == 3
    await memory.aput(user("next"))
    assert KEY not in printed(await memory.aget())


async def test_what_a_person_wrote_is_kept_even_if_it_looks_like_a_memory(storage):
    memory = TieredMemory(storage=storage, session_id="s")
    text = "<memory>\n<facts>\nI am a fact\n</facts>\n</memory>"
    await memory.aput(user(text))
    assert [message.content for message in await memory.aget_all()] == [text]


async def test_a_session_keeps_one_view_of_its_window(storage):
    memory = TieredMemory(storage=storage, session_id="s")
    for number in range(20):
        await memory.aput(user(f"m{number}"))
        assert len(await memory.aget()) == number + 1
    assert len(memory._shared.contexts.views._kept) == 1


async def test_a_context_that_comes_back_as_history_changes_nothing(storage):
    memory = TieredMemory(
        storage=storage, user_id="maya", session_id="s", memory_blocks=[VectorMemoryBlock(embed_model=None)]
    )
    await memory.for_session("earlier").aput(user("The lake was cold."))
    system = [ChatMessage(role="system", content=text) for text in ("Be kind.", "Be brief.")]
    await memory.aput_messages([*system, user("hello"), answer("hi"), user("How was the lake?")])
    for _ in range(2):
        context = await memory.aget()
        assert "lake was cold" in printed(context)
        await memory.aset(context)
    assert [message.content for message in await memory.aget_all()] == [
        "Be kind.", "Be brief.", "hello", "hi", "How was the lake?",
    ]  # fmt: skip
