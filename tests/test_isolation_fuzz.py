"""Hundreds of tenants whose ids look alike: every public read, export and deletion stays with its own."""

from __future__ import annotations

import io
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from doubles import BadContentError, RecordingBlock, mark, marks_in, rows
from llama_index.core.base.llms.types import ChatMessage
from running import SOAK

from llama_index_memory_tiers import ForgetFilter, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.errors import ConfigurationError

TENANTS = 1000 if SOAK else 200

SEEDS = (
    "john_doe",
    "acme",
    "约翰",
    "u:1",
    "s:1",
    "john%",
    "'; DROP TABLE x; --",
    '"',
    "\\",
    "../etc/passwd",
    "a" * 400,
)
TWINS = {
    "o": "\u043e", "a": "\u0430", "e": "\u0435", "_": "-", "-": "_", "%": "_", "j": "\uff4a", "n": "n\u0303", " ": "\u00a0",
    ":": "\uff1a", "'": "\u2019",
}  # fmt: skip


def look_alike(seed: str, dice: random.Random) -> str:
    """An id that a careless comparison takes for another."""
    at = dice.randrange(len(seed))
    return dice.choice(
        [
            seed[:at] + TWINS.get(seed[at], seed[at].swapcase()) + seed[at + 1 :],
            f"{seed[:at]}{dice.choice('%_*?.')}{seed[at + 1 :]}",
            f"{seed}{dice.choice(' %_2/:')}",
            f"{dice.choice(' %/')}{seed}",
            seed.upper(),
            seed + seed,
            seed[:at] + seed[at + 1 :],
            f"{seed}\u200b",
        ]
    )


def tenants_of(base: TieredMemory, dice: random.Random) -> list[TieredMemory]:
    """Memories of users and of sessions without user; no two with the same owner."""
    owners: dict[tuple[str | None, str], None] = {}
    names = list(SEEDS)
    while len(owners) < TENANTS:
        name = look_alike(dice.choice(names), dice)
        if name.strip():
            names.append(name)
            owners[(name, dice.choice(["chat", "acme"])) if dice.random() < 0.7 else (None, name)] = None
    users: dict[str, None] = {}
    found = []
    for user, session in owners:
        if user is None or user not in users:
            found.append(base.for_session(session, user_id=user))
            users |= {user: None} if user is not None else {}
    return found


class Fragile(RecordingBlock):
    """Cannot read what a case of its own says, so that dead letters arise."""

    name: str = "Fragile"

    async def prepare(self, batch: Any, reader: Any, counter: Any) -> Any:
        if any("unreadable" in stored.text for stored in batch.messages):
            raise BadContentError(batch.messages[0].text)
        return batch


async def exported(memory: TieredMemory, **how: Any) -> bytes:
    stream = io.BytesIO()
    await memory.aexport(stream, **how)
    return stream.getvalue()


def reads_of(memory: TieredMemory, question: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    async def explained() -> Any:
        report = await memory.aexplain(question)
        return report.parts, report.messages, str(report)

    async def on_the_desk() -> Any:
        return await (await memory.desk("Fragile").reader()).records("heard")

    return {
        "aget": lambda: memory.aget(question),
        "aexplain": explained,
        "amessages": memory.amessages,
        "dead letters": memory.adead_letters,
        "export": lambda: exported(memory),
        "export of the session": lambda: exported(memory, scope="session"),
        "desk": on_the_desk,
    }


@pytest.fixture
def storage(make_storage: Callable[..., Storage]) -> Storage:
    return make_storage("file")


async def test_tenants_that_look_alike_never_meet(storage: Storage) -> None:
    dice = random.Random(33)
    base = TieredMemory(
        storage=storage,
        session_id="base",
        delivery="inline",
        memory_blocks=[VectorMemoryBlock(embed_model=None), Fragile()],
    )
    tenants = tenants_of(base, dice)
    assert len(tenants) > 0.8 * TENANTS
    for number, tenant in enumerate(tenants):
        spoilt = " unreadable" if number % 20 == 0 else ""
        said = [
            f"My account {mark(number)} needs a new password.",
            f"The password of {mark(number)} was reset{spoilt}.",
        ]
        messages = [
            ChatMessage(role=role, content=text) for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        await tenant.aput_messages(messages, uids=["q", "a"])  # ids that everybody uses
    for number, tenant in enumerate(tenants):
        reads = reads_of(tenant, f"the password of {mark(dice.randrange(len(tenants)))}")
        for name in reads if number % 20 == 0 else [dice.choice(sorted(reads))]:
            assert marks_in(await reads[name]()) <= {mark(number)}, (number, name)
    await forget_and_look(storage, tenants, dice)
    await base.aclose()


async def forget_and_look(storage: Storage, tenants: list[TieredMemory], dice: random.Random) -> None:
    """Every tenth forgets, in words that fit everybody: the others keep everything."""
    selectors: list[dict[str, Any]] = [
        {"scope": "session"},
        {"ids": ["q", "a"]},
        {"filter": ForgetFilter(contains="password")},
        {"filter": ForgetFilter(contains="mark")},
    ]
    forgotten = set(range(0, len(tenants), 10))
    records = await rows(storage, "SELECT uid FROM {t}_records")
    for number in sorted(forgotten):
        foreign = [row.uid for row in dice.sample(records, 20)]
        chosen = dice.choice(selectors)
        receipt = await tenants[number].aforget(**{"ids": ["q", "a", *foreign]} if "ids" in chosen else chosen)
        assert receipt.complete, receipt
        assert receipt.removed["messages"] == 2
    stolen = await exported(tenants[1])
    for number, tenant in enumerate(tenants):
        left = await tenant.amessages()
        assert (marks_in(left), len(left)) == ((set(), 0) if number in forgotten else ({mark(number)}, 2)), number
        if number % 20 == 2:
            with pytest.raises(ConfigurationError, match="another"):
                await tenant.aimport(io.BytesIO(stolen))
    kept = marks_in(*(row.text for row in await rows(storage, "SELECT text FROM {t}_records WHERE kind = 'heard'")))
    assert {mark(number) for number in range(len(tenants)) if number % 20 and number not in forgotten} <= kept
    assert not kept & {mark(number) for number in forgotten}
