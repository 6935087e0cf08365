"""Tell whether two sentences say the same, by rule."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

# With a word more or less in ten, two sentences still say the same.
_NEAR = 0.9


class Known:
    """Facts in which duplicates are looked up: 500 among 500 take 10 to 50 ms, 0.8 s if all are compared.

    Args:
        facts: Pairs of an id and a text.
    """

    def __init__(self, facts: Iterable[tuple[str, str]]) -> None:
        self._by_plain: dict[str, str] = {}
        self._by_length: dict[int, list[tuple[frozenset[str], str, str]]] = {}
        for id_, text in facts:
            self.add(id_, text)

    def add(self, id_: str, text: str) -> None:
        """Make one more fact known."""
        self._by_plain.setdefault(plain(text), id_)
        words = _words(text)
        self._by_length.setdefault(len(words), []).append((frozenset(words), id_, text))

    def find(self, text: str) -> str | None:
        """Id of a fact that says all that this one says."""
        found = self._by_plain.get(plain(text))
        if found is not None:
            return found
        words = _words(text)
        distinct, length = frozenset(words), len(words)
        # As many words in order are the same words, which the first look would have found.
        for longer in range(length + 1, int(length / _NEAR) + 1):
            for others, id_, known in self._by_length.get(longer, ()):
                if distinct <= others and same_fact(known, text):
                    return id_
        return None


_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
# Single characters where words are not spaced; numbers whole, with their sign; signs, as in "C++" and "5%".
_WORD = re.compile(rf"[{_UNSPACED}]|(?<!\w)-(?=\d)|\d+(?:[.,:/]\d+)+|(?:(?![{_UNSPACED}])[\w'])+|[^\w\s]")
_ARTICLES = frozenset(["a", "an", "the", ""])
# A sentence that lacks one of these says something else.
_TURNS = frozenset(
    """not no never none nor neither nothing nobody without cannot except but only former formerly previously used
    until since before after if unless may might can could would should will wants want plans planned hopes wishes
    almost nearly some most all every from to by for with against 不 没 没有 无 非 别 未 勿 曾 将 想 要 前 后 除 只 从
    到 被 给 向 或 如 若""".split()  # noqa: SIM905
)


def same_fact(known: str, said: str) -> bool:
    """Whether a sentence says nothing that a known one does not say.

    Args:
        known: A fact that is kept.
        said: Another one.

    Returns:
        True when they are the same but for case, width, punctuation, spaces and articles; or when the second has
        the words of the first, in order, without at most a tenth of them, none of which is a number or turns the
        meaning. Everything else is told apart: losing an update costs more than keeping a paraphrase.
    """
    if plain(known) == plain(said):
        return True
    old, new = _words(known), _words(said)
    if not new or len(new) < _NEAR * len(old) or len(new) > len(old):
        return False
    rest = iter(new)
    wanted = next(rest, None)
    left: list[str] = []
    for word in old:
        if word == wanted:
            wanted = next(rest, None)
        else:
            left.append(word)
    return wanted is None and not any(word in _TURNS or word.endswith("n't") or _numeric(word) for word in left)


def _numeric(word: str) -> bool:
    return any(unicodedata.numeric(c, None) is not None for c in word)


def plain(text: str) -> str:
    """A text without case, width, punctuation, spaces and articles.

    Args:
        text: Any text.

    Returns:
        What is left; equal for sentences that differ in nothing else.
    """
    return "".join(_words(text))


@lru_cache(maxsize=4096)
def _words(text: str) -> tuple[str, ...]:
    folded = unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold()
    found = (word.strip("'_") if len(word) > 1 else word for word in _WORD.findall(folded))
    return tuple(word for word in found if word not in _ARTICLES and not _is_punctuation(word))


def _is_punctuation(word: str) -> bool:
    return len(word) == 1 and word not in "-#%@/&" and unicodedata.category(word)[0] in "PZC"


def shared(one: str, other: str) -> float:
    """How many of the words of two texts both have.

    Args:
        one: A text.
        other: Another one.

    Returns:
        The share of their common words among all, 0 to 1 (Jaccard).
    """
    mine, theirs = set(_words(one)), set(_words(other))
    return len(mine & theirs) / max(1, len(mine | theirs))
