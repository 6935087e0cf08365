"""Counting, flushing and packing, case by case."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.memory import Memory
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.budget import (
    Item,
    Packed,
    Packer,
    Part,
    Row,
    TokenCounter,
    WindowRow,
    plan_flush,
    section_text,
    window_row,
)
from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.rendering import render

WORDS = TokenCounter(str.split)
TIKTOKEN = TokenCounter(get_tokenizer())


def words(count, mark="w"):
    return " ".join([mark] * count)


def said(role, count, at=0, **kwargs):
    message = ChatMessage(role=role, content=words(count, f"{role[0]}{at}"), additional_kwargs=kwargs)
    return Row(message, WORDS.message(message), (1, at))


def call(at, *ids, count=3):
    blocks = [ToolCallBlock(tool_call_id=i, tool_name="look", tool_kwargs={"q": words(count)}) for i in ids]
    message = ChatMessage(role="assistant", blocks=blocks)
    return Row(message, WORDS.message(message), (1, at))


def answer(at, call_id, count=3):
    message = ChatMessage(role="tool", content=words(count), additional_kwargs={"tool_call_id": call_id})
    return Row(message, WORDS.message(message), (1, at))


def packer(rows, limit, counter=WORDS, **kwargs):
    return Packer(counter, limit=limit, rows=rows, render=kwargs.pop("render", render), **kwargs)


def pack(rows, limit, parts=(), counter=WORDS, **kwargs) -> Packed:
    packing = packer(rows, limit, counter, **kwargs)
    packing.begin([part for part in parts if part.priority == 0])
    for part in sorted(parts, key=lambda part: part.priority):
        if part.priority > 0:
            packing.take(part)
    packing.fill()
    return packing.result()


def items(*counts, mark="i"):
    return tuple(Item(words(count, f"{mark}{at}")) for at, count in enumerate(counts))


def kept(packed, name):
    return [item.text.split()[0] for part in packed.parts if part.part.name == name for item in part.items]


def shown(packed):
    return [row.place[1] for row in packed.rows]


def window(*turns):
    """Rows of (user tokens, assistant tokens) turns; sequence numbers from 1."""
    rows = []
    for user, assistant in turns:
        rows.append(WindowRow(len(rows) + 1, "user", user))
        rows.append(WindowRow(len(rows) + 1, "assistant", assistant))
    return rows


# --- counting


@pytest.mark.parametrize("counter", [TIKTOKEN, WORDS], ids=["tiktoken", "words"])
@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="user", content="Hello, where did I leave my keys? 钥匙 🔑"),
        ChatMessage(role="user", content=""),
        ChatMessage(role="user", blocks=[]),
        ChatMessage(role="assistant", content="x", additional_kwargs={"finish": "stop", "n": [1, 2]}),
        ChatMessage(
            role="user",
            blocks=[
                TextBlock(text="see"),
                ImageBlock(image=b"x"),
                AudioBlock(audio=b"x"),
                VideoBlock(video=b"x"),
                DocumentBlock(data=b"x"),
                CachePoint(cache_control=CacheControl(type="ephemeral")),
                TextBlock(text="these\nlines"),
            ],
        ),
    ],
    ids=["text", "empty", "no-blocks", "kwargs", "media"],
)
def test_text_and_media_cost_what_stock_counts(counter, message):
    stock = Memory.from_defaults(tokenizer_fn=counter._tokenizer_fn)
    assert counter.message(message) == stock._estimate_token_count(message)


def test_tool_calls_thinking_and_citations_are_counted():
    assert WORDS.block(ToolCallBlock(tool_name="look", tool_kwargs={"q": "a b c"})) == 5
    assert WORDS.block(ToolCallBlock(tool_name="look", tool_kwargs="raw a b")) == 4
    assert WORDS.block(ThinkingBlock(content="so it must be")) == 4
    assert WORDS.block(ThinkingBlock()) == 0
    cited = CitableBlock(title="A title", source="book", content=[TextBlock(text="a b c"), ImageBlock(image=b"x")])
    assert WORDS.block(cited) == 2 + 1 + 3 + 256
    citation = CitationBlock(cited_content="a b", source="book", title="T", additional_location_info={})
    assert WORDS.block(citation) == 2 + 1 + 1


def test_chinese_tool_arguments_are_counted_as_text_and_not_as_escapes():
    assert TokenCounter(list).block(ToolCallBlock(tool_name="f", tool_kwargs={"城": "北京"})) == len('f {"城": "北京"}')


def test_media_estimates_are_settings_and_part_of_the_name():
    counter = TokenCounter(str.split, image=7, document=9)
    assert counter.blocks([ImageBlock(image=b"x"), DocumentBlock(data=b"x")]) == 16
    assert counter.name == "builtins.str.split;image=7;document=9"


def test_an_unknown_block_type_is_refused_by_name():
    class HologramBlock(TextBlock.__base__):
        """A type of the future."""

    with pytest.raises(InvalidMessageError, match="HologramBlock"):
        TIKTOKEN.blocks([HologramBlock()])


def test_a_tokenizer_has_a_stable_name():
    class Vocabulary:
        name_or_path = "bert-base"

        def tokenize(self, text):
            return text.split()

    assert TIKTOKEN.name == "cl100k_base"
    assert TokenCounter(get_tokenizer().func).name == "cl100k_base"
    assert TokenCounter(list).name == "builtins.list"
    assert TokenCounter(re.escape).name == "re.escape"
    assert TokenCounter(lambda text: text.split(",")).name.startswith("custom:")
    assert TokenCounter(partial(str.split, sep=",")).name.startswith("custom:")
    assert TokenCounter(lambda text: text.split(","), name="cells").name == "cells"
    assert TokenCounter(Vocabulary().tokenize).name.startswith("custom:")


def test_unnamed_tokenizers_have_one_name_when_and_only_when_they_count_alike():
    counting = {
        "letters": lambda text: text[:],
        "words": lambda text: text.split(),
        "bytes": lambda text: text.encode("utf-8", "replace"),
        "parts": lambda text: re.findall(r"\w+|\S", text),
        "digits": lambda text: re.findall(r"\d|\w+|\S", text),
        "threes": lambda text: range(-(-len(text) // 3)),
    }
    names = {TokenCounter(tokenizer).name for tokenizer in counting.values()}
    assert len(names) == len(counting)
    again = TokenCounter(lambda text: [*text.split()]).name
    assert again == TokenCounter(counting["words"]).name
    assert re.fullmatch(r"custom:[0-9a-f]{8};image=1", TokenCounter(lambda text: text, image=1).name)


def test_a_tokenizer_that_cannot_count_the_probes_is_still_accepted():
    def picky(text):
        if not text.isascii():
            raise KeyError(text)
        return text.split()

    assert TokenCounter(picky).text("two words") == 2
    assert TokenCounter(picky).name != TokenCounter(lambda text: text.split()).name


def test_a_method_of_a_named_vocabulary_is_named_after_it():
    assert TokenCounter(_NAMED.tokenize).name.endswith("_Named.tokenize:bert-base")


class _Named:
    name_or_path = "bert-base"

    def tokenize(self, text):
        return text.split()


_NAMED = _Named()


def test_five_megabytes_are_counted_in_bounded_chunks_and_nearly_exactly():
    longest = 0

    def spy(text):
        nonlocal longest
        longest = max(longest, len(text))
        return text.split()

    text = "seven words stand in this one line\n" * 143_000
    assert TokenCounter(spy).text(text) == 7 * 143_000
    assert longest <= 100_000
    assert TIKTOKEN.text("a" * 250_000) == pytest.approx(250_000 / 8, abs=4)
    assert TIKTOKEN.text("word " * 100_000) == pytest.approx(100_001, abs=10)


def test_long_text_of_lines_is_counted_exactly():
    text = "A line of some words, and a number 12345.\n\n  indented\n/path\n" * 4_000
    assert len(text) > 200_000
    assert TIKTOKEN.text(text) == len(get_tokenizer()(text))


def test_surrogates_nul_and_special_tokens_are_counted_whatever_the_tokenizer_refuses():
    bare = TokenCounter(tiktoken.get_encoding("cl100k_base").encode)
    strict = TokenCounter(lambda text: list(text.encode()))
    for text in ["\ud800 half", "a\x00b", "👩‍👩‍👧 مرحبا", "see <|endoftext|> here"]:
        assert TIKTOKEN.text(text) > 0
        assert bare.text(text) > 0
        assert strict.text(text) > 0


# --- flushing


def test_a_window_within_its_limits_is_left_alone():
    assert plan_flush(window((5, 5), (5, 5)), limit_tokens=20, flush_tokens=10) == ()
    assert plan_flush([], limit_tokens=0, flush_tokens=10, window_messages=1) == ()


def test_two_hundred_turns_leave_a_window_within_the_limit_that_begins_with_a_user():
    rows = []
    for turn in window(*[(50, 150)] * 200):
        rows.append(turn)
        moved = plan_flush(rows, limit_tokens=2_800, flush_tokens=400)
        rows = [row for row in rows if row.seq not in moved]
        assert sum(row.tokens for row in rows) <= 2_800
        assert rows[0].role == "user"


def test_a_flush_moves_about_the_flush_size_oldest_first():
    rows = window(*[(10, 10)] * 10)
    assert plan_flush(rows, limit_tokens=190, flush_tokens=60) == (1, 2, 3, 4, 5, 6)
    assert plan_flush(rows, limit_tokens=190, flush_tokens=65) == (1, 2, 3, 4, 5, 6)
    assert plan_flush(rows, limit_tokens=190, flush_tokens=75) == tuple(range(1, 9))
    assert plan_flush(rows, limit_tokens=50, flush_tokens=10) == tuple(range(1, 17))


def test_leading_system_messages_stay():
    rows = [
        WindowRow(1, "system", 30),
        WindowRow(2, "developer", 5),
        WindowRow(3, "user", 50),
        WindowRow(4, "user", 50),
    ]
    assert plan_flush(rows, limit_tokens=90, flush_tokens=10) == (3,)


def test_the_newest_turn_stays_even_when_it_alone_is_too_large():
    rows = [
        *window((5, 5)),
        WindowRow(3, "user", 5),
        WindowRow(4, "assistant", 900),
        WindowRow(5, "tool", 900),
    ]
    assert plan_flush(rows, limit_tokens=100, flush_tokens=10) == (1, 2)
    assert plan_flush(rows[2:], limit_tokens=100, flush_tokens=10) == ()


def test_ten_large_tool_calls_flush_although_stock_counts_them_as_nothing():
    rows = []
    for at in range(10):
        rows += [said("user", 1, at * 3), call(at * 3 + 1, f"c{at}", count=200), answer(at * 3 + 2, f"c{at}")]
    plan = [window_row(row.place[1], row.message, row.tokens) for row in rows]
    assert plan_flush(plan, limit_tokens=100, flush_tokens=10) == tuple(range(27))


def test_without_a_user_the_newest_message_or_tool_group_stays():
    talk = [WindowRow(at, "assistant", 60) for at in range(3)]
    assert plan_flush(talk, limit_tokens=100, flush_tokens=10) == (0, 1)
    tools = [*talk, WindowRow(3, "assistant", 60, has_tool_calls=True), WindowRow(4, "tool", 60)]
    assert plan_flush(tools, limit_tokens=100, flush_tokens=10) == (0, 1, 2)


def test_turns_that_a_tool_call_connects_move_together():
    rows = [
        said("user", 9, 1),
        call(2, "a"),
        said("user", 9, 3),
        call(4, "b"),
        answer(5, "b"),
        answer(6, "a"),
    ]
    rows += [said("user", 2, 7)]
    plan = [window_row(row.place[1], row.message, row.tokens) for row in rows]
    assert plan_flush(plan, limit_tokens=30, flush_tokens=1) == (1, 2, 3, 4, 5, 6)
    roles = [WindowRow(row.seq, row.role, row.tokens) for row in plan if row.seq not in (4, 5)]
    assert plan_flush(roles, limit_tokens=20, flush_tokens=1) == (1, 2, 3, 6)


def test_answers_before_the_first_user_leave_first():
    rows = [
        WindowRow(1, "assistant", 10),
        *(WindowRow(row.seq + 1, row.role, row.tokens) for row in window((5, 5), (5, 5))),
    ]
    assert plan_flush(rows, limit_tokens=25, flush_tokens=1) == (1,)


def test_a_message_window_moves_no_more_turns_than_it_must():
    rows = [WindowRow(0, "system", 10), *window(*[(1, 1)] * 6)]
    assert plan_flush(rows, limit_tokens=1_000, flush_tokens=500, window_messages=12) == ()
    assert plan_flush(rows, limit_tokens=1_000, flush_tokens=500, window_messages=11) == (1, 2)


def test_older_style_tool_calls_in_additional_kwargs_are_recognised():
    message = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [{"id": "x"}]})
    row = window_row(4, message, 9)
    assert row == WindowRow(4, "assistant", 9, has_tool_calls=True, calls=("x",))
    assert window_row(5, answer(5, "x").message, 1).answers == "x"


# --- packing


def test_everything_is_shown_when_everything_fits():
    rows = [said("user", 3, 1), said("assistant", 3, 2), said("user", 3, 3)]
    packed = pack(rows, 100, [Part("facts", 1, items(2, 2)), Part("static", 0, blocks=(TextBlock(text="me"),))])
    assert shown(packed) == [1, 2, 3]
    assert kept(packed, "facts") == ["i0", "i1"]
    assert packed.left_out == ()
    assert packed.total == sum(WORDS.message(message) for message in render(packed))


def test_nothing_to_show_is_an_empty_context():
    assert pack([], 10) == Packed((), ())


def test_priority_0_stays_whole_and_larger_numbers_are_cut_first():
    rows = [said("user", 5, 1)]
    parts = [Part(f"p{n}", n, items(10, 10, mark=f"p{n}-")) for n in (0, 1, 2)]
    assert kept(pack(rows, 200, parts), "p2") == ["p2-0", "p2-1"]
    packed = pack(rows, 5 + 2 + 3 * 2 + 50, parts)
    assert [kept(packed, part.name) for part in parts] == [["p0-0", "p0-1"], ["p1-0", "p1-1"], ["p2-0"]]
    packed = pack(rows, 5 + 2 + 2 * 2 + 35, parts)
    assert [kept(packed, part.name) for part in parts] == [["p0-0", "p0-1"], ["p1-0"], []]
    packed = pack(rows, 5 + 2 + 2 + 20, parts)
    assert [kept(packed, part.name) for part in parts] == [["p0-0", "p0-1"], [], []]
    assert not packed.overflow


def test_exactly_priority_0_and_the_newest_user_message_are_returned_on_overflow():
    rows = [
        said("system", 3, 0),
        said("user", 3, 1),
        said("assistant", 3, 2),
        said("user", 30, 3),
        said("assistant", 1, 4),
    ]
    static = Part("static", 0, blocks=(TextBlock(text=words(20)),))
    packed = pack(rows, 40, [static, Part("facts", 1, items(1))])
    assert packed.overflow
    assert shown(packed) == [3]
    assert [part.part.name for part in packed.parts] == ["static"]
    assert packed.total == 30 + 20 + 4
    assert {(out.part, out.reason) for out in packed.left_out} == {("", "no room"), ("facts", "no room")}
    assert not pack(rows, 54, [static]).overflow


def test_an_overflowing_packer_offers_no_room():
    packing = packer([said("user", 30, 1)], 20)
    packing.begin()
    assert packing.overflow
    assert packing.room(Part("foreign", 1)) == 0


def test_oldest_tool_groups_of_an_oversize_newest_turn_go_first_with_their_results():
    rows = [said("user", 5, 1), call(2, "a", "b"), answer(3, "a", 20), answer(4, "b", 20)]
    rows += [call(5, "c"), answer(6, "c", 20), said("assistant", 10, 7)]
    assert shown(pack(rows, 45)) == [1, 5, 6, 7]
    assert shown(pack(rows, 30)) == [1, 7]
    assert shown(pack(rows, 500)) == [1, 2, 3, 4, 5, 6, 7]


def test_results_that_stand_apart_from_their_call_come_and_go_with_it():
    rows = [said("user", 5, 1), call(2, "a"), call(3, "b"), answer(4, "b", 30), answer(5, "a", 3)]
    assert shown(pack(rows, 25)) == [1]
    assert shown(pack(rows, 60)) == [1, 2, 5, 3, 4]  # each behind its call
    assert shown(pack(rows, 47)) == [1, 3, 4]


def test_a_tool_result_without_its_call_is_left_out_with_a_reason():
    rows = [said("system", 2, 0), answer(1, "gone"), said("user", 2, 2)]
    packed = pack(rows, 100)
    assert shown(packed) == [0, 2]
    assert [(out.reason, out.row.place) for out in packed.left_out] == [("no call", (1, 1))]


def told(*kinds):
    """A talk in short: u, a and s for who speaks; "c:x,y" calls; "r:x" is a result, "r" one that names no call."""
    rows = []
    for at, kind in enumerate(kinds):
        sort, _, ids = kind.partition(":")
        ids = [None if one == "-" else one for one in ids.split(",")] if ids else []
        if sort == "c":
            rows.append(call(at, *ids, count=1))
        elif sort == "r":
            kwargs = {"tool_call_id": ids[0]} if ids else {}
            rows.append(Row(ChatMessage(role="tool", content="w", additional_kwargs=kwargs), 5, (1, at)))
        elif sort == "k":  # as models wrote calls before there were blocks
            rows.append(said("assistant", 1, at, tool_calls=[{"id": one} for one in ids]))
        elif sort == "f":
            rows.append(said("assistant", 1, at, function_call={"name": ids[0]}))
        elif sort == "b":  # as LlamaIndex's OpenAI model does: in both places
            message = call(at, *ids, count=1).message
            message.additional_kwargs["tool_calls"] = [{"id": one, "type": "function"} for one in ids]
            rows.append(Row(message, 5, (1, at)))
        else:
            rows.append(said({"u": "user", "a": "assistant", "s": "system"}[sort], 1, at))
    return rows


WHOLE = [
    "u b:x r:x a u", "u b:x,y r:x r:y a u", "u c:x r:x a u", "u k:x,y r:x r:y a u", "u f:look r:look a u", "u f:look r a u",
    "u c:-,- r:look r:look a u", "u c:-,- r r a u", "u c:-,x r:look r:x a u", "u c:x r a u", "u c:x,x r:x r:x a u",
    "u c:x r:x r:x a u", "u c:look r:look a u c:look r:look a u", "u a r u", "u c:x", "u c:x c:y", "u b:x,y r:x",
]  # fmt: skip


@pytest.mark.parametrize("talk", WHOLE)
def test_whole_tool_exchanges_are_shown_whatever_names_their_calls(talk):
    rows = told(*talk.split())
    packed = pack(rows, 500)
    assert shown(packed) == list(range(len(rows)))
    assert packed.left_out == ()


@pytest.mark.parametrize(
    ("talk", "order"),
    [
        ("u r:x a u", [0, 2, 3]),
        ("u c:x a u", [0, 2, 3]),
        ("u b:x,y r:y a u", [0, 3, 4]),
        ("u c:-,- r a u", [0, 3, 4]),
        ("u f:look a u", [0, 2, 3]),
        ("u c:x,y r:x r:x a u", [0, 4, 5]),
        ("u k:y r:x a u", [0, 3, 4]),
        ("a u r a u", [0, 1, 3, 4]),
        ("u c:look r:look a u r:look a u", [0, 1, 2, 3, 4, 6, 7]),
        ("u c:x c:y r:y", [0, 2, 3]),
        ("u r:x c:x a u", [0, 3, 4]),
        ("u c:x c:y r:y r:x a", [0, 1, 4, 2, 3, 5]),
        ("u c:x u r:x a", [0, 1, 3, 2, 4]),
        ("u c:x a r:x a u", [0, 1, 3, 2, 4, 5]),
        ("u c:x u", [0, 2]),
    ],
)
def test_broken_tool_exchanges_are_not_shown_and_results_stand_behind_their_calls(talk, order):
    rows = told(*talk.split())
    packed = pack(rows, 500)
    assert shown(packed) == order
    assert {out.row.place[1] for out in packed.left_out} == set(range(len(rows))) - set(order)
    assert {out.reason for out in packed.left_out} <= {"no call", "no result"}


def refused(messages):
    """What a provider would refuse: a call whose results do not follow it at once, or a result behind no call."""
    waiting: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "tool":
            if message.additional_kwargs["tool_call_id"] not in waiting:
                return f"result {at}"
            waiting.remove(message.additional_kwargs["tool_call_id"])
            continue
        calls = [block.tool_call_id for block in message.blocks if isinstance(block, ToolCallBlock)]
        if waiting and not calls:
            return f"call before {at}"
        waiting = calls
    return None


@given(
    st.lists(st.sampled_from(["user", "assistant", "call", "call two", "result", "crossed"]), max_size=12), st.data()
)
def test_whatever_was_forgotten_a_provider_accepts_what_is_shown(kinds, data):
    rows, open_calls = [], []
    for at, kind in enumerate(kinds):
        if kind.startswith("call"):
            ids = [f"{at}a", f"{at}b"][: 1 + kind.endswith("two")]
            rows.append(call(at, *ids))
            open_calls += ids
        elif kind in {"result", "crossed"}:
            if open_calls:
                rows.append(answer(at, open_calls.pop(-1 if kind == "crossed" else 0)))
        else:
            rows.append(said(kind, 1, at))
    left = [row for row in rows if data.draw(st.booleans())]
    packed = pack(left, 5000)
    assert refused([row.message for row in packed.rows]) is None
    if refused([row.message for row in left]) is None:
        assert shown(packed) == [row.place[1] for row in left]


def test_older_turns_are_shown_whole_newest_first():
    rows = [said("user" if at % 2 else "assistant", 5, at) for at in range(1, 9)]
    assert shown(pack(rows, 24)) == [5, 6, 7, 8]


def test_a_window_without_a_user_shows_its_newest_messages():
    rows = [said("assistant", 5, at) for at in range(1, 5)]
    assert shown(pack(rows, 12)) == [3, 4]


def test_leading_system_messages_claim_before_the_rest_of_the_window():
    rows = [said("system", 5, 0), said("user", 5, 1), said("assistant", 5, 2), said("user", 5, 3)]
    assert shown(pack(rows, 12)) == [0, 3]


def test_the_window_claims_its_share_and_borrows_the_rest():
    rows = [said("user", 10, at) for at in range(1, 6)]
    facts = Part("facts", 1, items(10, 10, 10))
    tight = pack(rows, 55, [facts], window_share=20)
    assert shown(tight) == [4, 5]
    assert kept(tight, "facts") == ["i0", "i1", "i2"]
    assert shown(pack(rows, 55, [Part("facts", 1, items(10))], window_share=20)) == [2, 3, 4, 5]


def test_a_part_claims_its_share_and_borrows_what_is_left():
    rows = [said("user", 5, 1)]
    greedy, modest = Part("a", 1, items(10, 10, 10), share_tokens=15), Part("b", 2, items(10, 10))
    packed = pack(rows, 5 + 2 + 4 + 30, [greedy, modest])
    assert (kept(packed, "a"), kept(packed, "b")) == (["i0"], ["i0", "i1"])
    assert {out.reason for out in packed.left_out} == {"share"}
    assert kept(pack(rows, 5 + 2 + 4 + 40, [greedy, modest]), "a") == ["i0", "i1"]


def test_an_item_is_dropped_when_the_window_shows_all_its_sources():
    rows = [said("user", 5, 1), said("assistant", 5, 2), said("user", 5, 3)]
    both, beyond = frozenset({(1, 1), (1, 2)}), frozenset({(1, 2), (0, 9)})
    part = Part("recall", 1, (Item("seen", sources=both), Item("partly", sources=beyond)))
    packed = pack(rows, 100, [part])
    assert kept(packed, "recall") == ["partly"]
    assert [(out.reason, out.item.text) for out in packed.left_out] == [("already shown", "seen")]
    assert kept(pack(rows, 10, [part]), "recall") == ["seen"]


def test_an_item_leaves_when_lending_shows_its_sources_and_its_room_is_used():
    rows = [said("user", 6, 1), said("assistant", 6, 2), said("user", 6, 3)]
    double = Item(words(4, "double"), sources=frozenset({(1, 1), (1, 2)}))
    parts = [Part("recall", 1, (double, Item(words(4, "other"))), share_tokens=6)]
    packed = pack(rows, 6 + 12 + 4 + 4, parts, window_share=6)
    assert shown(packed) == [1, 2, 3]
    assert kept(packed, "recall") == ["other"]


def test_what_other_items_quote_is_not_quoted_again():
    one, two, both, more = (frozenset(places) for places in ({(0, 1)}, {(0, 2)}, {(0, 1), (0, 2)}, {(0, 2), (0, 3)}))
    lines = Part("lines", 1, (Item("line1", sources=one, quotes=True), Item("line2", sources=two, quotes=True)))
    pages = (
        Item("page", sources=both, quotes=True),
        Item("another", sources=more, quotes=True),
        Item("fact", sources=both),  # says in its own words what it comes from
    )
    packed = pack([said("user", 3, 1)], 60, [lines, Part("pages", 2, pages)])
    assert (kept(packed, "lines"), kept(packed, "pages")) == (["line1", "line2"], ["another", "fact"])
    assert [(out.reason, out.item.text) for out in packed.left_out] == [("already shown", "page")]
    fewer = replace(lines, items=lines.items[:1])
    assert "page" in kept(pack([said("user", 3, 1)], 60, [fewer, Part("pages", 2, pages)]), "pages")


def test_priority_0_items_stay_although_the_window_shows_them():
    rows = [said("user", 3, 1)]
    part = Part("journal", 0, (Item("seen", sources=frozenset({(1, 1)})),))
    assert kept(pack(rows, 50, [part]), "journal") == ["seen"]


def test_items_of_one_group_share_a_header_and_stand_in_order():
    def line(text, group, order):
        return Item(text, group=group, header=f"<session {group}>", footer="</session>", order=order)

    offered = (
        line("b2", "b", (2, 2)),
        line("a1", "a", (1, 1)),
        line("b1", "b", (2, 1)),
        Item("alone", order=(1, 5)),
    )
    assert section_text(offered).split("\n") == [
        *("<session a>", "a1", "</session>", "alone", "<session b>", "b1", "b2", "</session>")
    ]
    assert pack([], 100, [Part("m", 1, offered)]).total == 4 + 2 * 3 + 4


def test_a_whole_block_is_kept_or_left_out_as_one_piece():
    rows = [said("user", 5, 1)]
    block = Part("foreign", 1, blocks=(TextBlock(text=words(10)), ImageBlock(image=b"x")))
    assert pack(rows, 400, [block]).total == 5 + 4 + 10 + 256
    packed = pack(rows, 200, [block, Part("facts", 2, items(3))])
    assert [part.part.name for part in packed.parts] == ["facts"]
    assert [(out.part, out.reason, out.item) for out in packed.left_out] == [("foreign", "no room", None)]


@pytest.mark.parametrize("counter", [WORDS, TIKTOKEN], ids=["words", "tiktoken"])
def test_content_cut_to_the_offered_room_fits(counter):
    message = ChatMessage(role="user", content="Hello there.")
    packing = packer([Row(message, counter.message(message))], 60, counter)
    packing.begin()
    room = packing.room(Part("foreign", 1))
    text = next(t for n in range(60, 0, -1) if counter.text(t := "word. " * n) <= room)
    packing.take(Part("foreign", 1, blocks=(TextBlock(text=text),)), cut=True)
    packing.fill()
    packed = packing.result()
    assert [part.part.name for part in packed.parts] == ["foreign"]
    assert packed.total <= 60
    assert [(out.part, out.reason) for out in packed.left_out] == [("foreign", "cut")]


def test_room_is_bounded_by_the_share_and_by_what_is_free():
    packing = packer([said("user", 10, 1)], 100)
    packing.begin()
    assert packing.room(Part("a", 1)) == 100 - 10 - 2 - 2 - 1
    assert packing.room(Part("a", 1, share_tokens=20)) == 20 - 2 - 1
    assert packing.room(Part("a", 1, messages=(ChatMessage(role="user", content="x"),))) == 90


def test_foreign_chat_messages_are_counted_and_left_out_as_one_piece():
    rows = [said("user", 5, 1)]
    part = Part(
        "foreign",
        1,
        messages=(ChatMessage(role="user", content=words(9)), ChatMessage(role="assistant", content="x")),
    )
    assert pack(rows, 15, [part]).total == 15
    assert pack(rows, 14, [part]).total == 5


def test_places_shown_so_far_are_offered_for_the_recall_to_leave_out():
    packing = packer([said("user", 5, 1), said("assistant", 5, 2), said("user", 5, 3)], 100, window_share=6)
    packing.begin()
    assert packing.shown == {(1, 3)}


def test_an_item_comes_in_when_only_its_estimate_is_too_large():
    counter = TokenCounter(lambda text: [0] * -(-len(text) // 4))
    part = Part("m", 1, tuple(Item("abcd") for _ in range(9)))
    whole = pack([], 1_000, [part], counter)
    assert len(whole.parts[0].items) == 9
    again = pack([], whole.total, [part], counter)
    assert again.total == whole.total
    assert again.left_out == ()


def test_the_window_is_never_counted_again():
    seen = []

    def spy(text):
        seen.append(text)
        return text.split()

    rows = [said("user", 8, at) for at in range(50)]
    packing = packer(rows, 1_000, TokenCounter(spy))
    packing.begin()
    packing.take(Part("facts", 1, items(*[4] * 20)))
    packing.fill()
    assert len(packing.result().rows) == 50
    assert not any(row.message.content in text for row in rows for text in seen)
    assert len([text for text in seen if text.startswith("i7 ")]) == 1


def test_a_flush_for_number_moves_at_least_what_was_asked_for_as_whole_turns():
    rows = window(*[(1, 1)] * 10)
    sizes = {"limit_tokens": 1_000, "flush_tokens": 500, "window_messages": 16}
    assert plan_flush(rows, **sizes) == (1, 2, 3, 4)
    assert plan_flush(rows, **sizes, flush_messages=7) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert plan_flush(rows, **sizes, flush_messages=100) == tuple(range(1, 19))  # the newest turn stays
    assert plan_flush(rows[:16], **sizes, flush_messages=7) == ()
