"""Commands that look: inspect, search, why, tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.blocks import HeatMemoryBlock, VectorMemoryBlock
from llama_index_memory_tiers.cli.ids import known_id
from llama_index_memory_tiers.cli.outcome import Outcome
from llama_index_memory_tiers.display import Grid
from llama_index_memory_tiers.events import ItemReport, PartReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.records import Recollection
from llama_index_memory_tiers.storage.index.rows import term_number
from llama_index_memory_tiers.storage.index.sought import sought
from llama_index_memory_tiers.text import message_terms

_NEXT = "next to a match"
_MOST_TERMS = 512  # as the search reads


async def inspect_context(memory: TieredMemory, question: str) -> Outcome:
    """Say what an agent would be given for a question, and why.

    Args:
        memory: Whose.
        question: The request.

    Returns:
        The report.
    """
    report = await memory.aexplain(question)
    data: dict[str, Any] = {
        "query": report.query,
        "limit": report.limit,
        "tokens": report.tokens,
        "overflow": report.overflow,
        "window": {
            "tokens": report.window_tokens,
            "messages": report.window_messages,
            "left_out": report.window_left_out,
        },
        "parts": report.parts,
        "messages": [{"role": each.role.value, "content": each.content} for each in report.messages],
    }
    vectors = {block.name for block in memory.memory_blocks if isinstance(block, VectorMemoryBlock)}
    parts = tuple(_marked(part, question) if part.name in vectors else part for part in report.parts)
    return Outcome(data, replace(report, parts=parts))


def _marked(part: PartReport, question: str) -> PartReport:
    """The part with another name for words that only a neighbour has: a match lends a share to the lines around it."""

    def marked(item: ItemReport) -> ItemReport:
        if _shares_words(question, item.text):
            return item
        legs = {_NEXT if leg == "bm25" else leg: value for leg, value in item.legs.items()}
        return replace(item, legs=legs)

    return replace(part, kept=tuple(map(marked, part.kept)), left_out=tuple(map(marked, part.left_out)))


def _shares_words(question: str, text: str, speaker: str = "", when: datetime | None = None) -> bool:
    """Whether a line itself has a word of the question, or a related one, as the search counts them."""
    wanted = {number for each in sought(question, _MOST_TERMS) for number in each.numbers}
    return any(term_number(term) in wanted for term in message_terms(text, speaker=speaker, when=when))


async def search(memory: TieredMemory, query: str, top_k: int, session: str | None = None) -> Outcome:
    """Look up what was said or noted.

    Args:
        memory: Whose.
        query: What about.
        top_k: At most so many.
        session: Only what was said in this conversation.

    Returns:
        What was found, best first; for people, lines that only stand next to a match come last.
    """
    if not any(isinstance(block, VectorMemoryBlock) for block in memory.memory_blocks):
        return Outcome({"found": []}, "Nothing is stored that a vector block could search.")
    found = await memory.arecall(query, top_k, filter=None if session is None else {"session_id": session})
    return Outcome({"found": found}, _found_grid(found, query) if found else "Nothing was found.")


def _found_grid(found: Sequence[Recollection], query: str) -> Grid:
    """What was found, without columns that are empty in every row."""
    heads = ("score", "distance", "said at", "by", "text", "", "id")
    rows = []
    for one in found:
        by = one.metadata.get("sent_from") or one.metadata.get("role", "note")
        own = one.distance is not None or _shares_words(query, one.text, by, one.said_at)
        distance = "" if one.distance is None else f"{one.distance:.3f}"
        said_at = f"{one.said_at:%Y-%m-%d %H:%M}"
        rows.append((f"{one.score:.3f}", distance, said_at, by, one.text, "" if own else _NEXT, one.id))
    rows.sort(key=lambda row: row[5])
    shown = [at for at, head in enumerate(heads) if head not in {"", "distance"} or any(row[at] for row in rows)]
    return Grid([heads[at] for at in shown], [[row[at] for at in shown] for row in rows])


async def why(memory: TieredMemory, id: str) -> Outcome:  # noqa: A002  # the field's word for it
    """Say where a message or record comes from.

    Args:
        memory: Whose.
        id: Public id, or its beginning.

    Returns:
        Its sources, and what came from it.
    """
    found = await memory.awhy(await known_id(memory, id))
    return Outcome(found, found)


async def tiers(memory: TieredMemory, session: str | None = None) -> Outcome:
    """Count what is kept, tier by tier.

    Args:
        memory: Whose.
        session: Only its messages, and the records that it alone has.

    Returns:
        Messages and records by place, and the tiers of a heat block.
    """
    storage, user = memory.storage, memory.user_id
    if user is None and session is None:
        session = memory.session_id
    kept = await storage.survey.kept(user or "", session, now=storage.now())
    heads = ("place", "kind", "state", "count", "tokens")
    rows = [(one.place, one.kind, one.state, one.count, one.tokens) for one in kept]
    names = [*([f"user {user}"] if user is not None else []), *([f"session {session}"] if session is not None else [])]
    if not rows and user is None:
        return Outcome({"user": None, "session": None, "kept": [], "heat": {}}, "Nothing is kept.")
    whose = ", ".join(names)
    shown: list[Any] = [Grid(heads, rows, whose) if rows else f"{whose}: nothing is kept."]
    blocks = [block for block in memory.memory_blocks if isinstance(block, HeatMemoryBlock)]
    heat = {block.name: await block.atiers(memory) for block in blocks if user is None or session is None}
    shown += [part for name, report in heat.items() for part in (f"\n{name}", report)]
    return Outcome({"user": user, "session": session, "kept": kept, "heat": heat}, shown)
