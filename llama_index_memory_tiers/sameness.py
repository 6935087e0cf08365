"""Tell whether two sentences say the same, by rule."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeAlias

NEAR = 0.9
"""With a word less in ten, a sentence still says the same."""

Words: TypeAlias = tuple[str, ...]

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
_REMEMBERED = 1_000  # characters: the words of longer texts are not kept in memory


class Known:
    """Texts in which duplicates are looked up: only those are compared that share a text's rarest words.

    Args:
        texts: Pairs of an id and a text.
        near: Share of words that both must have.
    """

    def __init__(self, texts: Iterable[tuple[str, str]] = (), *, near: float = NEAR) -> None:
        self._near = near
        self._equal: dict[Words, str] = {}
        self._texts: list[tuple[str, Words]] = []
        self._places: dict[str, dict[int, list[int]]] = {}  # word → how long the text is → which ones
        self._uses: Counter[str] = Counter()
        for id_, text in texts:
            self.add(id_, text)

    def add(self, id_: str, text: str) -> None:
        """Make one more text known."""
        self._add(id_, words(text))

    def find(self, text: str) -> str | None:
        """Id of a text that says all that this one says."""
        return self._find(words(text))

    def find_or_add(self, id_: str, text: str) -> str | None:
        """Id of a text that says the same, in a few words more or less; if there is none, this one is known then."""
        said = words(text)
        found = self._find(said) or self._find_shorter(said)
        if found is None:
            self._add(id_, said)
        return found

    def _add(self, id_: str, said: Words) -> None:
        self._equal.setdefault(said, id_)
        for word in set(said):
            self._places.setdefault(word, {}).setdefault(len(said), []).append(len(self._texts))
            self._uses[word] += 1
        self._texts.append((id_, said))

    def _find(self, said: Words) -> str | None:
        if not said:
            return None
        if said in self._equal:
            return self._equal[said]
        # It has every word of this one, so also the rarest. As many words in order would be equal.
        longer = self._with(self._rarest(said, 1), len(said) + 1, math.ceil(len(said) / self._near))
        return next((id_ for id_, known in longer if _says_all(known, said, self._near)), None)

    def _find_shorter(self, said: Words) -> str | None:
        # It lacks so many words at most: of one word more than that it has one.
        spoken = len(_spoken(said))
        lacking = spoken - math.ceil(self._near * spoken)
        shorter = self._with(self._rarest(said, lacking + 1), self._near * len(said), len(said) - 1)
        return next((id_ for id_, known in shorter if _says_all(said, known, self._near)), None)

    def _rarest(self, said: Words, many: int) -> list[str]:
        return sorted(dict.fromkeys(said), key=lambda word: self._uses[word])[:many]

    def _with(self, any_of: Iterable[str], shortest: float, longest: float) -> Iterator[tuple[str, Words]]:
        places = {
            place
            for word in any_of
            for length, found in self._places.get(word, {}).items()
            if shortest <= length <= longest
            for place in found
        }
        return (self._texts[place] for place in sorted(places))


def same_fact(known: str, said: str, *, near: float = NEAR) -> bool:
    """Whether a sentence says nothing that a known one does not say.

    Args:
        known: A text that is kept.
        said: Another one.
        near: Share of the known one's words that the other must have, default .9.

    Returns:
        True when they are the same but for case, width, punctuation and articles; or when the second has the words
        of the first, in order, without at most a tenth of them, none of which is a number, a sign or turns the
        meaning. Everything else is told apart: losing an update costs more than keeping a paraphrase. A text without
        words says nothing, and is the same as none.
    """
    return _says_all(words(known), words(said), near)


def same_note(one: str, other: str, *, near: float = NEAR) -> bool:
    """Whether one of two texts says all that the other says, as `same_fact` does.

    Args:
        one: A text.
        other: Another one.
        near: Share of the longer one's words that the shorter must have, default .9.

    Returns:
        The same whichever comes first.
    """
    return same_fact(one, other, near=near) or same_fact(other, one, near=near)


def _says_all(old: Words, new: Words, near: float) -> bool:
    if old == new or not new:
        return bool(new)
    if not near * len(old) <= len(new) < len(old):
        return False
    spoken = len(_spoken(old))
    # When only a repeated word is left out, who did what may have changed.
    if not near * spoken <= len(_spoken(new)) < spoken:
        return False
    rest = iter(new)
    wanted = next(rest, None)
    left: list[str] = []
    for word in old:
        if word == wanted:
            wanted = next(rest, None)
        else:
            left.append(word)
    return wanted is None and not any(_turns(word) for word in left)


def _spoken(said: Words) -> frozenset[str]:
    """Distinct words without signs: what is repeated makes no sentence longer, nor do smileys."""
    return frozenset(word for word in said if not _is_sign(word))


def _turns(word: str) -> bool:
    numeric = any(unicodedata.numeric(c, None) is not None for c in word)
    return numeric or word in _TURNS or word.endswith("n't") or _is_sign(word)


def _is_sign(word: str) -> bool:
    return len(word) == 1 and not word.isalnum()


def plain(text: str) -> str:
    """A name or value without case, width, punctuation, spaces and articles.

    Args:
        text: Any text.

    Returns:
        What is left; equal for names that differ in nothing else. Sentences are compared by `words`, as
        "now here" is not "nowhere".
    """
    return "".join(words(text))


def words(text: str) -> Words:
    """Words of a text without case, width, punctuation and articles.

    Args:
        text: Any text.

    Returns:
        In order; scripts without spaces by character, numbers whole.
    """
    return _short(text) if len(text) <= _REMEMBERED else _split(text)


def _split(text: str) -> Words:
    folded = unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold()
    found = (word.strip("'_") if len(word) > 1 else word for word in _WORD.findall(folded))
    return tuple(word for word in found if word not in _ARTICLES and not _is_punctuation(word))


_short = lru_cache(maxsize=4096)(_split)


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
    mine, theirs = set(words(one)), set(words(other))
    return len(mine & theirs) / max(1, len(mine | theirs))
