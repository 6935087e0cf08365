"""Take over a MemoryOS data folder: pages, profile and knowledge."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from llama_index_memory_tiers.blocks import HeatMemoryBlock
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.conversation import pair
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.storage.addresses import nameable


@dataclass(frozen=True, slots=True)
class Takeover:
    """What was taken over; repeating it adds nothing.

    Args:
        pages: Questions with their answers, each once, whatever number of topics it stood in.
        knowledge: Pieces of knowledge that were new.
        profile: Whether there was a profile that was not known.
    """

    pages: int
    knowledge: int
    profile: bool


@dataclass(frozen=True, slots=True)
class _Folder:
    pages: tuple[tuple[datetime, str, str], ...]
    profile: str
    user: tuple[tuple[datetime, str], ...]
    agent: tuple[tuple[datetime, str], ...]


@checked
async def import_memoryos(
    memory: TieredMemory,
    folder: str | os.PathLike[str],
    *,
    user_id: str | None = None,
    assistant_id: str = "default_assistant_profile",
) -> Takeover:
    """Take over what MemoryOS keeps of one user; its files are left as they are.

    Args:
        memory: Where it goes; has a `HeatMemoryBlock`, which absorbs the pages as if they had been said now, with
            their own times.
        folder: MemoryOS's `data_storage_path`.
        user_id: The user there; default that of the memory.
        assistant_id: The assistant there, whose knowledge becomes that of the memory's agent.

    Returns:
        What was new.

    Raises:
        ConfigurationError: There is no such user, a file is torn, or the memory has no `HeatMemoryBlock`. Nothing
            was stored.
    """
    block = next((one for one in memory.memory_blocks if isinstance(one, HeatMemoryBlock)), None)
    if block is None:
        raise ConfigurationError(
            "A memory without HeatMemoryBlock was given.",
            allowed="Profile and knowledge belong to that block.",
            remedy="Add HeatMemoryBlock() to memory_blocks.",
        )
    found = await asyncio.to_thread(_read, Path(folder), user_id or memory.user_id or "", assistant_id)
    for said_at, asked, answered in found.pages:
        uid = hashlib.sha256(f"{said_at.isoformat()}\0{asked}\0{answered}".encode("utf-8", "replace")).hexdigest()[:32]
        messages = pair(asked, answered)
        await memory.aput_messages(messages, created_at=said_at, uids=[f"memoryos-{uid}-{n}" for n in range(2)])
    learnt = await block.alearn(memory, [*((t, text, False) for t, text in found.user)])
    learnt += await block.alearn(memory, [*((t, text, True) for t, text in found.agent)])
    profile = bool(found.profile) and await block.aset_profile(memory, found.profile)
    return Takeover(len(found.pages), learnt, profile)


def _read(folder: Path, user: str, assistant: str) -> _Folder:
    # Names of people are no paths: "../x" stays in the folder or is refused.
    mine = next((path for path in _children(folder / "users") if path.name == user), None)
    if mine is None:
        names = sorted(path.name for path in _children(folder / "users"))
        raise ConfigurationError(
            f"user_id={user!r:.100} was given with folder={str(folder)!r}.",
            allowed=f"The folder knows: {', '.join(names) or 'nobody'}.",
            remedy="Pass MemoryOS's data_storage_path and the user's id there.",
        )
    theirs = next((path for path in _children(folder / "assistants") if path.name == assistant), None)
    middle = _json(mine / "mid_term.json")
    sessions = middle.get("sessions") if isinstance(middle, Mapping) else None
    details = [page for one in _values(sessions) if isinstance(one, Mapping) for page in _values(one.get("details"))]
    pages = {page for raw in (*details, *_values(_json(mine / "short_term.json"))) if (page := _page(raw)) is not None}
    long = _json(mine / "long_term_user.json")
    other = _json(theirs / "long_term_assistant.json") if theirs is not None else {}
    return _Folder(
        pages=tuple(sorted(pages)),
        profile=_profile(long, user),
        user=_knowledge(long, "knowledge_base"),
        agent=(*_knowledge(long, "assistant_knowledge"), *_knowledge(other, "assistant_knowledge")),
    )


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if nameable(folder) and folder.is_dir() else []


def _json(path: Path) -> Any:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}).",
            allowed="It is a JSON file of MemoryOS; a torn one is not taken for an empty one.",
            remedy="Mend it or move it away, then repeat the call.",
        ) from None


def _values(given: Any) -> Sequence[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return given if isinstance(given, list) else []


def _page(raw: Any) -> tuple[datetime, str, str] | None:
    if not isinstance(raw, Mapping):
        return None
    asked, answered = (str(raw.get(name) or "") for name in ("user_input", "agent_response"))
    return (_time(raw.get("timestamp")), asked, answered) if asked.strip() or answered.strip() else None


def _time(given: Any) -> datetime:
    try:
        return aware(datetime.fromisoformat(str(given)))
    except ValueError:
        return aware(datetime(1970, 1, 1))  # noqa: DTZ001  # made aware around it


def _told(given: Any) -> str:
    text = str(given or "").strip()
    return "" if text.strip("- ").casefold() in {"none", "null", ""} else text


def _profile(long: Any, user: str) -> str:
    profiles = long.get("user_profiles") if isinstance(long, Mapping) else None
    mine = profiles.get(user) if isinstance(profiles, Mapping) else None
    return _told(mine.get("data") if isinstance(mine, Mapping) else mine)


def _knowledge(long: Any, name: str) -> tuple[tuple[datetime, str], ...]:
    entries: Iterable[Any] = _values(long.get(name)) if isinstance(long, Mapping) else ()
    found = ((_time(one.get("timestamp")), _told(one.get("knowledge"))) for one in entries if isinstance(one, Mapping))
    return tuple((time, text) for time, text in found if text)
