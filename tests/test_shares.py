"""Shares of a token budget: claimed first, lent when unused, never a way over the limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers import ConfigurationError, Storage, TieredMemory, TokenBudget
from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.budget import Item, Packed, Packer, Part, Row, TokenCounter
from llama_index_memory_tiers.rendering import render

WORDS = TokenCounter(str.split)
NAMES = ("Summary", "RetrievedMessages", "Episodes")
PIECE = 10  # tokens of an item
TAGS = 2  # a section opens and closes
WRAPPER = 2  # so does <memory>


def words(count: int, mark: str = "w") -> str:
    return " ".join([mark] * count)


def turn(at: int, size: int) -> Row:
    return Row(ChatMessage(role="user", content=words(size, f"u{at}")), size, (1, at))


def part(name: str, sizes: list[int], share: int | None, priority: int = 1) -> Part:
    return Part(name, priority, items=tuple(Item(words(size, name)) for size in sizes), share_tokens=share)


def pack(limit: int, window: int, rows: list[Row], parts: list[Part]) -> Packed:
    packer = Packer(WORDS, limit=limit, rows=rows, render=render, window_share=window)
    packer.begin()
    for each in parts:
        packer.take(each)
    packer.fill()
    return packer.result()


def size_of(packed: Packed, name: str) -> int:
    return next((each.tokens for each in packed.parts if each.part.name == name), 0)


class Stock(BaseMemoryBlock[str]):
    """A third-party block that cuts its own text, from its end."""

    text: str = ""

    async def _aget(self, messages: Any = None, **_: Any) -> str:
        return self.text

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """It learns nothing."""

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str:
        return " ".join(content.split()[: max(0, len(content.split()) - tokens_to_truncate)])


class Offering(TieredMemoryBlock):
    """Offers items of ten words."""

    count: int = 0

    async def recall(self, query: Any, reader: Any) -> list[Item]:
        return [Item(words(PIECE, f"{self.name}{at}")) for at in range(self.count)]

    async def prepare(self, batch: Any, reader: Any, counter: Any) -> None:
        """It learns nothing."""


# --- what a budget is -------------------------------------------------------------------------------------------


def test_the_surveys_example_shares_all_of_its_8000_tokens():
    budget = TokenBudget.survey()
    assert budget == TokenBudget(
        total=8000, reserve=2000, window=3000, parts={"Summary": 800, "RetrievedMessages": 1200, "Episodes": 1000}
    )
    assert budget.window_tokens(0.7) + sum(budget.parts.values()) == budget.limit == 6000


def test_the_survey_takes_the_names_of_the_users_blocks_and_does_without_those_that_are_missing():
    budget = TokenBudget.survey(summary="So far", vector="Recall", episodes=None)
    assert dict(budget.parts) == {"So far": 800, "Recall": 1200}


def test_without_a_share_the_window_has_its_ratio_of_what_the_parts_leave_to_it():
    assert TokenBudget(1000, reserve=200).window_tokens(0.5) == 400
    assert TokenBudget(1000, reserve=200, parts={"a": 700}).window_tokens(0.5) == 100


def test_a_budget_does_not_change_when_the_callers_mapping_does():
    shares = {"a": 5}
    budget = TokenBudget(10, parts=shares)
    shares["a"] = 6
    assert budget.parts == {"a": 5}
    assert hash(budget) == hash(TokenBudget(10, parts={"a": 5}))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"total": 0}, "total=0"),
        ({"total": "8k"}, "total='8k'"),
        ({"total": 10, "reserve": -1}, "reserve=-1"),
        ({"total": 10, "reserve": 10}, "reserve=10"),
        ({"total": 10, "window": -1}, "window=-1"),
        ({"total": 10, "window": True}, "window=True"),
        ({"total": 10, "parts": {"Facts": -5}}, "parts['Facts']=-5"),
        ({"total": 10, "parts": {"Facts": 1.5}}, "parts['Facts']=1.5"),
        ({"total": 10, "parts": ["Facts"]}, "parts=['Facts']"),
        ({"total": 10, "parts": {1: 1}}, "parts={1: 1}"),
        ({"total": 10, "reserve": 3, "window": 4, "parts": {"Facts": 4}}, "shares of 8 tokens: window 4, Facts 4"),
    ],
)
def test_shares_that_cannot_hold_are_refused_by_name(bad: Any, named: str):
    with pytest.raises(ConfigurationError) as caught:
        TokenBudget(**bad)
    assert named in caught.value.given
    assert caught.value.allowed
    assert caught.value.remedy


def test_the_survey_refuses_one_name_for_two_parts():
    with pytest.raises(ConfigurationError, match="summary='Memory', vector='Memory'"):
        TokenBudget.survey(summary="Memory", vector="Memory")


# --- a memory with a budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TieredMemory, TieredMemory.from_defaults])
async def test_a_budget_sets_limit_reserve_and_window_of_a_memory(make: Callable[..., TieredMemory]):
    async with make(session_id="chat", budget=TokenBudget(900, reserve=100, window=300)) as memory:
        assert (memory.token_limit, memory.reserve_tokens, memory._window_tokens) == (900, 100, 300)
        for number in range(100):
            await memory.aput(ChatMessage(role="user", content=f"message number {number} about nothing at all"))
        active = await memory.amessages(MessageStatus.ACTIVE)
        assert sum(stored.tokens for stored in active) <= 300


@pytest.mark.parametrize("make", [TieredMemory, TieredMemory.from_defaults])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"token_limit": 901}, ["token_limit=901", "TokenBudget(total=900)"]),
        ({"reserve_tokens": 5}, ["reserve_tokens=5", "TokenBudget(reserve=100)"]),
    ],
)
def test_an_argument_that_contradicts_the_budget_is_refused_with_both_names(
    make: Callable[..., TieredMemory], other: dict[str, int], named: list[str]
):
    with pytest.raises(ConfigurationError) as caught:
        make(budget=TokenBudget(900, reserve=100), **other)
    assert all(name in caught.value.given for name in named)


async def test_an_argument_that_agrees_with_the_budget_may_be_given():
    async with TieredMemory(budget=TokenBudget(900, reserve=100), token_limit=900, reserve_tokens=100) as memory:
        assert memory.token_limit == 900


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (TokenBudget(900, parts={"Fact": 5}), "'Fact'"),
        (TokenBudget.survey(vector="Facts"), "'Summary', 'Episodes'"),
        (TokenBudget(900, parts={"Rules": 5}), "'Rules' of priority 0"),
        (7, "budget=7"),
        ({"total": 10, "share": 5}, "'share': 5"),
        ({"reserve": 10}, "{'reserve': 10}"),
    ],
)
def test_a_share_for_a_block_that_is_not_there_or_never_cut_is_refused(budget: Any, named: str):
    blocks = [Offering(name="Facts"), Offering(name="Rules", priority=0)]
    with pytest.raises(ConfigurationError) as caught:
        TieredMemory(budget=budget, memory_blocks=blocks)
    assert named in caught.value.given


async def test_sessions_and_handles_keep_the_budget(storage: Storage):
    budget = TokenBudget(900, reserve=100, window=300, parts={"Facts": 200})
    blocks = [Offering(name="Facts")]
    memory = TieredMemory(storage=storage, session_id="chat", budget=budget, memory_blocks=blocks)
    assert memory.for_session("other").budget == budget
    handle = json.loads(json.dumps(memory.to_handle()))
    again = TieredMemory.from_handle(handle, storage=storage, memory_blocks=blocks)
    assert (again.budget, again.token_limit, again._window_tokens) == (budget, 900, 300)
    assert again.to_handle() == memory.to_handle()
    larger = TieredMemory.from_handle(handle, storage=storage, memory_blocks=blocks, budget=TokenBudget(2000))
    assert (larger.token_limit, larger.reserve_tokens) == (2000, 0)
    with pytest.raises(ConfigurationError, match="token_limit=500"):
        TieredMemory.from_handle(handle, storage=storage, memory_blocks=blocks, token_limit=500)


async def contexts(budget: TokenBudget, blocks: list[BaseMemoryBlock[Any]]) -> Mapping[str, int]:
    """Tokens of each section and of all, of a session with one short message."""
    async with TieredMemory(
        session_id="chat", tokenizer_fn=str.split, budget=budget, memory_blocks=blocks, delivery="inline"
    ) as memory:
        await memory.aput(ChatMessage(role="user", content="hello"))
        report = await memory.aexplain()
    return {"": report.tokens, **{part.name: part.tokens for part in report.parts}}


async def test_a_full_block_keeps_to_its_share_and_claims_more_when_the_other_is_empty():
    budget = TokenBudget(87, window=1, parts={"A": 42, "B": 42})
    full = await contexts(budget, [Offering(name="A", count=50), Offering(name="B", count=50, priority=2)])
    assert (full["A"], full["B"]) == (42, 42)
    alone = await contexts(budget, [Offering(name="A", count=50), Offering(name="B", priority=2)])
    assert alone["A"] == 82
    late = await contexts(budget, [Offering(name="A"), Offering(name="B", count=50, priority=2)])
    assert late["B"] == 82


async def test_a_foreign_text_is_cut_to_its_share_and_to_the_spare_of_the_others():
    budget = TokenBudget(110, window=20, parts={"A": 40, "B": 40})
    long = Stock(name="A", text=words(500, "a"), priority=1)
    full = await contexts(budget, [long, Offering(name="B", count=50, priority=2)])
    assert 30 <= full["A"] <= 40 + 25  # its share and what nobody claims: the empty window and a wrapper
    assert full["B"] >= 32
    alone = await contexts(budget, [long, Offering(name="B", priority=2)])
    assert alone["A"] >= 100
    assert max(full[""], alone[""]) <= 110


async def test_a_foreign_text_within_its_share_is_whole():
    got = await contexts(TokenBudget(110, parts={"A": 40}), [Stock(name="A", text=words(30), priority=1)])
    assert got["A"] == 30 + TAGS


# --- what holds for all -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    pieces=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
    turns=st.integers(1, 6),
    slack=st.integers(0, PIECE - 1),
)
def test_when_all_parts_are_full_each_has_exactly_its_share(pieces: tuple[int, ...], turns: int, slack: int):
    shares = {name: TAGS + PIECE * count for name, count in zip(NAMES, pieces, strict=True)}
    wrapper = WRAPPER if any(pieces) else 0
    # A share that holds no item claims nothing, its tags included.
    limit = PIECE * turns + wrapper + sum(share for share in shares.values() if share > TAGS) + slack
    packed = pack(
        limit,
        PIECE * turns,
        [turn(at, PIECE) for at in range(20)],
        [part(name, [PIECE] * 20, shares[name], priority=at + 1) for at, name in enumerate(NAMES)],
    )
    assert {name: size_of(packed, name) for name in NAMES} == {
        name: share if share > TAGS else 0 for name, share in shares.items()
    }
    assert sum(row.tokens for row in packed.rows) == PIECE * turns
    assert packed.total == limit - slack


@st.composite
def _offers(draw: st.DrawFn) -> tuple[int, int, list[Row], list[Part]]:
    """Any budget with window and shares that sum up to at most the limit, and anything offered."""
    shares = [draw(st.integers(0, 60)) for _ in NAMES]
    window = draw(st.integers(1, 60))
    limit = window + sum(shares) + WRAPPER + draw(st.integers(0, 30))
    sizes = [draw(st.lists(st.integers(1, 30), max_size=10)) for _ in NAMES]
    rows = [turn(at, size) for at, size in enumerate(draw(st.lists(st.integers(1, 20), max_size=10)))]
    parts = [
        part(name, offered, share, priority=at + 1)
        for at, (name, offered, share) in enumerate(zip(NAMES, sizes, shares, strict=True))
    ]
    return limit, window, rows, parts


@settings(max_examples=150)
@given(_offers())
def test_the_sum_holds_spare_is_lent_and_no_part_is_skipped_that_would_fit_its_share(
    offer: tuple[int, int, list[Row], list[Part]],
):
    limit, window, rows, parts = offer
    packed = pack(limit, window, rows, parts)
    sections = {each.part.name: each for each in packed.parts}
    newest = rows[-1].tokens if rows else 0
    assert packed.total <= limit
    for each in parts:
        assert each.share_tokens is not None
        used = sections[each.name].tokens if each.name in sections else 0
        kept = sections[each.name].items if each.name in sections else ()
        assert all(item in each.items for item in kept)  # whole
        for left in (out.item for out in packed.left_out if out.part == each.name and out.item is not None):
            size = len(left.text.split())
            opening = 0 if used else TAGS
            # Lent: what was left out would not fit.
            assert packed.total + size + opening + (0 if packed.parts else WRAPPER) > limit
            # Claimed: only the newest turn, always shown, may take what was a part's share.
            if newest <= window:
                assert used + opening + size > each.share_tokens
