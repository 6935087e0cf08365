"""Write docs/api.md from docstrings: `python docs/make_api.py`; a test says when it is stale."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import typing
from pathlib import Path
from typing import Any

import llama_index_memory_tiers as package
from llama_index_memory_tiers import sample, testing
from llama_index_memory_tiers.testing import contracts

PAGE = Path(__file__).parent / "api.md"
_WIDTH = 100
_HEAD = """# API

Made by `python docs/make_api.py` from the docstrings; do not edit. What `TieredMemory` has from LlamaIndex's `Memory`,
and blocks from LlamaIndex's blocks, is listed only where it differs; what all blocks have, under `TieredMemoryBlock`.
"""
_ROOMS = {
    "llama_index_memory_tiers": package,
    "llama_index_memory_tiers.testing": testing,
    "llama_index_memory_tiers.testing.contracts": contracts,
    "llama_index_memory_tiers.sample": sample,
}


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, room in _ROOMS.items():
        parts.append(f"## {name}\n")
        parts += [_entry(one, getattr(room, one)) for one in sorted(_public(room), key=str.casefold)]
    parts.append("## What methods return and reports hold\n")
    parts += [_entry(one.__name__, one) for one in sorted(_handed_out(), key=lambda one: one.__name__.casefold())]
    return "\n".join(parts)


def _handed_out() -> set[type]:
    """Classes of ours that nobody imports, as they are only ever given to a user."""
    listed = {getattr(room, name) for room in _ROOMS.values() for name in _public(room)}
    found: set[type] = set()
    waiting = [one for one in listed if inspect.isclass(one)]
    while waiting:
        given = _given_by(waiting.pop()) - listed - found
        found |= given
        waiting += given
    return found


def _given_by(cls: type) -> set[type]:
    """Classes of ours that a class's methods return, and that its fields hold."""
    hints = [typing.get_type_hints(cls).values()] if dataclasses.is_dataclass(cls) else []
    for name, value in _own_members(cls).items():
        inner = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(inner) and not name.startswith("_") and inner.__doc__:
            with contextlib.suppress(NameError):  # named for type checkers only
                hints.append([typing.get_type_hints(inner).get("return")])
    return {one for hint in itertools.chain(*hints) for one in _classes_in(hint)}


def _classes_in(hint: Any) -> set[type]:
    if inspect.isclass(hint) and hint.__module__.startswith("llama_index_memory_tiers") and inspect.getdoc(hint):
        return {hint}
    return {one for part in typing.get_args(hint) for one in _classes_in(part)}


def _public(room: Any) -> list[str]:
    """Names in `__all__`, else the classes that a module makes itself."""
    if hasattr(room, "__all__"):
        return list(room.__all__)
    own = {name: value for name, value in vars(room).items() if getattr(value, "__module__", "") == room.__name__}
    return [name for name, value in own.items() if not name.startswith("_") and inspect.isclass(value)]


def _entry(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return "\n".join([f"### {name}\n", _text(value), *_members(value)])
    if inspect.isroutine(value):
        return f"### {name}\n\n{_signature(name, value)}\n{_text(value)}"
    return f"### {name}\n\nA value of type `{type(value).__name__}`.\n"


def _members(cls: type) -> list[str]:
    """Public methods and properties, in the order of their definition; of a block only what all blocks do not have."""
    found = _own_members(cls)
    twins = [name for name, value in found.items() if (inspect.getdoc(value) or "").startswith("See `a")]
    shown = [text for name, value in found.items() if name not in twins and (text := _member(name, value))]
    return [*shown, f"Without `await`: {', '.join(f'`{name}`' for name in twins)}.\n"] if twins else shown


def _own_members(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("llama_index_memory_tiers"):
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    if issubclass(cls, package.TieredMemoryBlock) and cls is not package.TieredMemoryBlock:
        found = {name: value for name, value in found.items() if not hasattr(package.TieredMemoryBlock, name)}
    return found


def _member(name: str, value: Any) -> str:
    inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if isinstance(value, property):
        return f"#### {name}\n\n{_text(value)}" if value.__doc__ else ""
    if not inspect.isfunction(inner) or not inner.__doc__ or name in {"class_name", "model_post_init"}:
        return ""
    return f"#### {name}\n\n{_signature(name, inner)}\n{_text(inner)}"


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    parameters = [_parameter(one) for one in signature.parameters.values() if one.name not in {"self", "cls"}]
    kinds = [one.kind for one in signature.parameters.values() if one.name not in {"self", "cls"}]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    bare = inspect.unwrap(value)
    word = "async def" if inspect.iscoroutinefunction(bare) or inspect.isasyncgenfunction(bare) else "def"
    answer = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    whole = f"{word} {name}({', '.join(parameters)}){answer}"
    if len(whole) > _WIDTH:
        whole = f"{word} {name}(\n    " + ",\n    ".join(parameters) + f",\n){answer}"
    return f"```text\n{whole}\n```\n"


def _parameter(one: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is inspect.Parameter.empty else f": {one.annotation}"
    if one.default is inspect.Parameter.empty:
        return f"{stars}{one.name}{kind}"
    # How other values show themselves differs between versions of Python and of LlamaIndex.
    plain = one.default is None or type(one.default) in {str, int, float, bool}
    shown = repr(one.default) if plain or one.default == () else "…"
    return f"{one.name}{kind} = {shown}" if kind else f"{one.name}={shown}"


def _text(value: Any) -> str:
    """A docstring as Markdown: its sections as lists."""
    lines: list[str] = []
    for line in inspect.getdoc(value).splitlines() if inspect.getdoc(value) else []:
        if line in {"Args:", "Returns:", "Raises:", "Yields:", "Attributes:"}:
            lines += [f"**{line[:-1]}**", ""]
        elif found := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif line.startswith("    "):
            lines.append("  " + line.strip() if lines and lines[-1].startswith(("-", "  ")) else line.strip())
        else:
            lines.append(line)
    return "\n".join(lines).replace("``", "`") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
