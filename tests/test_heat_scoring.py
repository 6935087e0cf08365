"""The formulas of the tiers equal tables computed by hand."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_memory_tiers.heat import (
    RAW,
    Known,
    Scale,
    Tenant,
    calibrated,
    coverage,
    eviction_order,
    heat,
    heat_parts,
    jaccard,
    overflow_order,
    rarity,
    segment_score,
    staleness,
    term_cosine,
)

NOW = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)


def ago(**time: float) -> datetime:
    return NOW - timedelta(**time)


@pytest.mark.parametrize(
    ("visits", "pages", "hours", "expected"),
    [
        (2, 3, 24, 5.3679),  # Δt = τ
        (0, 0, 0, 1.0),
        (0, 4, 0, 5.0),
        (1, 1, 48, 2.1353),
        (7, 0, 240, 7.0000),
        (0, 1, -5, 2.0),  # a touch in the future is now
    ],
)
def test_heat_is_visits_and_pages_and_recency(visits: int, pages: int, hours: float, expected: float) -> None:
    assert heat(visits, pages, ago(hours=hours), NOW) == pytest.approx(expected, abs=5e-5)


def test_heat_weighs_its_parts_as_told() -> None:
    parts = heat_parts(2, 3, ago(hours=6), NOW, alpha=0.5, beta=2, gamma=10, tau_hours=6)
    assert (parts.visits, parts.pages) == (1.0, 6.0)
    assert parts.recency == pytest.approx(10 / math.e)
    assert parts.total == heat(2, 3, ago(hours=6), NOW, 0.5, 2, 10, 6)


@given(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1e5), st.floats(0, 1e5))
def test_heat_falls_with_time_and_rises_with_use(visits: int, pages: int, older: float, newer: float) -> None:
    old, new = sorted((older, newer), reverse=True)
    assert heat(visits, pages, ago(hours=old), NOW) <= heat(visits, pages, ago(hours=new), NOW)
    assert heat(visits, pages, ago(hours=old), NOW) < heat(visits + 1, pages, ago(hours=old), NOW)


@pytest.mark.parametrize(
    ("cosine", "mine", "theirs", "expected"),
    [
        (0.4, "ab", "ab", 1.4),
        (0.4, "abc", "bcd", 0.9),
        (0.6, "", "", 0.6),
        (0.0, "a", "b", 0.0),
        (-0.2, "ab", "bc", -0.2 + 1 / 3),
    ],
)
def test_a_page_belongs_by_cosine_and_shared_keywords(cosine: float, mine: str, theirs: str, expected: float) -> None:
    assert segment_score(cosine, list(mine), list(theirs)) == pytest.approx(expected)


def test_jaccard_of_nothing_is_nothing() -> None:
    assert jaccard([], []) == 0.0


def test_a_scale_makes_related_and_unrelated_texts_mean_the_same_for_every_model() -> None:
    narrow = calibrated(pairs=[0.91, 0.92, 0.93], others=[0.86, 0.88, 0.9])
    wide = calibrated(pairs=[0.5, 0.6], others=[0.0, -0.1, 0.1])
    for scale, unrelated, related in ((narrow, 0.88, 0.92), (wide, 0.0, 0.55)):
        assert scale.of(unrelated) == pytest.approx(0.0)
        assert scale.of(related) == pytest.approx(0.6)
        assert scale.of(1.0) <= 1.0
        assert scale.of(-1.0) == 0.0
    assert RAW.of(0.88) == 0.88


@pytest.mark.parametrize(("pairs", "others"), [([1.0, 1.0], [1.0, 1.0]), ([], []), ([0.1], [0.3])])
def test_a_model_that_tells_nothing_apart_says_nothing(pairs: list[float], others: list[float]) -> None:
    scale = calibrated(pairs, others)
    assert scale.of(1.0) == scale.of(0.3) == 0.0
    assert Scale(0.5, 0.5).of(0.9) == 0.0


def test_words_are_compared_by_their_rarity() -> None:
    weights = rarity([{"cat", "food"}, {"cat", "vet"}, {"train"}])
    assert weights["cat"] == pytest.approx(math.log(2.5))
    assert weights["vet"] == pytest.approx(math.log(4))
    assert term_cosine({"cat": 1, "vet": 1}, {"cat": 1, "vet": 1}, weights) == pytest.approx(1.0)
    assert term_cosine({"cat": 1}, {"train": 2}, weights) == 0.0
    assert term_cosine({}, {"train": 2}, weights) == 0.0
    cat, vet = math.log(2.5), math.log(4)
    expected = cat * cat / (math.hypot(cat, vet) * cat)
    assert term_cosine({"cat": 1, "vet": 1}, {"cat": 1}, weights) == pytest.approx(expected)


def test_a_question_is_covered_by_the_share_of_its_rare_words() -> None:
    weights = rarity([{"cat", "food"}, {"cat", "vet"}, {"train"}], only=["cat", "unheard"])
    cat, rarest = math.log(2.5), math.log(4)
    assert weights == pytest.approx({"cat": cat, "unheard": rarest})
    assert coverage(["cat", "unheard"], {"cat"}, weights) == pytest.approx(cat / (cat + rarest))
    assert coverage([], {"cat"}, weights) == 0.0
    assert coverage(["cat"], {"cat": 3}, {}) == 1.0


def tenant(name: str, heat_: float, hours: float = 100, visits: int = 0, **more: bool) -> Tenant:
    return Tenant(name, heat_, ago(hours=hours), visits, **more)


def test_the_coldest_leaves_first_newcomers_last_and_pinned_ones_never() -> None:
    tenants = [
        tenant("hot", 9.0),
        tenant("cold", 0.1),
        tenant("pinned", 0.0, pinned=True),
        tenant("new", 0.5, hours=1),
        tenant("warm", 2.0),
    ]
    assert eviction_order(tenants, NOW) == ["cold", "warm", "hot", "new"]
    assert eviction_order(tenants, NOW, grace_hours=0) == ["cold", "new", "warm", "hot"]


def test_the_policy_of_memoryos_is_least_frequently_used() -> None:
    tenants = [tenant("b", 0.1, visits=5), tenant("a", 9.0, visits=1), tenant("new", 2.0, hours=0, visits=0)]
    assert eviction_order(tenants, NOW, policy="memoryos") == ["new", "a", "b"]


def test_knowledge_that_is_unimportant_and_old_at_once_leaves_first() -> None:
    known = [
        Known("trifle, new", 0.2, ago(days=1)),  # .8
        Known("trifle, old", 0.2, ago(days=100)),  # 80
        Known("vital, old", 1.0, ago(days=1000)),  # 0
        Known("middling, older", 0.6, ago(days=150)),  # 60
    ]
    assert [one.id for one in known if staleness(one.importance, 100) == 0] == ["vital, old"]
    assert overflow_order(known, NOW) == ["trifle, old", "middling, older", "trifle, new", "vital, old"]
    assert overflow_order(known, NOW, by="fifo") == ["vital, old", "middling, older", "trifle, old", "trifle, new"]


def test_of_equally_stale_knowledge_the_less_important_leaves_then_the_older() -> None:
    known = [Known("b", 1.0, ago(days=2)), Known("a", 1.0, ago(days=9)), Known("c", 0.4, NOW)]
    assert overflow_order(known, NOW) == ["c", "a", "b"]
