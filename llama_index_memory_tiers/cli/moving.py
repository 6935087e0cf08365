"""Commands that move or delete: export, import, forget."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from llama_index_memory_tiers.blocks import HeatMemoryBlock
from llama_index_memory_tiers.cli.ids import whole_id
from llama_index_memory_tiers.cli.outcome import FINDING, FINE, Outcome, progress
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.display import Grid
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.memoryos import import_memoryos
from llama_index_memory_tiers.storage.selection import Derived, ForgetFilter, ForgetScope, checked_selection


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
    return Outcome({"file": target, **_counts(report)}, report)


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
    return Outcome({"file": source, **_counts(report)}, report)


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
    return Outcome({"folder": folder, **asdict(found)}, Grid(("pages", "knowledge", "profile"), rows))


def whose_export(where: Where, source: Path) -> Where:
    """Whose an import becomes: who was named, else the file's user, or without one its first session."""
    if where.user is not None or where.session is not None:
        return where
    try:
        with source.open(encoding="utf-8") as file:
            user = json.loads(file.readline()).get("user_id")
            session = json.loads(file.readline()).get("session", {}).get("session_id")
    except (OSError, ValueError, AttributeError):
        return where  # `aimport` says what is wrong with it
    if isinstance(user, str):
        return replace(where, user=user)
    return replace(where, session=session if isinstance(session, str) else None)


def check_session(scope: ForgetScope | None, where: Where) -> None:
    """Refuse a session that nobody named: it would be a new one, in which there is nothing.

    Raises:
        ConfigurationError: The scope is a session of a person, and `--session` was left out.
    """
    if scope == "session" and where.session is None and where.memory is None:
        raise ConfigurationError(
            "--scope=session was given without --session.",
            allowed="A session is named by its id.",
            remedy="Pass --session; `memory-tiers why ID` shows the session of a message.",
        )


async def forget(memory: TieredMemory, what: dict[str, Any], *, sure: Callable[[str], bool]) -> Outcome:
    """Forget, after asking.

    Args:
        memory: Whose.
        what: Arguments of `aforget`.
        sure: Asked with a sentence that says what will be gone.

    Returns:
        The receipt; a finding when something is left, or when the answer was no.
    """
    if "ids" in what:
        what = {**what, "ids": [await whole_id(memory, each) or each for each in what["ids"]]}
    checked_selection(memory.user_id or "", memory.session_id, **{"scope": None, **what})  # before anybody is asked
    if not sure(_question(memory, what)):
        return Outcome({"forgotten": False}, "Nothing was forgotten.", FINDING)
    receipt = await memory.aforget(**what)
    data = {
        "forgotten": True,
        "complete": receipt.complete,
        "entries": receipt.entries,
        "unreached": receipt.unreached,
    }
    return Outcome(data, receipt, FINE if receipt.complete else FINDING)


def forget_arguments(
    *,
    scope: ForgetScope | None,
    ids: list[str],
    before: str | None,
    derived: Derived,
    contains: str | None,
    speaker: str | None,
) -> dict[str, Any]:
    """Turn the options of `forget` into the arguments of `aforget`.

    Raises:
        ConfigurationError: Nothing was said, or a date or text cannot be read.
    """
    for option, text in (("--contains", contains), ("--speaker", speaker), *(("--id", each) for each in ids)):
        if text is not None and not text.strip():
            raise ConfigurationError(
                f"{option}={text!r:.100} was given.",
                allowed="It is a text with a visible character.",
                remedy="Correct it; nothing was forgotten.",
            )
    found: dict[str, Any] = {"derived": derived}
    if scope is not None:
        found["scope"] = scope
    if ids:
        found["ids"] = ids
    if before is not None:
        found["before"] = _moment(before)
    if contains is not None or speaker is not None:
        found["filter"] = ForgetFilter(contains=contains, speaker=speaker)
    if found.keys() == {"derived"}:
        raise ConfigurationError(
            "forget was called without saying what to forget.",
            allowed="It takes --scope, --id, --before, --contains and --speaker, alone or together.",
            remedy="To forget a whole session pass --scope session --session ID, to forget a person --scope user.",
        )
    return found


def _moment(text: str) -> datetime:
    try:
        # Python 3.10 does not read the Z.
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ConfigurationError(
            f"--before={text!r:.100} was given.",
            allowed="It is a date such as 2026-03-01, or a time such as 2026-03-01T12:00:00+02:00; without a zone UTC.",
            remedy="Correct it; nothing was forgotten.",
        ) from None


def _question(memory: TieredMemory, what: dict[str, Any]) -> str:
    whose = f"user {memory.user_id!r}" if memory.user_id is not None else f"session {memory.session_id!r}"
    if what.get("scope") == "session" and memory.user_id is not None:
        whose += f", session {memory.session_id!r}"
    limits = list(_limits(what.get("ids"), what.get("before"), what.get("filter")))
    which = f"what {' and '.join(limits)}" if limits else "everything"
    return f"Forget {which} of {whose} in {memory.storage.address}, and what was learnt from it? It cannot be undone."


def _limits(ids: list[str] | None, before: datetime | None, wanted: ForgetFilter | None) -> Iterator[str]:
    if ids is not None:
        yield f"has the id {' or '.join(ids)}"
    if before is not None:
        yield f"was said before {before.isoformat(' ', 'minutes')}"
    if wanted is not None and wanted.contains is not None:
        yield f"has {wanted.contains!r} in it"
    if wanted is not None and wanted.speaker is not None:
        yield f"was said by {wanted.speaker!r}"


def sure(yes: bool) -> Callable[[str], bool]:
    """How to ask before something is changed for good: not at all, or on the terminal."""
    return (lambda _: True) if yes else _ask_on_terminal


def _ask_on_terminal(question: str) -> bool:
    """Ask on standard error, so that standard output stays one document; no answer is a no."""
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in {"y", "yes"}


def _counts(report: Any) -> dict[str, int]:
    return {name: getattr(report, name) for name in ("sessions", "messages", "records", "skipped")}
