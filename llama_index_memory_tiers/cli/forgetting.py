"""The command that deletes: forget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.blocks import TieredMemoryBlock
from llama_index_memory_tiers.cli.ids import LEAST, no_such_id, place, whole_id
from llama_index_memory_tiers.cli.outcome import FINDING, FINE, Outcome
from llama_index_memory_tiers.display import counted
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage.outlook import Outlook
from llama_index_memory_tiers.storage.selection import Derived, ForgetFilter, ForgetScope, checked_selection

_SAMPLE_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Named:
    """What the ids that were typed stand for.

    Args:
        ids: What to forget.
        unknown: As typed: neither a message nor a record.
        staying: Messages that records in `ids` came from, and that are not meant themselves.
    """

    ids: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()


async def forget(memory: TieredMemory, what: dict[str, Any], *, sure: Callable[[str], bool]) -> Outcome:
    """Forget, after asking.

    Args:
        memory: Whose.
        what: Arguments of `aforget`; of the ids also the first characters, and a record that copies one message
            stands for the message.
        sure: Asked with a sentence that says what will be gone.

    Returns:
        The receipt; a finding when nothing matches, something is left, or the answer was no.
    """
    named = await _meant_by(memory, what["ids"]) if "ids" in what else _Named()
    if "ids" in what:
        what = {**what, "ids": list(named.ids or named.unknown)}
    selection = checked_selection(memory.user_id or "", memory.session_id, **{"scope": None, **what})
    outlook = await memory.storage.forgetting.foresee(selection)
    unknown = [no_such_id(memory, each) for each in named.unknown]
    nothing = Outcome(
        {"forgotten": False, "messages": 0, "records": 0, "unknown": named.unknown},
        [*(unknown or [f"Nothing of {place(memory, what.get('scope'))} matches."]), "Nothing was forgotten."],
        FINDING,
    )
    if not outlook.messages and not outlook.records and not _holds_elsewhere(memory):
        return nothing
    stay = [f"The messages that it came from stay: {', '.join(named.staying)}."] if named.staying else []
    question = await _question(memory, what, outlook)
    if not sure(" ".join([*unknown, question, *stay, "It cannot be undone."])):
        return Outcome({"forgotten": False}, "Nothing was forgotten.", FINDING)
    receipt = await memory.aforget(**what)
    if receipt.complete and not any(receipt.removed.values()) and not any(entry.left for entry in receipt.entries):
        return nothing
    data = {
        "forgotten": True,
        "complete": receipt.complete,
        "entries": receipt.entries,
        "unreached": receipt.unreached,
        "unknown": named.unknown,
        "messages_that_stay": named.staying,
    }
    return Outcome(data, [receipt, *stay, *unknown], FINE if receipt.complete and not unknown else FINDING)


async def _meant_by(memory: TieredMemory, typed: Sequence[str]) -> _Named:
    """See `_Named`.

    Raises:
        ConfigurationError: An id is too short to be the beginning of one, or begins several.
    """
    ids: dict[str, None] = {}
    unknown: list[str] = []
    sources: dict[str, None] = {}
    for each in typed:
        found = await whole_id(memory, each)
        if found is None and len(each) < LEAST:
            raise ConfigurationError(
                f"--id={each!r} was given. {no_such_id(memory, each)}",
                allowed=f"It is a whole id, or at least the first {LEAST} characters of one.",
                remedy="Take one from `memory-tiers search`; nothing was forgotten.",
            )
        if found is None:
            unknown.append(each)
            continue
        kind, origins = await _origins(memory, found)
        if kind == "message" and len(origins) == 1:
            ids[origins[0]] = None  # the message takes its copy along
        else:
            ids[found] = None
            sources |= dict.fromkeys(origins)
    return _Named(tuple(ids), tuple(unknown), tuple(each for each in sources if each not in ids))


async def _origins(memory: TieredMemory, found: str) -> tuple[str, list[str]]:
    """The kind of a message or record, and the ids of the messages it came from."""
    try:
        origin = await memory.awhy(found)
    except ConfigurationError:  # its row is damaged: it is what it is
        return "", []
    return origin.kind, [source.id for source in origin.sources]


def _holds_elsewhere(memory: TieredMemory) -> bool:
    """Whether a block keeps data, such as files, that the tables do not show."""
    ours = [block for block in memory.memory_blocks if isinstance(block, TieredMemoryBlock)]
    untold = TieredMemoryBlock.forget_owner
    return any(block.holds_external_data or type(block).forget_owner is not untold for block in ours)


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


async def _question(memory: TieredMemory, what: dict[str, Any], outlook: Outlook) -> str:
    limits = list(_limits(what.get("ids"), what.get("before"), what.get("filter")))
    which = f"what {' and '.join(limits)}" if limits else "everything"
    where = memory.storage.file or memory.storage.address
    counts = f"{counted(outlook.messages, 'message')} and {counted(outlook.records, 'record')}"
    sample = await _sample(memory, outlook)
    such = f", such as {sample!r}" if sample else ""
    return (
        f"Forget {which} of {place(memory, what.get('scope'))} in {where}, and what was learnt from it: {counts}{such}?"
    )


async def _sample(memory: TieredMemory, outlook: Outlook) -> str:
    """The beginning of a text that will be gone."""
    survey, user = memory.storage.survey, memory.user_id or ""
    texts: list[str] = []
    if outlook.message is not None:
        texts = [message.text for message in await survey.messages(user, None, [outlook.message])]
    elif outlook.record is not None:
        texts = [record.text for _, record in await survey.records(user, None, [outlook.record])]
    text = " ".join(next(iter(texts), "").split())
    return text if len(text) <= _SAMPLE_CHARS else f"{text[: _SAMPLE_CHARS - 1]}…"


def _limits(ids: list[str] | None, before: datetime | None, wanted: ForgetFilter | None) -> Iterator[str]:
    if ids is not None:
        yield f"has the id {' or '.join(ids)}"
    if before is not None:
        yield f"was said before {before.isoformat(' ', 'minutes')}"
    if wanted is not None and wanted.contains is not None:
        yield f"has {wanted.contains!r} in it"
    if wanted is not None and wanted.speaker is not None:
        yield f"was said by {wanted.speaker!r}"
