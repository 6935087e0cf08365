"""Doctor: looks a storage over, and says what is wrong and what to do."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.cli.outcome import FINDING, FINE, Outcome, progress
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.display import Grid, counted
from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.addresses import resolve_address, shown_url
from llama_index_memory_tiers.storage.survey import Kept, StoredText, Waiting

Level = Literal["ok", "advice", "problem"]

_PACKAGES = (
    "llama-index-memory-tiers", "llama-index-core", "llama-index-instrumentation", "sqlalchemy", "aiosqlite",
    "asyncpg", "qdrant-client", "numpy", "pystemmer", "tiktoken", "typer", "rich", "pandas", "wordllama",
)  # fmt: skip
_MOST_IDS = 10
# What a model's name tells about the languages that it knows.
_MANY_LANGUAGES = re.compile(
    r"multi|m3|xlm|labse|e5-mistral|text-embedding-3|embed-v[34]|qwen|gte-qwen|jina.*v3", re.IGNORECASE
)
_ENGLISH_ONLY = re.compile(r"wordllama|(?<![a-z])en(?![a-z])|english|minilm-l|ada-001|glove|potion-base", re.IGNORECASE)
_OTHER_SCRIPT = re.compile("[\u0370-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_LETTER = re.compile(r"[^\W\d_]")
_MUCH_OTHER = 0.2  # share of letters from which a language counts


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: `ok`, `advice`, or `problem`.
        area: What was looked at.
        found: What was seen.
        remedy: What to do; '' when nothing.
    """

    level: Level
    area: str
    found: str
    remedy: str = ""


@dataclass(slots=True)
class Texts:
    """What reading every stored text showed.

    Args:
        read: How many.
        damaged: Ids of rows that cannot be read.
        secrets: Ids of texts that the redactor would change.
        letters: Letters of any script.
        other: Letters of scripts other than Latin.
    """

    read: int = 0
    damaged: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    letters: int = 0
    other: int = 0

    def take(self, page: Sequence[StoredText], redactor: Redactor) -> None:
        """Read a page."""
        for each in page:
            self.read += 1
            if each.damaged:
                self.damaged.append(each.id)
            if redactor.value(each.text) != each.text:
                self.secrets.append(each.id)
            self.letters += len(_LETTER.findall(each.said))
            self.other += len(_OTHER_SCRIPT.findall(each.said))


async def examine(storage: Storage, memory: TieredMemory | None, *, as_json: bool) -> Outcome:
    """Look a storage over; no memory is changed.

    Args:
        storage: Open.
        memory: Of your factory, to look at its configuration too.
        as_json: Without a progress bar.

    Returns:
        Versions, counts and findings; a problem among them makes the exit code 1.
    """
    now = storage.now()
    kept = await storage.survey.kept(now=now)
    waiting = await storage.survey.waiting(now=now)
    models = await storage.survey.embeddings()
    people = await storage.survey.people()
    texts = await _read_texts(storage, kept, as_json=as_json)
    findings = [
        *await _database(storage),
        *_counts(kept, len(people)),
        *_delivery(waiting),
        *_texts(texts),
        *_embeddings(models, texts),
        *await _external_index(storage),
        *(_configuration(memory, models, waiting) if memory is not None else _no_configuration()),
    ]
    data = {
        "storage": storage.address,
        "versions": installed(),
        "people": len(people),
        "kept": kept,
        "waiting": waiting,
        "embeddings": models,
    }
    return _told(data, findings)


def unreadable(where: Where, error: StorageError) -> Outcome:
    """Say that the database refused to be read.

    Args:
        where: Which one.
        error: What it said.

    Returns:
        Versions and the finding.
    """
    address = where.memory if where.storage is None else shown_url(resolve_address(where.storage).url)
    return _told(
        {"storage": address, "versions": installed()}, [Finding("problem", "database", error.given, error.remedy)]
    )


def _told(data: dict[str, Any], findings: Sequence[Finding]) -> Outcome:
    bad = any(each.level == "problem" for each in findings)
    rows = [(each.level, each.area, each.found, each.remedy) for each in findings]
    shown = [
        Grid(("package", "version"), list(data["versions"].items()), data["storage"]),
        Grid(("level", "area", "found", "what to do"), rows),
    ]
    return Outcome({"healthy": not bad, **data, "findings": findings}, shown, FINDING if bad else FINE)


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that matter; those that are missing are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# --- what is looked at ------------------------------------------------------------------------------------------


async def _read_texts(storage: Storage, kept: Sequence[Kept], *, as_json: bool) -> Texts:
    texts, redactor = Texts(), Redactor()
    total = sum(each.count for each in kept)
    with progress("read every text", as_json=as_json) as tell:
        async for page in storage.survey.texts():
            texts.take(page, redactor)
            tell(texts.read, max(total, texts.read))
    return texts


async def _database(storage: Storage) -> list[Finding]:
    version, newest = await storage.survey.schema_version()
    size = f", {storage.file.stat().st_size / 2**20:.1f} MiB" if storage.file is not None else ""
    found = [Finding("ok", "database", f"schema version {version} of {newest}{size}")]
    faults = await storage.survey.faults()
    if faults:
        remedy = "Stop all processes, restore a backup, or export what can be read and import it into a new file."
        found.append(Finding("problem", "database", f"SQLite's check: {'; '.join(faults[:3])}", remedy))
    unfinished = await storage.survey.unfinished_forgetting()
    if unfinished:
        found.append(
            Finding(
                "problem", "forgetting", f"{counted(unfinished, 'order')} to forget not finished",
                "Open a memory with the same blocks: the next start goes on. If this stays, look at its log.",
            )
        )  # fmt: skip
    return found


def _counts(kept: Sequence[Kept], people: int) -> list[Finding]:
    messages = sum(each.count for each in kept if each.place in {"window", "archive", "cleared"})
    records = sum(each.count for each in kept) - messages
    live = sum(each.count for each in kept if each.state == "live") - messages
    if not messages and not records:
        return [Finding("ok", "contents", "nothing is stored yet")]
    return [
        Finding(
            "ok",
            "contents",
            f"{counted(people, 'user')}, {counted(messages, 'message')}, {counted(records, 'record')} ({live} live)",
        )
    ]


def _delivery(waiting: Sequence[Waiting]) -> list[Finding]:
    found: list[Finding] = []
    for block in waiting:
        if block.dead_letters:
            remedy = "Repair what the error names, then run: memory-tiers replay --memory module:factory"
            found.append(Finding("problem", block.block, counted(block.dead_letters, "dead letter"), remedy))
        if block.failing:
            remedy = "The block tries again by itself; look at its model and its log."
            errors = ", ".join(block.errors)
            found.append(
                Finding("problem", block.block, f"failing in {counted(block.failing, 'session')}: {errors}", remedy)
            )
        if block.stale_claims:
            remedy = "A worker died at work; the next one takes over. Nothing is to do unless the number stays."
            found.append(Finding("advice", block.block, counted(block.stale_claims, "expired claim"), remedy))
        if block.messages:
            remedy = "Normal while people talk; if it grows, run: memory-tiers worker --memory module:factory"
            what = f"{counted(block.messages, 'message')} to absorb in {counted(block.sessions, 'session')}"
            found.append(Finding("advice", block.block, what, remedy))
    if found or not waiting:
        return found
    return [Finding("ok", "delivery", f"{counted(len(waiting), 'block')} up to date")]


def _texts(texts: Texts) -> list[Finding]:
    found: list[Finding] = []
    if texts.damaged:
        remedy = "They are skipped. Restore a backup, or delete them: memory-tiers forget --id ID"
        found.append(
            Finding("problem", "texts", f"{counted(len(texts.damaged), 'damaged row')}: {_some(texts.damaged)}", remedy)
        )
    if texts.secrets:
        remedy = "Change these secrets, then run: memory-tiers forget --id ID; keep redaction on."
        what = f"what looks like a secret is in {counted(len(texts.secrets), 'text')}: {_some(texts.secrets)}"
        found.append(Finding("problem", "secrets", what, remedy))
    elif texts.read:
        found.append(Finding("ok", "secrets", f"none found in {counted(texts.read, 'text')}"))
    return found


def _embeddings(models: dict[str, int], texts: Texts) -> list[Finding]:
    if not models:
        remedy = "Recall goes by words (BM25). An embedding model finds what is said in other words."
        return [Finding("advice", "embeddings", "none are stored", remedy)] if texts.read else []
    found: list[Finding] = []
    if len(models) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in models.items())
        remedy = "A question is compared with those of its own model; use one model for all memories of a storage."
        found.append(Finding("advice", "embeddings", f"made by several models: {listed}", remedy))
    share = texts.other / texts.letters if texts.letters else 0.0
    for name, count in models.items():
        level, remedy = _language_fit(name, share)
        what = f"{name}: {counted(count, 'embedding')}; {share:.0%} of the letters are not Latin"
        found.append(Finding(level, "embeddings", what, remedy))
    return found


def _language_fit(model: str, share: float) -> tuple[Level, str]:
    if share < _MUCH_OTHER or _MANY_LANGUAGES.search(model):
        return "ok", ""
    if _ENGLISH_ONLY.search(model):
        return "problem", "The model knows English; use a multilingual one, such as BAAI/bge-m3."
    return "advice", "Make sure that the model knows these languages; such as BAAI/bge-m3 does."


async def _external_index(storage: Storage) -> list[Finding]:
    state = await storage.index_state()
    if not state.attached:
        return [Finding("ok", "index", "built in: read from the tables at every use")]
    found: list[Finding] = []
    if state.error is not None:
        remedy = "Recall goes on with the tables. Look at the server; what it missed is told to it afterwards."
        found.append(Finding("problem", "index", f"the server failed: {state.error}", remedy))
    if state.owners:
        remedy = "It is told at the next question; at once: memory-tiers reindex --memory module:factory"
        what = f"not in step: {counted(state.pending, 'record')} of {counted(state.owners, 'owner')}"
        found.append(Finding("advice", "index", what, remedy))
    return found or [Finding("ok", "index", "on a server, in step")]


# --- the configuration ------------------------------------------------------------------------------------------


def _no_configuration() -> list[Finding]:
    return [Finding("ok", "configuration", "not looked at", "Pass --memory module:factory to look at yours too.")]


def _configuration(memory: TieredMemory, models: Collection[str], waiting: Sequence[Waiting]) -> list[Finding]:
    checks: tuple[Callable[[], list[Finding]], ...] = (
        lambda: _blocks(memory, waiting),
        lambda: _model_change(memory, models),
        lambda: _limits(memory),
    )
    return [finding for check in checks for finding in check()]


def _blocks(memory: TieredMemory, waiting: Sequence[Waiting]) -> list[Finding]:
    ours = [block for block in memory.memory_blocks if isinstance(block, TieredMemoryBlock)]
    foreign = [block.name for block in memory.memory_blocks if not isinstance(block, TieredMemoryBlock)]
    found = [Finding("ok", "configuration", f"blocks: {', '.join(b.name for b in memory.memory_blocks) or 'none'}")]
    orphans = sorted({each.block for each in waiting} - {block.key for block in ours} - set(foreign))
    if orphans:
        remedy = "A block that was renamed starts anew: give it its old name back, or leave it if it is meant."
        found.append(
            Finding("advice", "configuration", f"the storage knows other blocks: {', '.join(orphans)}", remedy)
        )
    if not memory.memory_blocks:
        remedy = "Add VectorMemoryBlock(): without blocks, what leaves the window is kept but never recalled."
        found.append(Finding("advice", "configuration", "the memory has no blocks", remedy))
    return found


def _model_change(memory: TieredMemory, models: Collection[str]) -> list[Finding]:
    used = {
        model.model_name
        for model in (getattr(block, "embed_model", None) for block in memory.memory_blocks)
        if model is not None
    }
    strange = sorted(used - set(models))
    if not models or not strange:
        return []
    remedy = "What is stored is found by words alone until: memory-tiers reindex --memory module:factory"
    what = f"the memory embeds with {', '.join(strange)}, the storage holds {', '.join(models)}"
    return [Finding("problem", "configuration", what, remedy)]


def _limits(memory: TieredMemory) -> list[Finding]:
    left = memory.token_limit - memory.reserve_tokens
    found = [Finding("ok", "configuration", f"{left} tokens for a context, {memory.reserve_tokens} in reserve")]
    if not memory.reserve_tokens:
        remedy = "The system prompt, tool schemas and the answer need room outside memory: set reserve_tokens."
        found.append(Finding("advice", "configuration", "reserve_tokens is 0", remedy))
    return found


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return ", ".join(ids[:_MOST_IDS]) + more
