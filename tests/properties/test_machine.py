"""Any sequence of public calls, on two memories over one storage, agrees with a model in plain Python."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doubles import HEARD, RecordingBlock, said
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llama_index.core.storage.chat_store.base_db import MessageStatus
from running import SOAK

from llama_index_memory_tiers import ForgetFilter, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.portal import portal

SESSIONS = ("one", "two")

which = st.sampled_from(SESSIONS)
share = st.floats(0, 1)


@dataclass
class Session:
    """What a session holds: texts, each of them unique."""

    active: list[str] = field(default_factory=list)
    archived: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # of everything that was ever put

    @property
    def history(self) -> list[str]:
        return [text for text in self.order if text in self.active or text in self.archived]

    @property
    def heard(self) -> list[str]:
        return [text for text in self.order if text in (*self.active, *self.archived, *self.cleared)]

    def forget(self, texts: list[str]) -> None:
        for kept in (self.active, self.archived, self.cleared):
            kept[:] = [text for text in kept if text not in texts]


class Machine(RuleBasedStateMachine):
    """Two sessions of one user, each with a memory object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model = {name: Session() for name in SESSIONS}
        self.gone: list[str] = []
        self.number = 0

    @initialize()
    def start(self) -> None:
        self.storage = Storage(Path(self.folder.name) / "memory.db")
        self.memories = {
            name: TieredMemory(
                storage=self.storage,
                user_id="ada",
                session_id=name,
                delivery="inline",
                memory_blocks=[RecordingBlock(), VectorMemoryBlock(embed_model=None)],
            )
            for name in SESSIONS
        }

    def teardown(self) -> None:
        self.close()
        self.folder.cleanup()

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
        portal.run(self.storage.aclose())

    def new(self, count: int) -> list[str]:
        self.number += count
        return [f"note w{number}x" for number in range(self.number - count, self.number)]

    # -- calls -----------------------------------------------------------------------------------------------

    @rule(name=which, count=st.integers(1, 3))
    def put(self, name: str, count: int) -> None:
        texts = self.new(count)
        self.memories[name].put_messages([said("user" if int(t[6:-1]) % 2 else "assistant", t) for t in texts])
        self.model[name].active += texts
        self.model[name].order += texts

    @rule(name=which, kept=share, count=st.integers(0, 2))
    def set(self, name: str, kept: float, count: int) -> None:
        session, new = self.model[name], self.new(count)
        window = self.memories[name].messages(MessageStatus.ACTIVE)
        split = round(kept * len(window))
        wanted = [one.message for one in window[:split]] + [said("user", text) for text in new]
        self.memories[name].set(wanted)
        session.archived += session.active[split:]
        session.active = session.active[:split] + new
        session.order += new

    @rule(name=which, status=st.sampled_from([None, MessageStatus.ACTIVE, MessageStatus.ARCHIVED]))
    def reset(self, name: str, status: MessageStatus | None) -> None:
        portal.run(self.memories[name].areset(status))
        session = self.model[name]
        for kept, meant in ((session.active, MessageStatus.ACTIVE), (session.archived, MessageStatus.ARCHIVED)):
            if status in {None, meant}:
                session.cleared += kept
                kept.clear()

    @rule(name=which)
    def get(self, name: str) -> None:
        context = "\n".join(message.content or "" for message in self.memories[name].get("which note?"))
        assert [text for text in self.model[name].active if text not in context] == []
        assert [text for text in self.gone if text in context] == []

    @rule(name=which)
    def flush(self, name: str) -> None:
        assert self.memories[name].flush().complete
        heard = portal.run(self.heard())
        assert {each: heard.get(each, []) for each in SESSIONS} == {
            each: session.heard for each, session in self.model.items()
        }

    @rule(name=which, share=share, whole=st.sampled_from(["ids", "filter", "session", "user", "other"]))
    def forget(self, name: str, share: float, whole: str) -> None:
        session, memory = self.model[name], self.memories[name]
        history = memory.messages()
        one = history[min(int(share * len(history)), len(history) - 1)] if history else None
        if whole == "user":
            receipt, meant = memory.forget(scope="user"), [t for each in self.model.values() for t in each.heard]
        elif whole == "session":
            receipt, meant = memory.forget(scope="session"), session.heard
        elif one is None:
            return
        elif whole == "ids":
            receipt, meant = memory.forget(ids=[one.id]), [one.text]
        elif whole == "filter":
            receipt, meant = memory.forget(filter=ForgetFilter(contains=one.text)), [one.text]
        else:  # in the scope of the other session it does not exist
            [other] = [each for each in SESSIONS if each != name]
            receipt, meant = self.memories[other].forget(scope="session", ids=[one.id]), []
        assert receipt.complete, str(receipt)
        assert receipt.removed["messages"] == len(meant)
        for each in self.model.values():
            each.forget(meant)
        self.gone += meant

    @rule()
    def restart(self) -> None:
        self.close()
        self.start()

    # -- what must hold --------------------------------------------------------------------------------------

    @invariant()
    def histories_agree(self) -> None:
        for name, session in self.model.items():
            if not hasattr(self, "memories"):
                return
            memory = self.memories[name]
            assert [one.text for one in memory.messages()] == session.history
            assert [one.text for one in memory.messages(MessageStatus.ACTIVE)] == session.active

    async def heard(self) -> dict[str, list[str]]:
        reader = await self.memories["one"].desk("Recorder").reader()
        found: dict[str, list[Any]] = {}
        for record in await reader.records(HEARD):
            found.setdefault(record.data["session"], []).append(record)
        return {name: [r.text for r in sorted(rs, key=lambda r: r.sources)] for name, rs in found.items()}


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=300 if SOAK else 8, stateful_step_count=40 if SOAK else 14)
