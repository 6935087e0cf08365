"""Messages go to JSON and come back exactly; copies share nothing."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import (
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from llama_index_memory_tiers import copies
from llama_index_memory_tiers.copies import as_known, clone
from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.moments import check_moment, from_microseconds, to_microseconds
from llama_index_memory_tiers.records import MessageMeta
from llama_index_memory_tiers.storage import codec

ANY_TEXT = st.text(st.characters(), max_size=30)  # lone surrogates and NUL included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
TEXT_BLOCKS = st.builds(TextBlock, text=ANY_TEXT)
BLOCKS = (
    TEXT_BLOCKS
    | st.builds(ThinkingBlock, content=ANY_TEXT)
    | st.builds(ToolCallBlock, tool_call_id=ANY_TEXT, tool_name=ANY_TEXT, tool_kwargs=st.dictionaries(ANY_TEXT, JSON))
    | st.builds(lambda data: ImageBlock(image=data), st.binary(min_size=1, max_size=20))
)
PLAIN = st.builds(ChatMessage, role=st.sampled_from(MessageRole), blocks=st.lists(TEXT_BLOCKS, max_size=4))
MESSAGES = PLAIN | st.builds(
    ChatMessage,
    role=st.sampled_from(MessageRole),
    blocks=st.lists(BLOCKS, max_size=4),
    additional_kwargs=st.dictionaries(ANY_TEXT, JSON, max_size=3),
)


@given(MESSAGES)
def test_a_message_comes_back_equal(message: ChatMessage) -> None:
    assert codec.decode_message(codec.encode_message(message)) == message


@given(MESSAGES)
def test_written_messages_suit_every_database(message: ChatMessage) -> None:
    written = codec.encode_message(message)
    assert "\0" not in written
    assert written.encode().decode() == written
    assert isinstance(json.loads(written), dict)


@given(PLAIN)
def test_the_short_way_for_text_writes_what_pydantic_would(message: ChatMessage) -> None:
    assert json.loads(codec.encode_message(message)) == message.model_dump(mode="json")


@given(PLAIN)
def test_a_message_made_without_validation_behaves_like_any_other(message: ChatMessage) -> None:
    made = codec.decode_message(codec.encode_message(message))
    assert made.model_dump() == message.model_dump()
    assert made.model_copy(deep=True) == message
    assert made.content == message.content
    made.blocks.append(TextBlock(text="more"))
    made.additional_kwargs["x"] = 1
    assert ChatMessage.model_validate(made.model_dump()) == made


@given(MESSAGES)
def test_a_clone_is_equal_and_shares_nothing(message: ChatMessage) -> None:
    before = message.model_copy(deep=True)
    copy = clone(message)
    assert copy == message
    copy.additional_kwargs["added"] = True
    for block in copy.blocks:
        if isinstance(block, TextBlock):
            block.text += "!"
    copy.blocks.append(TextBlock(text="added"))
    assert message == before


def test_subclasses_of_messages_keep_what_chat_message_knows() -> None:
    class Special(ChatMessage):
        pass

    message = Special(role="user", content="hi")
    assert codec.decode_message(codec.encode_message(message)).content == "hi"
    assert type(clone(message)) is Special


class Later(ChatMessage):
    """As a later LlamaIndex may have it."""

    name: str = "nobody"


def test_a_field_that_a_later_llama_index_adds_is_kept_and_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text has a short way only while messages are what it knows."""
    assert as_known(ChatMessage, TextBlock)
    assert not as_known(Later, TextBlock)
    before = codec.encode_message(ChatMessage(content="said before"))
    monkeypatch.setattr(copies, "ChatMessage", Later)
    monkeypatch.setattr(codec, "ChatMessage", Later)
    monkeypatch.setattr(copies, "AS_KNOWN", as_known(Later, TextBlock))
    message = Later(content="a", name="tom")
    assert clone(message) == message
    assert codec.decode_message(codec.encode_message(message)) == message
    assert codec.decode_message(before) == Later(content="said before")


def test_chinese_is_stored_readably() -> None:
    assert "我的猫叫汤姆" in codec.encode_message(ChatMessage(role="user", content="我的猫叫汤姆"))


def test_bytes_of_images_and_documents_survive() -> None:
    blocks = [ImageBlock(image=b"\x89PNG\0\xff"), DocumentBlock(data=b"%PDF-1.7\0", title="a.pdf")]
    message = codec.decode_message(codec.encode_message(ChatMessage(role="user", blocks=blocks)))
    assert message.blocks == blocks


@pytest.mark.parametrize("value", [object(), [{"deep": object()}], lambda: None])
def test_what_cannot_be_written_is_refused_by_name(value: object) -> None:
    message = ChatMessage(role="user", content="private words", additional_kwargs={"x": value})
    with pytest.raises(InvalidMessageError, match="user message with blocks TextBlock") as caught:
        codec.encode_message(message)
    assert "private words" not in str(caught.value)
    assert "nothing was stored" in caught.value.remedy


@pytest.mark.parametrize(
    "data", ["", "{", "[]", "null", '{"role": "user"}', '{"role": "nobody", "additional_kwargs": {}, "blocks": []}']
)
def test_a_damaged_row_raises(data: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        codec.decode_message(data)


@st.composite
def damaged(draw: st.DrawFn, row: st.SearchStrategy[str]) -> str | None:
    """A row of which a part was lost, doubled or overwritten."""
    text = draw(row)
    start, end = sorted(draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    part = draw(st.sampled_from(["", '"', '","', '"},{"', "\\", text[start:end] * 2, '"}]}']))
    return draw(st.sampled_from([None, text[:start] + part + text[end:]]))


@given(st.lists(MESSAGES.map(codec.encode_message), max_size=6), st.data())
def test_many_rows_are_read_as_each_alone_whichever_is_damaged(rows: list[str], data: st.DataObject) -> None:
    told: list[str | None] = [*rows]
    if rows:
        hurt = data.draw(st.integers(0, len(rows) - 1))
        told[hurt] = data.draw(damaged(st.just(rows[hurt])))
    alone = [codec.decode_sources([row])[0] for row in told]
    for together, one, row in zip(codec.decode_sources(told), alone, told, strict=True):
        assert type(together) is type(one)
        assert isinstance(one, Exception) or together == one
        if isinstance(one, Exception):
            with pytest.raises(type(one)):
                codec.decode_message(row)  # type: ignore[arg-type]  # a row may have lost its text
        else:
            assert row is not None
            assert copies.fresh([one])[0] == codec.decode_message(row)


def test_a_message_of_several_blocks_among_plain_ones_costs_no_parse_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ChatMessage(role="user", blocks=[TextBlock(text="a"), TextBlock(text="b")])
    seen = ChatMessage(role="user", blocks=[TextBlock(text="a"), ImageBlock(url="https://x.org/a.png", detail="low")])
    plain = ChatMessage(role="user", content='it says "},{" in it')
    messages = [plain, two, plain, seen, plain]
    rows = [codec.encode_message(message) for message in messages]
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(codec.json, "loads", lambda text: parsed.append(text) or loads(text))
    assert copies.fresh(one for one in codec.decode_sources(rows) if not isinstance(one, Exception)) == messages
    assert len(parsed) == 1


@given(MESSAGES, MESSAGES)
def test_equal_hashes_mean_equal_messages(one: ChatMessage, other: ChatMessage) -> None:
    hashes = [codec.content_hash(codec.encode_message(message)) for message in (one, other)]
    assert (hashes[0] == hashes[1]) is (codec.encode_message(one) == codec.encode_message(other))
    assert all(len(name) == 32 for name in hashes)


@given(
    st.builds(
        MessageMeta,
        sent_from=ANY_TEXT,
        send_to=st.lists(ANY_TEXT, max_size=3).map(tuple),
        cause_by=ANY_TEXT,
        utc_offset_seconds=st.integers(-86_399, 86_399),
        extra=st.dictionaries(ANY_TEXT, JSON, max_size=2),
    )
)
def test_metadata_comes_back_equal(meta: MessageMeta) -> None:
    written = codec.encode_meta(meta)
    assert codec.decode_meta(written) == meta
    assert (written is None) is (meta == MessageMeta())
    assert "\0" not in (written or "")


def test_metadata_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="Metadata"):
        codec.encode_meta(MessageMeta(extra={"x": object()}))


@given(ANY_TEXT)
def test_storable_text_is_what_every_database_takes(text: str) -> None:
    clean = codec.storable(text)
    assert "\0" not in clean
    assert clean.encode().decode() == clean
    assert codec.storable(clean) == clean
    if clean == text.replace("\0", ""):
        assert codec.storable(text + "🐈 猫") == clean + "🐈 猫"


@given(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)), st.integers(-14 * 3600, 14 * 3600))  # noqa: DTZ001
def test_times_keep_their_moment_and_zone(naive: datetime, offset: int) -> None:
    time = naive.replace(tzinfo=timezone(timedelta(seconds=offset)))
    back = from_microseconds(to_microseconds(time), offset)
    assert back == time
    assert back.utcoffset() == time.utcoffset()


COUNTS = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.none(),
    st.sampled_from([to_microseconds(datetime(year, 1, 1)) for year in (1, 2, 9999)]),  # noqa: DTZ001
)


@given(COUNTS, st.one_of(st.just(0), st.integers()))
def test_a_moment_that_is_checked_can_be_made(count: Any, offset: int) -> None:
    wrong = (ValueError, TypeError, OverflowError)
    try:
        check_moment(count, offset)
    except wrong:
        with pytest.raises(wrong):
            from_microseconds(count, offset)
    else:
        assert from_microseconds(count, offset).tzinfo is not None


def test_naive_times_mean_utc() -> None:
    assert from_microseconds(to_microseconds(datetime(2026, 1, 2))) == datetime(  # noqa: DTZ001
        2026, 1, 2, tzinfo=timezone.utc
    )
