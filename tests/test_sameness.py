"""Whether two sentences say the same is told by one rule, carefully, and looked up without comparing all with all."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import APART, SAME

from llama_index_memory_tiers import sameness
from llama_index_memory_tiers.blocks.heat.promotion import LongTerm
from llama_index_memory_tiers.blocks.heat.sharing import _words, distinct
from llama_index_memory_tiers.records import NewRecord
from llama_index_memory_tiers.retention import Holding, NearDuplicates, plan_near_duplicates
from llama_index_memory_tiers.sameness import Known, same_fact, same_note

NOW = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
LONG = [
    "Maya",
    "{}",
    "bikes",
    "along",
    "the",
    "old",
    "river",
    "path",
    "with",
    "her",
    "two",
    "big",
    "dogs",
    "each",
    "Sunday",
    "morning",
    "before",
    "breakfast",
]


def leaving(texts: list[str], **rule: Any) -> list[str]:
    """Texts that are replaced, of some of which the first is the oldest."""
    held = [Holding(str(at), "b", "fact", NOW + timedelta(hours=at), text) for at, text in enumerate(texts)]
    gone = plan_near_duplicates(NearDuplicates(**rule), held, NOW)
    return [texts[int(one.record_id)] for one in gone]


@pytest.mark.parametrize(("known", "said"), SAME)
def test_what_says_the_same_is_one_for_all(known, said):
    assert same_note(known, said)
    assert same_note(said, known)
    assert leaving([known, said]) == [known]


@pytest.mark.parametrize(("known", "said"), APART)
def test_what_facts_tell_apart_nobody_replaces(known, said):
    assert not same_note(known, said)
    assert not same_note(said, known)
    assert leaving([known, said]) == leaving([said, known]) == []


@pytest.mark.parametrize(("known", "said"), APART)
def test_what_facts_tell_apart_heat_keeps_beside_each_other(known, said):
    learnt = LongTerm(profile=None, known={})
    for at, text in enumerate((known, said)):
        assert learnt.learn(NewRecord(str(at), "fact", text, said_at=NOW, sources=((1, at),)))
    assert set(learnt.known) == set(distinct(learnt.known.values())) == {"0", "1"}


@pytest.mark.parametrize("name", ["will_smith", "will.smith", "will/2", "Will's", "李will"])
def test_a_name_in_an_id_is_a_word_of_it(name):
    assert {"will", "will's"} & _words(name)


@pytest.mark.parametrize("word", [*sorted(sameness._TURNS), "didn't", "seven7", "三", "%", "+"])
def test_a_word_that_turns_the_meaning_is_never_the_few_that_may_differ(word):
    with_it, without = (" ".join(LONG).format(said) for said in (word, ""))
    assert leaving([with_it, without]) == leaving([without, with_it]) == []
    assert leaving([" ".join(LONG).format("happily"), without]) != []


WORDS = st.sampled_from(["ann", "likes", "tea", "rome", "bike", "not", "5", "%", "the"])
TEXTS = st.lists(st.lists(WORDS, max_size=12).map(" ".join), max_size=12)


@given(TEXTS, st.sampled_from([0.05, 0.5, 0.7, 0.9, 1.0]))
@settings(deadline=None, max_examples=300)
def test_looking_up_finds_what_comparing_all_with_all_finds(texts, near):
    known, kept = Known(near=near), []
    for text in texts:
        twins = [one for one in kept if same_note(one, text, near=near)]
        longer = [one for one in kept if same_fact(one, text, near=near)]
        assert (known.find(text) in longer) if longer else (known.find(text) is None)
        found = known.find_or_add(text, text)
        assert (found in twins) if twins else (found is None)
        kept += [] if twins else [text]


def test_each_text_is_read_once_and_compared_with_few(monkeypatch):
    read: list[str] = []
    compared: list[Any] = []
    words, says_all = sameness.words, sameness._says_all
    monkeypatch.setattr(sameness, "words", lambda text: read.append(text) or words(text))
    monkeypatch.setattr(sameness, "_says_all", lambda *pair: compared.append(pair) or says_all(*pair))
    texts = [f"On Sundays Ann likes to walk with her big dog to place{at} by way of place{at + 1}" for at in range(500)]
    assert leaving([*texts, texts[7]]) == [texts[7]]
    assert sorted(read) == sorted([*texts, texts[7]])
    assert len(compared) <= 2 * len(texts)
