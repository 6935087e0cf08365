"""What a question is looked up by: its own words, and related ones for less."""

from __future__ import annotations

from dataclasses import dataclass

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.related import related_terms
from llama_index_memory_tiers.storage.index.rows import term_number
from llama_index_memory_tiers.text import analyse


@dataclass(frozen=True, slots=True)
class Sought:
    """Terms that count as one.

    Args:
        numbers: Of the terms.
        weight: Share of a word of the question, 0 to 1.
    """

    numbers: tuple[int, ...]
    weight: float = 1.0


def sought(text: str, most: int) -> tuple[Sought, ...]:
    """Read a question.

    Args:
        text: The question.
        most: Terms of it that are read.

    Returns:
        Its terms in its order, then what is related to them; nothing when it says nothing.
    """
    terms = list(analyse(text))[:most]
    own = dict.fromkeys(Sought((term_number(term),)) for term in terms)
    related = (tuple(dict.fromkeys(map(term_number, group))) for group in related_terms(terms))
    return (*own, *(Sought(numbers, scoring.RELATED) for numbers in related))
