"""What holds for every window, every limit and every tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock, ToolCallBlock
from llama_index.core.memory.memory import InsertMethod
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.budget import (
    Item,
    Packed,
    PackedPart,
    Packer,
    Part,
    Row,
    TokenCounter,
    WindowRow,
    plan_flush,
    window_row,
)
from llama_index_memory_tiers.rendering import render, strip_recalled

IMAGE = ImageBlock(image=b"bytes")
COUNTERS = {
    "tiktoken": TokenCounter(get_tokenizer(), image=9),
    "words": TokenCounter(str.split, image=9),
    "characters": TokenCounter(list, image=40),
    "quarters": TokenCounter(lambda text: [0] * -(-len(text) // 4), image=9),
    "framed": TokenCounter(lambda text: ["BOS", *re.findall(r"\w+|[^\w\s]", text), "EOS"], image=9),
    "distinct": TokenCounter(lambda text: list(set(text)), image=9),
}
TEMPLATE = RichPromptTemplate(
    "This is what you know, friend:\n{% for name, blocks in memory_blocks %}## {{ name }} ##\n"
    "{% for block in blocks %}{{ block.text }}{% endfor %}\n{% endfor %}"
)
RENDERS = {
    "system": render,
    "user": partial(render, insert_method=InsertMethod.USER),
    "split": partial(render, recall_position="user"),
    "template": partial(render, template=TEMPLATE),
}

sentences = st.lists(
    st.sampled_from(
        ["I", "like", "tea,", "you?", "Berlin", "2023", "/path", "猫", "don't\n\n", "", "<b>", "...", "coffee"]
    ),
    min_size=1,
    max_size=12,
).map(" ".join)


@st.composite
def turns(draw, at):
    """One turn: a user, then answers and tool calls with their results, which may stand apart."""
    messages = [
        ChatMessage(role="user", blocks=[TextBlock(text=draw(sentences)), *draw(st.sampled_from([[], [IMAGE]]))])
    ]
    for step in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            messages.append(ChatMessage(role="assistant", content=draw(sentences)))
            continue
        ids = [f"{at}-{step}-{n}" for n in range(draw(st.integers(1, 2)))]
        calls = [ToolCallBlock(tool_call_id=i, tool_name="look", tool_kwargs={"q": draw(sentences)}) for i in ids]
        results = [
            ChatMessage(role="tool", content=draw(sentences), additional_kwargs={"tool_call_id": i}) for i in ids
        ]
        late = results.pop() if draw(st.integers(0, 5)) == 0 else None
        messages += [ChatMessage(role="assistant", blocks=calls), *results]
        if late is not None:
            messages += [*([ChatMessage(role="user", content="hurry")] if draw(st.booleans()) else []), late]
    if draw(st.integers(0, 9)) == 0:
        messages.append(ChatMessage(role="system", content=draw(sentences)))
    return messages


@st.composite
def windows(draw):
    lead = [ChatMessage(role="system", content=draw(sentences)) for _ in range(draw(st.sampled_from([0, 0, 1, 2])))]
    head = [ChatMessage(role="assistant", content=draw(sentences)) for _ in range(draw(st.sampled_from([0, 0, 0, 2])))]
    body = [message for at in range(draw(st.integers(0, 5))) for message in draw(turns(at))]
    return [*lead, *head, *body]


@st.composite
def parts(draw, places):
    offered = []
    for at in range(draw(st.integers(0, 4))):
        name, priority = f"block {at}", draw(st.integers(0, 3))
        share = draw(st.one_of(st.none(), st.integers(0, 60)))
        if draw(st.integers(0, 3)) == 0:
            blocks = (TextBlock(text=draw(sentences)), *draw(st.sampled_from([(), (IMAGE,)])))
            offered.append(Part(name, priority, blocks=blocks, share_tokens=share, stable=True))
        elif draw(st.integers(0, 5)) == 0:
            messages = (ChatMessage(role=draw(st.sampled_from(["user", "system"])), content=draw(sentences)),)
            offered.append(Part(name, priority, messages=messages, share_tokens=share))
        else:
            offered.append(Part(name, priority, draw(item_lists(places)), share_tokens=share))
    return sorted(offered, key=lambda part: part.priority)


@st.composite
def item_lists(draw, places):
    found = []
    for _ in range(draw(st.integers(0, 8))):
        group = draw(st.sampled_from(["", "", "a", "b"]))
        frame = {"header": f"<session {group}>", "footer": "</session>"} if group else {}
        sources = frozenset(draw(st.lists(st.sampled_from(places), max_size=2))) if places else frozenset()
        order = (float(draw(st.integers(0, 3))),)
        found.append(Item(draw(sentences).strip("\n"), group=group, order=order, sources=sources, **frame))
    return tuple(found)


@st.composite
def cases(draw, counter):
    messages = draw(windows())
    rows = [Row(message, counter.message(message), (1, at)) for at, message in enumerate(messages)]
    offered = draw(parts([row.place for row in rows]))
    most = sum(row.tokens for row in rows) + 200
    return rows, offered, draw(st.integers(0, most)), draw(st.one_of(st.none(), st.integers(0, most)))


def pack(counter, renderer, case):
    rows, offered, limit, window_share = case
    packer = Packer(counter, limit=limit, rows=rows, render=renderer, window_share=window_share)
    packer.begin([part for part in offered if part.priority == 0])
    for part in offered:
        if part.priority > 0:
            packer.take(part)
    packer.fill()
    return packer.result()


def total(counter, renderer, packed):
    return sum(counter.message(message) for message in renderer(packed))


def with_item(packed, part, item):
    """The same context with one more thing of a part; an item where its part would rank it."""
    before = next((p for p in packed.parts if p.part is part), PackedPart(part, (), 0))
    chosen = [*before.items, *([item] if item else [])]
    ranked = tuple(sorted(chosen, key=lambda i: next(n for n, other in enumerate(part.items) if other is i)))
    rest = [p for p in packed.parts if p.part is not part]
    together = sorted([*rest, PackedPart(part, ranked, 0)], key=lambda p: p.part.priority)
    return replace(packed, parts=tuple(together))


def assert_results_have_their_calls(messages):
    called = {b.tool_call_id for m in messages for b in m.blocks if isinstance(b, ToolCallBlock)}
    answered = {m.additional_kwargs["tool_call_id"] for m in messages if m.role == "tool"}
    assert answered <= called


def turns_of(rows):
    """From each user to the next; a turn that answers calls of an earlier one belongs to that one."""
    found = []
    for row in rows:
        if row.message.role == "user" or not found:
            found.append([])
        found[-1].append(row)
        answers = row.message.additional_kwargs.get("tool_call_id")
        home = next((at for at, turn in enumerate(found) if answers and answers in str(turn[0:])), len(found) - 1)
        found[home:] = [[row for turn in found[home:] for row in turn]]
    return found


@pytest.mark.parametrize("renderer", RENDERS)
@pytest.mark.parametrize("name", COUNTERS)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_context_is_within_its_limit_whole_where_it_must_be_and_maximal(name, renderer, data):
    counter, write = COUNTERS[name], RENDERS[renderer]
    rows, offered, limit, share = data.draw(cases(counter))
    packed = pack(counter, write, (rows, offered, limit, share))

    assert packed.total == total(counter, write, packed)
    users = [row for row in rows if row.message.role == "user"]
    must = [part for part in offered if part.priority == 0]
    base = Packed(
        tuple(users[-1:]), tuple(PackedPart(p, p.items, 0) for p in must if p.items or p.blocks or p.messages)
    )
    assert packed.overflow == (total(counter, write, base) > limit)
    assert packed.overflow or packed.total <= limit

    kept = {part.part.name: part for part in packed.parts}
    assert all(kept[part.name].items == part.items for part in must if part.items)
    assert not users or users[-1] in packed.rows
    assert_results_have_their_calls([row.message for row in packed.rows])
    if packed.overflow:
        assert packed.rows == base.rows
        assert [part.part for part in packed.parts] == [part.part for part in base.parts]
        return
    shown = {row.place for row in packed.rows}
    for part in offered:
        have = kept[part.name].items if part.name in kept else ()
        for item in part.items:
            if not any(item is one for one in have) and not (item.sources and item.sources <= shown):
                assert total(counter, write, with_item(packed, part, item)) > limit
        if (part.blocks or part.messages) and part.name not in kept:
            assert total(counter, write, with_item(packed, part, None)) > limit
        redundant = [item for item in have if item.sources and item.sources <= shown and part.priority > 0]
        assert not redundant
    lead = next((at for at, row in enumerate(rows) if row.message.role != "system"), len(rows))
    for turn in turns_of(rows[lead:])[:-1] if users else []:
        missing = [row for row in turn if row not in packed.rows]
        more = replace(packed, rows=tuple(sorted([*packed.rows, *missing], key=lambda row: row.place)))
        assert not missing or total(counter, write, more) > limit


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_kept_and_left_out_is_everything_once(data):
    counter = COUNTERS["words"]
    rows, offered, limit, share = data.draw(cases(counter))
    packed = pack(counter, render, (rows, offered, limit, share))
    out_rows = [out.row for out in packed.left_out if out.row is not None]
    assert sorted(row.place for row in [*packed.rows, *out_rows]) == [row.place for row in rows]
    kept = [id(item) for part in packed.parts for item in part.items]
    out = [id(left.item) for left in packed.left_out if left.item is not None]
    assert sorted(kept + out) == sorted(id(item) for part in offered for item in part.items)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_an_oversize_newest_turn_loses_its_oldest_messages_first(data):
    counter = COUNTERS["words"]
    messages = [ChatMessage(role="user", content="go")]
    for at in range(data.draw(st.integers(1, 6))):
        call = ToolCallBlock(tool_call_id=str(at), tool_name="f", tool_kwargs={})
        messages.append(ChatMessage(role="assistant", blocks=[call]))
        kwargs = {"tool_call_id": str(at)}
        messages.append(ChatMessage(role="tool", content=data.draw(sentences), additional_kwargs=kwargs))
    rows = [Row(message, counter.message(message), (1, at)) for at, message in enumerate(messages)]
    packed = pack(counter, render, (rows, [], data.draw(st.integers(1, 80)), None))
    after = packed.rows[1:]
    assert after == tuple(rows[len(rows) - len(after) :])
    assert len(after) % 2 == 0


@settings(deadline=None, max_examples=100)
@given(messages=windows(), data=st.data())
def test_a_flush_keeps_what_must_stay_and_gets_within_the_limit(messages, data):
    counter = COUNTERS["words"]
    rows = [window_row(at, message, counter.message(message)) for at, message in enumerate(messages)]
    limit, size = data.draw(st.integers(0, 150)), data.draw(st.integers(0, 60))
    most = data.draw(st.one_of(st.none(), st.integers(1, 20)))
    moved = plan_flush(rows, limit_tokens=limit, flush_tokens=size, window_messages=most)

    lead = next((at for at, row in enumerate(rows) if row.role != "system"), len(rows))
    assert list(moved) == list(range(lead, lead + len(moved)))
    stays = [row for row in rows if row.seq not in moved]
    body = stays[lead:]
    assert_results_have_their_calls([messages[row.seq] for row in stays])
    if moved and any(row.role == "user" for row in rows):
        assert body[0].role == "user"
    assert not rows[lead:] or body
    over = sum(row.tokens for row in stays) > limit or len(body) > (most or len(body))
    assert not over or plan_flush(stays, limit_tokens=limit, flush_tokens=size, window_messages=most) == ()
    if over and not any(row.role == "tool" for row in body):
        assert sum(row.role == "user" for row in body) <= 1
    if sum(row.tokens for row in rows) <= limit and len(rows) - lead <= (most or len(rows)):
        assert moved == ()


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=30),
    limit=st.integers(50, 300),
    size=st.integers(1, 100),
)
def test_a_flush_moves_the_turns_nearest_to_the_flush_size(sizes, limit, size):
    rows = [WindowRow(at, "user", tokens) for at, tokens in enumerate(sizes)]
    moved = plan_flush(rows, limit_tokens=limit, flush_tokens=size)
    needed = sum(sizes) - limit
    if needed <= 0 or len(moved) == len(sizes) - 1:
        return
    amount = sum(sizes[: len(moved)])
    assert amount >= needed
    assert abs(amount - size) <= abs(amount + sizes[len(moved)] - size)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.sampled_from("aB1 </\n\t.,'字é-|>"), max_size=12), max_size=12).map("\n".join))
def test_lines_of_a_text_count_like_the_text(text):
    counter = COUNTERS["tiktoken"]
    pieces = counter.lines(text)
    assert "".join(pieces) == text
    assert sum(map(counter.text, pieces)) == counter.text(text)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_was_recalled_is_taken_out_again_exactly(data):
    counter = COUNTERS["words"]
    rows, offered, _, _ = data.draw(cases(counter))
    offered = [part for part in offered if not part.messages]
    nasty = st.sampled_from(["</memory>", "<memory>\n<a>\nb\n</a>\n</memory>", "</block_0>\n</memory>\nx"])
    offered.append(Part("said", 1, (Item(data.draw(nasty)),)))
    offered.append(Part("told", 1, blocks=(TextBlock(text=data.draw(nasty)),)))
    for write in (RENDERS["user"], RENDERS["split"]):
        packed = pack(counter, write, (rows, offered, 10_000, None))
        users = [row.message for row in packed.rows if row.message.role == "user"]
        back = [strip_recalled(message) for message in write(packed) if message.role == "user"]
        assert back == users
