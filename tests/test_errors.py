"""Errors that teach: whatever the package raises says what was given, what is allowed, and what to do."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import llama_index_memory_tiers
from llama_index_memory_tiers import errors
from llama_index_memory_tiers.errors import MemoryTiersError

PACKAGE = Path(inspect.getfile(llama_index_memory_tiers)).parent
TREE = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MemoryTiersError)
}
SOURCES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every place at which an error of ours is made."""
    for name, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) in TREE:
                yield f"{name}:{node.lineno}", node


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def literal(node: ast.expr) -> str:
    """The text of a literal; what is filled in stands as a letter."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    if isinstance(node, ast.IfExp):
        return literal(node.body)
    return "Given elsewhere."


def test_the_package_raises_many_and_all_kinds_are_known() -> None:
    assert len(list(calls())) > 100
    assert {called(node) for _, node in calls()} >= set(TREE) - {"MemoryTiersError"}


@pytest.mark.parametrize(("place", "node"), [pytest.param(*each, id=each[0]) for each in calls()])
def test_each_error_has_three_parts_that_are_sentences(place: str, node: ast.Call) -> None:
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    assert len(node.args) == 1, place
    assert set(named) == {"allowed", "remedy"}, place
    parts = [literal(part) for part in (node.args[0], named["allowed"], named["remedy"])]
    assert len(set(parts)) == len(parts) or "Given elsewhere." in parts, place
    for text in parts:
        assert len(text) >= len("Wait."), f"{place}: {text!r}"


@pytest.mark.parametrize("kind", TREE.values(), ids=TREE)
def test_every_kind_keeps_its_parts_and_shows_all_of_them(kind: type[MemoryTiersError]) -> None:
    error = kind("It was given.", allowed="That is allowed.", remedy="Do this.")
    assert (error.given, error.allowed, error.remedy) == ("It was given.", "That is allowed.", "Do this.")
    assert str(error) == "It was given. That is allowed. Do this."
    with pytest.raises(TypeError):
        kind("It was given.")  # type: ignore[call-arg]
    assert inspect.getdoc(kind)


def test_the_tree_at_the_top_of_the_module_is_the_real_one() -> None:
    drawn = inspect.getdoc(errors) or ""
    assert {name for name in TREE if name not in drawn} == set()
