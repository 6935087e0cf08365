"""What LlamaIndex's own tests expect of a memory, its blocks and its chat store, said again for ours.

Where we differ on purpose, the test says how: one vector item for each message, text escaped, deletion by id, the
wrapper counted as part of the budget, and learning that outlives a reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from foreign import ListStore, Says
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    CitableBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory.memory import BaseMemoryBlock, InsertMethod
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers import StaticMemoryBlock, TieredChatStore, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.errors import ConfigurationError

Make = Any


def say(role: str, text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole(role), content=text)


def texts(messages: Sequence[ChatMessage]) -> list[str | None]:
    return [message.content for message in messages]


@pytest.fixture
async def make() -> Any:
    """Makes memories of the sizes that upstream tests with, and closes them."""
    made: list[TieredMemory] = []

    def new(**changed: Any) -> TieredMemory:
        sizes = {"token_limit": 1000, "token_flush_size": 700, "chat_history_token_ratio": 0.9}
        memory = TieredMemory(**{"session_id": "upstream", **sizes, **changed})
        made.append(memory)
        return memory

    yield new
    for memory in made:
        await memory.aclose()


# --- counting --------------------------------------------------------------------------------------------------


def test_sizes_and_session_are_as_given(make: Make) -> None:
    memory = make()
    assert (memory.token_limit, memory.token_flush_size, memory.session_id) == (1000, 700, "upstream")


def test_text_costs_what_the_tokenizer_says(make: Make) -> None:
    memory = make()
    for text in ("Test message", "", "你好，世界", "a\nb\n\nc " * 50):
        assert memory._estimate_token_count(say("user", text)) == len(memory.tokenizer_fn(text))
        assert memory._estimate_token_count(text) == len(memory.tokenizer_fn(text))


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (ImageBlock(url="https://x.invalid/a.png"), "image_token_size_estimate"),
        (AudioBlock(url="https://x.invalid/a.mp3"), "audio_token_size_estimate"),
        (VideoBlock(url="https://x.invalid/a.mp4"), "video_token_size_estimate"),
        (DocumentBlock(url="https://x.invalid/a.pdf", document_mimetype="application/pdf"), "document_token_size_estimate"),
    ],
)  # fmt: skip
def test_media_cost_their_estimate(make: Make, block: ContentBlock, field: str) -> None:
    memory = make(**{field: 321})
    message = ChatMessage(role=MessageRole.USER, blocks=[block])
    assert memory._estimate_token_count(message) == memory._estimate_token_count([block]) == 321


def test_thinking_and_tool_calls_and_citable_text_cost_their_text(make: Make) -> None:
    memory = make()
    thinking = ThinkingBlock(content="let me weigh this with care")
    assert memory._estimate_token_count([thinking]) == len(memory.tokenizer_fn("let me weigh this with care"))
    call = ToolCallBlock(tool_call_id="c", tool_name="search", tool_kwargs={"query": "word " * 50})
    assert memory._estimate_token_count([call]) >= 50
    # Upstream leaves title and source out; they are sent to the model, so that ours counts them.
    cited = CitableBlock(title="t", source="s", content=[TextBlock(text="hello world"), ImageBlock(url="https://x.invalid/a.png")])  # fmt: skip
    inner = len(memory.tokenizer_fn("hello world")) + memory.image_token_size_estimate
    assert inner < memory._estimate_token_count([cited]) <= inner + 2


# --- the queue -------------------------------------------------------------------------------------------------


async def test_below_the_limit_everything_stays(make: Make) -> None:
    memory = make()
    await memory.aput(say("user", "one"))
    await memory.aput_messages([say("assistant", "two"), say("user", "three")])
    assert texts(await memory.aget()) == ["one", "two", "three"]
    assert texts(await memory.aget_all(status=MessageStatus.ACTIVE)) == ["one", "two", "three"]


async def test_above_the_limit_the_oldest_turns_leave(make: Make) -> None:
    memory = make()
    await memory.aput_messages([say("user", "x " * 500), say("assistant", "y " * 500), say("user", "z " * 500)])
    (left,) = await memory.aget()
    assert "z " in (left.content or "")
    assert len(await memory.aget_all(status=MessageStatus.ARCHIVED)) == 2
    assert len(await memory.aget_all()) == 3


async def test_a_chat_made_of_tool_calls_is_flushed_too(make: Make) -> None:
    memory = make(token_limit=50, token_flush_size=10, chat_history_token_ratio=1.0, tokenizer_fn=str.split)
    for number in range(10):
        await memory.aput(say("user", "hi"))
        call = ToolCallBlock(tool_call_id=f"c{number}", tool_name="search", tool_kwargs={"query": "word " * 200})
        await memory.aput(ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]))
    assert len(await memory.aget_all(status=MessageStatus.ACTIVE)) == 2


@pytest.mark.parametrize(
    ("limit", "flush", "chat"),
    [
        (100, 50, [("user", 100), ("assistant", 1)]),
        (200, 100, [("user", 50), ("assistant", 50), ("user", 50), ("assistant", 50)]),
        (150, 80, [("user", 40), ("assistant", 20), ("tool", 20), ("assistant", 20)]),
        (80, 40, [("user", 50), ("assistant", 1), ("tool", 1)]),
    ],
)
async def test_a_flushed_queue_begins_with_a_user_and_keeps_a_whole_turn(
    make: Make, limit: int, flush: int, chat: list[tuple[str, int]]
) -> None:
    memory = make(token_limit=limit, token_flush_size=flush, chat_history_token_ratio=0.5)
    await memory.aput_messages([say(role, "w " * size) for role, size in chat])
    active = await memory.aget_all(status=MessageStatus.ACTIVE)
    roles = [message.role.value for message in active]
    assert roles[0] == "user"
    assert roles == [role for role, _ in chat][-len(roles) :]
    assert (await memory.aget())[0].role == MessageRole.USER


async def test_set_and_reset_reach_the_window(make: Make) -> None:
    memory = make()
    await memory.aput(say("user", "before"))
    await memory.aset([say("user", "one"), say("assistant", "two")])
    assert texts(await memory.aget()) == ["one", "two"]
    await memory.areset(status=MessageStatus.ACTIVE)
    assert await memory.aget() == []


async def test_reset_keeps_what_blocks_have_learnt_as_only_a_forget_takes_it(make: Make) -> None:
    memory = make(memory_blocks=[VectorMemoryBlock(embed_model=None)])
    await memory.aput_messages([say("user", "The harbour code is heron."), say("assistant", "Noted.")])
    await memory.aflush()
    await memory.areset()
    assert await memory.aget_all() == []
    assert "heron" in str((await memory.aget("What is the harbour code?"))[0])


# --- blocks of other people ------------------------------------------------------------------------------------


class CutsLast(Says):
    """Cuts its last block."""

    async def atruncate(self, content: list[ContentBlock], tokens_to_truncate: int) -> list[ContentBlock] | None:
        return content[:-1] or None


def some_blocks() -> list[BaseMemoryBlock[Any]]:
    return [
        Says(name="plain", priority=1, content="a plain text"),
        CutsLast(name="parts", priority=2, content=[TextBlock(text="first part"), TextBlock(text="second part")]),
        Says(name="talk", priority=3, content=[say("user", "an old question"), say("assistant", "an old answer")]),
        Says(name="nothing", priority=4, content=""),
    ]


async def test_blocks_answer_with_text_content_blocks_or_messages(make: Make) -> None:
    memory = make(memory_blocks=some_blocks())
    content = await memory._get_memory_blocks_content([])
    assert set(content) == {"plain", "parts", "talk"}
    assert content["plain"] == "a plain text"
    assert [block.text for block in content["parts"]] == ["first part", "second part"]
    assert texts(content["talk"]) == ["an old question", "an old answer"]
    sections, messages = await memory._format_memory_blocks(content)
    assert {name: [block.text for block in blocks] for name, blocks in sections} == {
        "plain": ["a plain text"],
        "parts": ["first part", "second part"],
    }
    assert texts(messages) == ["an old question", "an old answer"]


async def test_a_block_may_answer_differently_from_call_to_call(make: Make) -> None:
    block = Says(name="changing", content="now this")
    memory = make(memory_blocks=[block])
    await memory.aput(say("user", "hello"))
    assert (await memory._get_memory_blocks_content([]))["changing"] == "now this"
    block.content = [TextBlock(text="now that"), TextBlock(text="and more")]
    assert len((await memory._get_memory_blocks_content([]))["changing"]) == 2
    assert (await memory._get_memory_blocks_content([], shade="blue"))["changing"] == "blue"


async def test_all_kinds_of_content_come_together_in_one_context(make: Make) -> None:
    memory = make(memory_blocks=some_blocks())
    await memory.aput(say("user", "a new question"))
    messages = await memory.aget()
    assert [message.role.value for message in messages] == ["system", "user", "assistant", "user"]
    system = str(messages[0].content)
    assert all(part in system for part in ("a plain text", "first part", "second part"))
    assert texts(messages[1:]) == ["an old question", "an old answer", "a new question"]


async def test_media_given_by_url_survive_the_default_template(make: Make) -> None:
    media = [
        TextBlock(text="About the film"),
        VideoBlock(url="https://x.invalid/v.mp4"),
        DocumentBlock(url="https://x.invalid/d.pdf", document_mimetype="application/pdf"),
    ]
    memory = make(token_limit=4096, memory_blocks=[Says(name="media", content=media)])
    (system,) = await memory.aget()
    assert any("About the film" in block.text for block in system.blocks if isinstance(block, TextBlock))
    assert [str(block.url) for block in system.blocks if isinstance(block, VideoBlock)] == ["https://x.invalid/v.mp4"]
    assert [str(block.url) for block in system.blocks if isinstance(block, DocumentBlock)] == [
        "https://x.invalid/d.pdf"
    ]


async def test_the_insert_method_decides_where_the_memory_stands(make: Make) -> None:
    blocks = [Says(name="one", content="remembered"), Says(name="two", content="as well")]
    in_user = make(insert_method=InsertMethod.USER, memory_blocks=blocks)
    await in_user.aput(say("user", "hello"))
    (message,) = await in_user.aget()
    assert message.role == MessageRole.USER
    assert "remembered" in str(message.content)
    in_system = make(session_id="other", insert_method=InsertMethod.SYSTEM, memory_blocks=blocks)
    (message,) = await in_system.aget()
    assert message.role == MessageRole.SYSTEM


async def test_the_larger_priority_number_goes_first_and_zero_never(make: Make) -> None:
    fixed = StaticMemoryBlock(name="fixed", static_content="alpha " * 8, priority=0)
    first = StaticMemoryBlock(name="first", static_content="beta " * 8, priority=1)
    second = StaticMemoryBlock(name="second", static_content="gamma " * 8, priority=2)
    shown = []
    for limit in (33, 32, 22):
        memory = make(token_limit=limit, tokenizer_fn=str.split, memory_blocks=[second, first, fixed])
        await memory.aput(say("user", "hello"))
        text = "\n".join(str(message.content) for message in await memory.aget())
        assert len(text.split()) <= limit
        shown.append([word for word in ("alpha", "beta", "gamma") if word in text])
    assert shown == [["alpha", "beta", "gamma"], ["alpha", "beta"], ["alpha"]]


async def test_fixed_content_that_can_never_fit_is_refused_instead_of_exceeding_the_limit(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="never_cut"):
        make(token_limit=30, memory_blocks=[StaticMemoryBlock(name="never_cut", static_content="word " * 80)])


async def test_a_block_that_cuts_itself_is_asked_to(make: Make) -> None:
    parts = [TextBlock(text="keep " * 10), TextBlock(text="drop " * 10)]
    memory = make(token_limit=20, tokenizer_fn=str.split, memory_blocks=[CutsLast(name="p", priority=1, content=parts)])
    await memory.aput(say("user", "hello"))
    text = str((await memory.aget())[0].content)
    assert "keep" in text
    assert "drop" not in text


async def test_many_blocks_are_read_at_the_same_time_and_a_cancelled_read_ends_them(make: Make) -> None:
    everybody_is_there = asyncio.Event()
    waiting: set[str] = set()
    cleaned: set[str] = set()

    class Waits(Says):
        async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
            waiting.add(self.name)
            if len(waiting) == 3:
                everybody_is_there.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.add(self.name)
            return ""

    memory = make(memory_blocks=[Waits(name=name) for name in "abc"])
    task = asyncio.ensure_future(memory.aget("hello"))
    await asyncio.wait_for(everybody_is_there.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == {"a", "b", "c"}


async def test_a_failing_read_costs_its_own_section_only(make: Make) -> None:
    class Fails(Says):
        async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> Any:
            raise RuntimeError("read failed")

    bad = Says(name="wrong", content={"no": "content"})
    memory = make(memory_blocks=[Fails(name="fails"), bad, Says(name="fine", content="still here")])
    assert await memory._get_memory_blocks_content([]) == {"fine": "still here"}
    assert [part.error for part in (await memory.aexplain()).parts] == ["RuntimeError", "TypeError", None]


async def test_blocks_get_the_history_the_request_and_the_callers_arguments(make: Make) -> None:
    received: list[tuple[list[str | None], dict[str, Any]]] = []

    class Notes(Says):
        async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
            received.append((texts(messages or []), kwargs))
            return "seen"

    memory = make(memory_blocks=[Notes(name="n")])
    history = [say("user", "before")]
    await memory._get_memory_blocks_content(history, input="and now", context="value")
    assert received == [(["before", "and now"], {"session_id": "upstream", "context": "value"})]
    assert len(history) == 1


# --- the static block ------------------------------------------------------------------------------------------


async def test_a_static_block_says_the_same_whatever_it_is_told() -> None:
    block = StaticMemoryBlock(static_content="fixed")
    assert block.name == "StaticContent"
    before = await block.aget()
    await block.aput([say("user", "hello")])
    assert await block.aget(messages=[say("user", "hello")]) == before == [TextBlock(text="fixed")]
    several = StaticMemoryBlock(name="mine", static_content=[TextBlock(text="one"), TextBlock(text="two")])
    assert [block.text for block in await several.aget()] == ["one", "two"]


# --- the vector block, by itself and with a store --------------------------------------------------------------


class Shouts(BaseNodePostprocessor):
    """Changes the text of what was found."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: Any = None) -> list[NodeWithScore]:
        for found in nodes:
            assert isinstance(found.node, TextNode)
            found.node.set_content(f"CHECKED {found.node.get_content()}")
        return nodes


FRANCE = [say("user", "What is the capital of France?"), say("assistant", "The capital of France is Paris.")]


async def alone(**fields: Any) -> VectorMemoryBlock:
    return VectorMemoryBlock(**{"vector_store": ListStore(), "embed_model": MockEmbedding(embed_dim=8), **fields})


async def test_a_vector_block_keeps_one_item_for_each_message() -> None:
    block = await alone()
    await block.aput(FRANCE)
    assert isinstance(block.vector_store, ListStore)
    assert len(block.vector_store.kept) == 2
    await block.aclose()


async def test_a_vector_block_recalls_what_was_put() -> None:
    block = await alone(similarity_top_k=2)
    await block.aput([*FRANCE, say("user", "And Germany?"), say("assistant", "Berlin.")])
    found = await block.aget(messages=[say("user", "Tell me about Paris.")])
    assert "<message role='assistant'>The capital of France is Paris.</message>" in found
    assert found.count("<message") == 2
    await block.aclose()


async def test_a_vector_block_needs_neither_store_nor_model() -> None:
    block = VectorMemoryBlock(embed_model=None)
    await block.aput(FRANCE)
    assert "Paris" in await block.aget(messages=[say("user", "What is the capital of France?")])
    await block.aclose()


async def test_nothing_put_or_asked_is_nothing_kept_or_found() -> None:
    block = await alone()
    await block.aput([])
    await block.aput([ChatMessage(role=MessageRole.USER, blocks=[])])
    assert isinstance(block.vector_store, ListStore)
    assert block.vector_store.kept == {}
    assert await block.aget(messages=[]) == ""
    await block.aput(FRANCE)
    assert await block.aget(messages=[]) == ""
    await block.aclose()


async def test_a_store_without_scores_keeps_its_nodes() -> None:
    block = await alone(vector_store=ListStore(scores=False))
    await block.aput(FRANCE)
    assert "Paris" in await block.aget(messages=[say("user", "Paris?")])
    await block.aclose()


async def test_the_context_window_says_how_many_messages_are_asked_with() -> None:
    for window, query in ((1, "And Spain?"), (2, "London.\nAnd Spain?")):
        block = await alone(retrieval_context_window=window)
        await block.aput(FRANCE)
        await block.aget(messages=[say("user", "And the UK?"), say("assistant", "London."), say("user", "And Spain?")])
        assert isinstance(block.vector_store, ListStore)
        assert block.vector_store.asked[-1].query_str == query
        await block.aclose()


async def test_postprocessors_may_change_the_text() -> None:
    block = await alone(node_postprocessors=[Shouts()])
    await block.aput(FRANCE)
    found = await block.aget(messages=[say("user", "Paris?")])
    assert found.count("CHECKED <message") == 2
    await block.aclose()


async def test_a_format_template_writes_each_message() -> None:
    for template in (RichPromptTemplate("Context: {{ text }}"), "Context: {{ text }}", "Context: {text}"):
        block = await alone(format_template=template)
        await block.aput(FRANCE)
        found = await block.aget(messages=[say("user", "Paris?")])
        assert "Context: <message role='assistant'>The capital of France is Paris.</message>" in found
        await block.aclose()


async def test_the_arguments_of_a_block_reach_the_store_and_are_not_changed() -> None:
    given = {"alpha": 0.5}
    block = await alone(query_kwargs=given, similarity_top_k=1)
    await block.aput(FRANCE)
    for session in ("a", "b"):
        await block.aput(FRANCE, session_id=session)
        await block.aget(messages=[say("user", "Paris?")], session_id=session)
    assert isinstance(block.vector_store, ListStore)
    assert block.vector_store.asked[-1].alpha == 0.5
    assert block.vector_store.asked[-1].similarity_top_k == 1
    assert given == block.query_kwargs == {"alpha": 0.5}
    await block.aclose()


# --- the chat store --------------------------------------------------------------------------------------------


@pytest.fixture
async def store() -> Any:
    """An empty chat store."""
    made = TieredChatStore()
    yield made
    await made.aclose()


FIVE = [say("user" if number % 2 else "assistant", f"m{number}") for number in range(1, 6)]


async def test_a_store_gives_back_what_was_added_in_order(store: TieredChatStore) -> None:
    await store.add_message("k", FIVE[0])
    await store.add_messages("k", FIVE[1:])
    assert await store.get_messages("k") == FIVE
    assert await store.count_messages("k") == 5
    assert await store.get_messages("nobody") == []
    assert await store.count_messages("nobody") == 0


async def test_limit_and_offset_cut_pages(store: TieredChatStore) -> None:
    await store.add_messages("k", FIVE)
    assert texts(await store.get_messages("k", limit=2)) == ["m1", "m2"]
    assert texts(await store.get_messages("k", offset=2)) == ["m3", "m4", "m5"]
    assert texts(await store.get_messages("k", limit=2, offset=1)) == ["m2", "m3"]


async def test_setting_replaces_what_a_session_shows(store: TieredChatStore) -> None:
    await store.add_message("k", say("user", "initial"))
    await store.set_messages("k", FIVE[:2])
    assert await store.get_messages("k") == FIVE[:2]


async def test_a_message_is_deleted_by_its_id_and_others_stay(store: TieredChatStore) -> None:
    await store.add_messages("k", FIVE)
    middle = (await store.stored_messages("k"))[2]
    assert await store.delete_message("k", middle.id) == FIVE[2]
    assert texts(await store.get_messages("k")) == ["m1", "m2", "m4", "m5"]
    assert await store.delete_message("k", middle.id) is None
    assert await store.delete_message("other", 1) is None


async def test_deleting_a_sessions_messages_leaves_other_sessions(store: TieredChatStore) -> None:
    await store.add_message("one", FIVE[0])
    await store.add_message("two", FIVE[1])
    await store.delete_messages("one")
    assert await store.get_messages("one") == []
    assert await store.get_messages("two") == [FIVE[1]]


async def test_the_oldest_are_deleted_or_archived_and_returned(store: TieredChatStore) -> None:
    await store.add_messages("k", FIVE)
    assert texts(await store.delete_oldest_messages("k", 1)) == ["m1"]
    assert texts(await store.archive_oldest_messages("k", 2)) == ["m2", "m3"]
    assert texts(await store.get_messages("k", status=MessageStatus.ACTIVE)) == ["m4", "m5"]
    assert texts(await store.get_messages("k", status=MessageStatus.ARCHIVED)) == ["m2", "m3"]
    assert texts(await store.get_messages("k", status=None)) == ["m2", "m3", "m4", "m5"]


async def test_keys_are_the_sessions(store: TieredChatStore) -> None:
    for key in ("one", "two", "three"):
        await store.add_message(key, FIVE[0])
    assert await store.get_keys() == ["one", "two", "three"]


async def test_table_name_and_schema_reach_the_storage(tmp_path: Path) -> None:
    memory = TieredMemory.from_defaults(token_limit=1000, table_name="test_memory", db_schema="ignored_by_sqlite")
    assert memory.storage.table_name == "test_memory"
    await memory.aput(say("user", "hello"))
    await memory.areset()
    assert await memory.aget_all() == []
    await memory.aclose()
    far = TieredMemory.from_defaults(
        session_id="s", table_name="t", db_schema="sales", async_database_uri="postgresql+asyncpg://u:p@h/db"
    )
    assert (far.storage.table_name, far.storage.db_schema) == ("t", "sales")
    assert far.storage.address == "postgresql+asyncpg://u:***@h/db"
