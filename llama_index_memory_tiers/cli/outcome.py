"""What a command found, written for people or as one JSON document, and the exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llama_index_memory_tiers.cli.wording import spoken
from llama_index_memory_tiers.display import Grid, as_rich, harmless
from llama_index_memory_tiers.errors import ConfigurationError, MemoryTiersError

FINE, FINDING, USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found.

    Args:
        data: For machines; anything that `plain` takes.
        shown: For people: a report, tables, or lines.
        code: `FINE` or `FINDING`.
    """

    data: Any
    shown: Any = field(default=())
    code: int = FINE


def run(work: Callable[[], Coroutine[Any, Any, Outcome]], *, as_json: bool) -> int:
    """Do a command's work and write what came of it; errors of ours are shown as their three parts.

    Args:
        work: Makes the coroutine.
        as_json: Write one JSON document instead of text.

    Returns:
        The exit code.
    """
    try:
        outcome = asyncio.run(work())
    except MemoryTiersError as error:
        show_error(error, as_json=as_json)
        return USAGE if isinstance(error, ConfigurationError) else FINDING
    show(outcome, as_json=as_json)
    return outcome.code


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Write an outcome to standard output."""
    if as_json:
        write_json(outcome.data)
        return
    shown = outcome.shown
    if isinstance(shown, str):
        sys.stdout.write(f"{harmless(shown)}\n" if shown else "")
    elif isinstance(shown, Sequence):
        for part in shown:
            show(Outcome(None, part), as_json=False)
    else:
        console().print(as_rich([shown]) if isinstance(shown, Grid) else shown)


def show_error(error: MemoryTiersError, *, as_json: bool) -> None:
    """Write an error: what was given, what is allowed, what to do."""
    parts = {name: spoken(getattr(error, name)) for name in ("given", "allowed", "remedy")}
    if as_json:
        write_json({"error": {"kind": type(error).__name__, **parts}})
        return
    sys.stderr.write("Error: " + "".join(f"{harmless(part)}\n" for part in parts.values()))


def write_json(data: Any) -> None:
    """Write one JSON document."""
    # A lone surrogate could not be written as UTF-8.
    text = json.dumps(plain(data), ensure_ascii=False, indent=2).encode("utf-8", "replace").decode()
    sys.stdout.write(f"{text}\n")


def plain(value: Any) -> Any:
    """Turn values of ours into what JSON knows."""
    if isinstance(value, Enum):
        value = value.value
    elif is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def console() -> Console:
    """Where tables go; made when needed, as standard output may be another one then."""
    made = Console(highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = max(made.width, 160)  # a pipe has no width, and ids must stay whole
    return made


@contextmanager
def progress(label: str, *, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how far long work is, on standard error.

    Args:
        label: What is done.
        as_json: Stay silent.

    Yields:
        A function of what is done and of what there is in all; it may be called from any thread.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=as_json or not errors.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
