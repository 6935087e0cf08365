"""Words that answer to others: general questions meet particular answers."""

from __future__ import annotations

import pytest

from llama_index_memory_tiers.related import MOST_GROUPS, related_terms
from llama_index_memory_tiers.text import analyse


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which pets does she have?", "cat"),
        ("What sports does he do?", "tennis"),
        ("How many children do they have?", "daughters"),
        ("她养了什么宠物？", "小猫"),
        ("他做什么运动？", "跑步"),
    ],
)
def test_a_general_word_brings_particular_ones(question: str, answer: str) -> None:
    assert any(term in group for group in related_terms(analyse(question)) for term in analyse(answer))


def test_what_the_question_says_itself_is_not_related_to_it() -> None:
    related = {term for group in related_terms(analyse("Is the cat a pet?")) for term in group}
    assert "cat" not in related
    assert {"dog", "kitten"} <= related


def test_a_particular_word_brings_no_general_one() -> None:
    assert not any("sport" in group for group in related_terms(analyse("Who plays tennis?")))


def test_a_list_of_words_costs_no_more_than_a_question() -> None:
    every = "pet job sport music art hobby food drink travel country weather season movie book game money religion"
    assert len(related_terms(analyse(f"{every} language technology clothes color age"))) == MOST_GROUPS


def test_a_question_of_other_words_has_none() -> None:
    assert related_terms(analyse("Where is Oslo?")) == []
    assert related_terms([]) == []
