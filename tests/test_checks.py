"""What is of the kind that an annotation names passes, however it is made; what Python refuses, Python names."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pytest
from llama_index.core.llms import ChatMessage

from llama_index_memory_tiers.checks import check_fields, check_kind, checked
from llama_index_memory_tiers.errors import ConfigurationError


class Said(ChatMessage):
    """A message of somebody's own class."""


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (("a", "b"), list[str]),
        (["a", "b"], tuple[str, ...]),
        (deque(["a"]), Sequence[str]),
        ({"a": 1}.keys(), Collection[str]),
        (iter("ab"), Iterable[str]),
        ((one for one in "ab"), Iterable[str]),
        ([Said(content="a")], Sequence[ChatMessage]),
        (MappingProxyType({"a": 1}), Mapping[str, int]),
        (UserDict(a=1), Mapping[str, Any]),
        (PurePosixPath("a"), str | Path | PurePosixPath),
        (np.float64(0.5), float),
        (3, float),
        (len, Callable[[str], int]),
        (None, str | None),
        ("a", Literal["a", "b"]),
        ("a", Final[str]),  # nothing that can be asked
    ],
)
def test_what_an_annotation_names_passes(value: Any, hint: Any) -> None:
    check_kind("value", value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("ab", Sequence[str]),
        (b"ab", Iterable[int]),
        ({"a": 1}, Sequence[str]),
        (["a"], Mapping[str, int]),
        (True, int),
        (2**63, int),
        (float("nan"), float),
        (float("inf"), float),
        ((1, 2, 3), tuple[int, int]),
        (True, Literal[1]),
    ],
)
def test_what_only_looks_like_it_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(ConfigurationError, match="value="):
        check_kind("value", value, hint)


def test_a_generator_is_left_to_who_reads_it() -> None:
    @checked
    def read(texts: Iterable[str]) -> list[str]:
        return list(texts)

    assert read(one for one in "ab") == ["a", "b"]


async def test_a_call_that_python_refuses_is_refused_in_its_words() -> None:
    @checked
    async def plain(text: str) -> str:
        return text

    wrong: list[tuple[tuple[str, ...], dict[str, str]]] = [((), {}), (("a", "b"), {}), (("a",), {"txet": "b"})]
    for args, kwargs in wrong:
        with pytest.raises(TypeError, match=r"plain\(\) "):
            await plain(*args, **kwargs)


def test_a_dataclass_of_ones_own_is_checked_by_its_fields() -> None:
    @dataclass(frozen=True)
    class Note:
        text: str
        tags: Sequence[str] = ()

        def __post_init__(self) -> None:
            check_fields(self)

    @dataclass(frozen=True)
    class Dated(Note):
        kinds: ClassVar[dict[str, int]] = {}
        day: int = field(default=1)

    assert Dated("a", day=2).day == 2
    with pytest.raises(ConfigurationError, match="day="):
        Dated("a", day="2")  # type: ignore[arg-type]  # the fault
