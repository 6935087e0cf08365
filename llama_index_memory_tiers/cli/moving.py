"""Commands that move: export, import; and how a command asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llama_index_memory_tiers.blocks import HeatMemoryBlock
from llama_index_memory_tiers.cli.ids import place, whose
from llama_index_memory_tiers.cli.outcome import Outcome, progress
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.display import Grid, harmless
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.memoryos import import_memoryos
from llama_index_memory_tiers.storage.selection import ForgetScope


async def export(memory: TieredMemory, target: Path, scope: ForgetScope | None, *, as_json: bool) -> Outcome:
    """Write all that is kept to a file.

    Args:
        memory: Whose.
        target: The file; it is replaced in one step.
        scope: `user` or `session`.
        as_json: Without a progress bar.

    Returns:
        What was written.
    """
    with progress("export", as_json=as_json) as tell:
        report = await memory.aexport(target, scope=scope, progress=tell)
    named = f"{place(memory, scope)} to {target}"
    return Outcome({"file": target, "user": memory.user_id, **_counts(report)}, [named, report])


async def take_in(memory: TieredMemory, source: Path, *, as_json: bool) -> Outcome:
    """Take in what `export` wrote.

    Args:
        memory: Whose it becomes.
        source: The file.
        as_json: Without a progress bar.

    Returns:
        What was stored.
    """
    with progress("import", as_json=as_json) as tell:
        report = await memory.aimport(source, progress=tell)
    named = f"{whose(memory)} from {source}"
    return Outcome({"file": source, "user": memory.user_id, **_counts(report)}, [named, report])


async def take_over(memory: TieredMemory, folder: Path) -> Outcome:
    """Take over a user's memory from a folder of MemoryOS.

    Args:
        memory: Whose it becomes; the user has the same name there. Without a heat block it gets one of its own.
        folder: MemoryOS's `data_storage_path`.

    Returns:
        What was new.
    """
    if not any(isinstance(block, HeatMemoryBlock) for block in memory.memory_blocks):
        blocks = [HeatMemoryBlock(llm=None, embed_model=None)]
        memory = TieredMemory(
            storage=memory.storage, user_id=memory.user_id, session_id=memory.session_id, memory_blocks=blocks
        )
        await memory.astop()
    found = await import_memoryos(memory, folder)
    rows = [(found.pages, found.knowledge, found.profile)]
    table = Grid(("pages", "knowledge", "profile"), rows, f"{whose(memory)} from {folder}")
    return Outcome({"folder": folder, **asdict(found)}, table)


def check_folder(folder: Path) -> None:
    """Refuse what is no folder of MemoryOS, before a database is made for it.

    Raises:
        ConfigurationError: It is no folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder.",
            allowed="MemoryOS keeps its files in a folder, its data_storage_path.",
            remedy="Pass that folder, or leave --from out for what `export` wrote.",
        )


def whose_export(where: Where, source: Path) -> Where:
    """Whose an import becomes: who was named, else the file's user, or without one its first session.

    Raises:
        ConfigurationError: Somebody else was named than the file's user.
    """
    try:
        with source.open(encoding="utf-8") as file:
            user = json.loads(file.readline()).get("user_id")
            session = json.loads(file.readline()).get("session", {}).get("session_id")
    except (OSError, ValueError, AttributeError):
        return where  # `aimport` says what is wrong with it
    if where.user is not None and isinstance(user, str) and user != where.user:
        # Whoever has the file may read the name; the library does not tell it to whoever calls it.
        raise ConfigurationError(
            f"--user={where.user!r:.100} was given with an export of {user!r:.100}.",
            allowed="A person takes in what is their own.",
            remedy="Leave --user out; nothing was stored.",
        )
    if where.user is not None or where.session is not None:
        return where
    if isinstance(user, str):
        return replace(where, user=user)
    return replace(where, session=session if isinstance(session, str) else None)


def chosen_scope(scope: ForgetScope | None, where: Where) -> ForgetScope | None:
    """What `--scope` and `--session` mean together: a session that is named is all that is meant.

    Args:
        scope: As given.
        where: As given.

    Returns:
        The scope.

    Raises:
        ConfigurationError: They contradict each other, or a session of a person is meant that nobody named: it would
            be a new one, in which there is nothing.
    """
    if scope == "user" and where.session is not None:
        raise ConfigurationError(
            f"--scope=user was given with --session={where.session!r:.100}.",
            allowed="It is one or the other: all of the user, or one session.",
            remedy="Leave --session out for all of the user; name the user with --user.",
        )
    if scope == "session" and where.session is None and where.memory is None:
        raise ConfigurationError(
            "--scope=session was given without --session.",
            allowed="A session is named by its id.",
            remedy="Pass --session; `memory-tiers why ID` shows the session of a message.",
        )
    return scope if where.session is None else "session"


def sure(yes: bool) -> Callable[[str], bool]:
    """How to ask before something is changed for good: not at all, or on the terminal."""
    return (lambda _: True) if yes else _ask_on_terminal


def _ask_on_terminal(question: str) -> bool:
    """Ask on standard error, so that standard output stays one document; no answer is a no."""
    sys.stderr.write(f"{harmless(question)} [y/N]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in {"y", "yes"}


def _counts(report: Any) -> dict[str, int]:
    return {name: getattr(report, name) for name in ("sessions", "messages", "records", "skipped")}
