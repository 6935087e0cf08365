"""Chores: a fixed piece of work on a memory, and what must be there when it is done; for the fault matrix."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.blocks import Query, TieredMemoryBlock
from llama_index_memory_tiers.budget import Item, TokenCounter
from llama_index_memory_tiers.events import ForgetReceipt
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.records import Batch, Changes, NewRecord, Record
from llama_index_memory_tiers.storage import IndexQuery, OwnerReader, Storage
from llama_index_memory_tiers.storage.selection import ForgetFilter
from llama_index_memory_tiers.text import analyse

CLAIM_SECONDS = 0.05
_SECRET = "quetzal"  # noqa: S105  # a word to look for, not a password
_WITNESSED = "witnessed"


class WitnessBlock(TieredMemoryBlock):
    """Writes one record per message, under an id made anew each time, so that a double shows."""

    name: str = "Witness"

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Batch:  # noqa: ARG002
        """Take the batch as it is."""
        return batch

    def merge(self, draft: Batch, records: Sequence[Record]) -> Changes:  # noqa: ARG002
        """Write down what was heard."""
        return Changes(
            add=tuple(
                NewRecord(
                    id=f"{os.urandom(8).hex()}-{stored.id}",
                    kind=_WITNESSED,
                    text=stored.text,
                    data={"uid": stored.id, "session": stored.session_id},
                    sources=(stored.place,),
                    terms=analyse(stored.text),
                )
                for stored in draft.messages
            )
        )

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer what a search finds."""
        hits = await reader.search(IndexQuery(text=query.text, now=query.now, kinds=frozenset({_WITNESSED})))
        return [Item(record.text) for record in await reader.records_of(hits)]


@dataclass(frozen=True, slots=True)
class Step:
    """One call, safe to repeat.

    Args:
        act: `put`, `get`, `flush` or `forget`.
        session: In which session.
        uids: Messages that it puts, or that are gone after it.
    """

    act: Literal["put", "get", "flush", "forget"]
    session: str = "chat"
    uids: tuple[str, ...] = ()
    how: str = ""

    def text(self, uid: str) -> str:
        """What a message says."""
        return f"{_SECRET} {uid}." if uid.startswith("s") else f"note {uid}."


WORK: tuple[Step, ...] = (
    Step("put", uids=("q1", "a1")),
    Step("put", uids=("s1",)),
    Step("put", uids=("a2",)),
    Step("get"),
    Step("put", session="aside", uids=("s2", "b1")),
    Step("put", uids=("q3", "a3")),
    Step("forget", uids=("s1",), how="ids"),
    Step("put", uids=("s3",)),
    Step("put", uids=("a4",)),
    Step("get"),
    Step("forget", uids=("s3",), how="filter"),
    Step("forget", session="aside", uids=("s2", "b1"), how="session"),
    Step("flush"),
)


@dataclass(slots=True)
class Model:
    """What must be there: a list per session, in plain Python."""

    messages: dict[str, list[str]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def done(self, step: Step) -> None:
        """Take note of a step."""
        if step.act == "put":
            self.messages.setdefault(step.session, []).extend(step.uids)
        elif step.act == "forget":
            self.gone.update(step.uids)

    def left(self, session: str) -> list[str]:
        """Ids of the messages that a session must hold, in order."""
        return [uid for uid in self.messages.get(session, ()) if uid not in self.gone]


def memory_of(storage: Storage, user_id: str) -> TieredMemory:
    """The memory that does the work."""
    return TieredMemory(
        storage=storage,
        user_id=user_id,
        session_id="chat",
        memory_blocks=[WitnessBlock()],
        delivery="inline",
        claim_seconds=CLAIM_SECONDS,
        window_messages=4,
    )


async def do(memory: TieredMemory, step: Step) -> ForgetReceipt | None:
    """Do a step; the receipt, when it forgets."""
    mine = memory if step.session == memory.session_id else memory.for_session(step.session)
    if step.act == "put":
        roles = [MessageRole.ASSISTANT if uid[0] in "ab" else MessageRole.USER for uid in step.uids]
        messages = [ChatMessage(role=role, content=step.text(uid)) for role, uid in zip(roles, step.uids, strict=True)]
        await mine.aput_messages(messages, uids=step.uids)
    elif step.act == "get":
        await mine.aget("note q1")
    elif step.act == "flush":
        await mine.aflush()
    elif step.how == "ids":
        return await mine.aforget(ids=step.uids)
    elif step.how == "filter":
        return await mine.aforget(scope="session", filter=ForgetFilter(contains=_SECRET.upper()))
    else:
        return await mine.aforget(scope="session")
    return None


async def is_there(memory: TieredMemory, uids: Sequence[str]) -> bool:
    """Whether any of these messages is in a history."""
    stored = [one.id for each in ("chat", "aside") for one in await memory.for_session(each).amessages()]
    return any(uid in stored for uid in uids)


async def compare(memory: TieredMemory, model: Model) -> list[str]:
    """What is not as the model says."""
    stream = io.BytesIO()
    await memory.aexport(stream)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    heard = [line["record"] for line in lines if line.get("record", {}).get("kind") == _WITNESSED]
    problems = []
    if _SECRET in stream.getvalue().decode():
        problems.append("forgotten text is in the export")
    if _SECRET in repr(await memory.aget("what about the note?")):
        problems.append("forgotten text is in a context")
    for session in model.messages:
        wanted = model.left(session)
        mine = memory if session == memory.session_id else memory.for_session(session)
        stored = await mine.amessages()
        if [one.id for one in stored] != wanted:
            problems.append(f"{session} holds {[one.id for one in stored]}, not {wanted}")
        told = [json.loads(one["data"])["uid"] for one in heard if json.loads(one["data"])["session"] == session]
        if told != wanted:
            problems.append(f"a block was told {told} of {session}, not {wanted}")
        row = await memory.storage.log.session(memory.user_id or "", session)
        active = sum(one.tokens for one in stored if one.status.value == "active")
        if row is None or row.active_tokens != active:
            problems.append(f"the window of {session} has {active} tokens, its session says otherwise")
    return problems
