"""Copies the notebooks that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llama_index_memory_tiers.cli.outcome import FINDING, Outcome
from llama_index_memory_tiers.display import Grid, counted
from llama_index_memory_tiers.errors import ConfigurationError


def copy_notebooks(source: Path | None, target: Path, *, sure: Callable[[str], bool]) -> Outcome:
    """Copy all notebooks into a folder.

    Args:
        source: Where they are; `None` when the package came without.
        target: The folder; it is made if need be.
        sure: Asked before notebooks of the same names, which may have been changed, are replaced.

    Returns:
        The files.

    Raises:
        ConfigurationError: There are none, or the folder cannot be made or written.
    """
    if source is None:
        raise ConfigurationError(
            "This installation has no notebooks.",
            allowed="They come inside the wheel, and in a checkout of the source.",
            remedy="Install llama-index-memory-tiers anew, from its wheel.",
        )
    books = sorted(source.glob("*.ipynb"))
    there = [book.name for book in books if (target / book.name).exists()]
    if there and not sure(f"Replace {counted(len(there), 'notebook')} in {target}?"):
        return Outcome({"folder": target, "copied": []}, "Nothing was copied.", FINDING)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for book in books:
            (target / book.name).write_bytes(book.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"DIR={str(target)!r:.200} was given, but {error.strerror or type(error).__name__}.",
            allowed="It is a folder that can be made and written.",
            remedy="Choose another one, or correct its permissions.",
        ) from None
    rows = [(str(target / book.name),) for book in books]
    needs = "They need: pip install 'llama-index-memory-tiers[notebooks]'"
    return Outcome({"folder": target, "copied": [row[0] for row in rows]}, Grid(("copied",), rows, needs))
