"""Evidence recall and cost of a put, next to mem0 with `infer=False`, on the sample chats with one embedding model.

    pip install mem0ai 'wordllama==0.4.0.post1' && python -m benchmarks.mem0_recall

From a checkout. mem0 is no dependency of this package; its telemetry is off here. No LLM is called: `infer=False`
stores what was said. Its keyword leg and its entities need fastembed and spaCy with models from a hub; where these are
missing, as in an offline run, it searches by vectors alone, as it does after a plain `pip install mem0ai`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.memory.types import BaseMemory
from pydantic import PrivateAttr

from benchmarks.timing import table
from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock, evaluate_recall
from llama_index_memory_tiers.chats import Chat
from llama_index_memory_tiers.evaluation import RecallReport
from llama_index_memory_tiers.sample import sample_chat
from llama_index_memory_tiers.testing import WordLlamaEmbedding

BUDGETS = (1000, 2000, 4000)
WAYS: dict[str, dict[str, Any]] = {
    "mem0, defaults (20 best above a threshold)": {},
    "mem0, as many as fit": {"top_k": 1000, "threshold": 0.0},
}


class _Embedder:
    """mem0's interface of an embedding model, over the model that ours gets too."""

    def __init__(self) -> None:
        self._model = WordLlamaEmbedding()

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:  # noqa: ARG002  # mem0's signature
        return self._model.get_text_embedding(text)


class Mem0:
    """One mem0 memory in a folder, on Qdrant's local mode.

    Args:
        folder: Where it keeps its files.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.update(MEM0_TELEMETRY="False", MEM0_DIR=str(folder), OPENAI_API_KEY="never asked")
        logging.getLogger("mem0").setLevel(logging.ERROR)  # it logs every add
        store = {"path": str(folder / "qdrant"), "embedding_model_dims": 256, "on_disk": True}
        self._memory = import_module("mem0").Memory.from_config(
            {"vector_store": {"provider": "qdrant", "config": store}, "history_db_path": str(folder / "history.db")}
        )
        self._memory.embedding_model = _Embedder()
        self.took: list[float] = []
        self.known: set[str] = set()

    def add(self, user: str, message: ChatMessage) -> None:
        """Store what was said; the CPU time it took is kept, in milliseconds."""
        begun = time.process_time()
        self._memory.add([{"role": message.role.value, "content": message.content or ""}], user_id=user, infer=False)
        self.took.append((time.process_time() - begun) * 1000)

    def search(self, user: str, text: str, how: dict[str, Any]) -> list[str]:
        """What it finds, best first."""
        return [found["memory"] for found in self._memory.search(text, filters={"user_id": user}, **how)["results"]]


class Mem0Memory(BaseMemory):
    """mem0 as a LlamaIndex memory: a get is what its search finds, best first, a line each.

    Args:
        mem0: Shared by all users; it hears a user's chat once, whatever the budget.
        user: Whose.
        how: Arguments of its search.
    """

    _mem0: Mem0 = PrivateAttr()
    _user: str = PrivateAttr()
    _how: dict[str, Any] = PrivateAttr()
    _hears: bool = PrivateAttr()

    def __init__(self, mem0: Mem0, user: str, how: dict[str, Any]) -> None:
        super().__init__()
        self._mem0, self._user, self._how, self._hears = mem0, user, how, user not in mem0.known
        mem0.known.add(user)

    @classmethod
    def from_defaults(cls, **kwargs: Any) -> Mem0Memory:
        """As LlamaIndex makes memories."""
        return cls(**kwargs)

    def put(self, message: ChatMessage) -> None:
        """Store what was said."""
        if self._hears:
            self._mem0.add(self._user, message)

    def get(self, input: str | None = None, **_: Any) -> list[ChatMessage]:  # noqa: A002  # LlamaIndex's name
        """What the search finds for a request."""
        found = self._mem0.search(self._user, input or "", self._how)
        return [ChatMessage(role="system", content="\n".join(" ".join(text.split()) for text in found))]

    def get_all(self) -> list[ChatMessage]:
        """Not asked here."""
        raise NotImplementedError

    def set(self, messages: list[ChatMessage]) -> None:
        """Not asked here."""
        raise NotImplementedError

    def reset(self) -> None:
        """Not asked here."""
        raise NotImplementedError


async def our_puts(folder: Path, chat: Chat) -> list[float]:
    """CPU milliseconds of each put of ours, absorbed and embedded before it returns, as mem0's add is."""
    took: list[float] = []
    async with Storage(folder / "ours.db") as storage:
        memory = TieredMemory(
            storage=storage,
            user_id="all",
            session_id="one",
            delivery="inline",
            memory_blocks=[VectorMemoryBlock(embed_model=WordLlamaEmbedding())],
        )
        for said in chat.messages:
            begun = time.process_time()
            await memory.aput(ChatMessage(role=said.role, content=said.text))
            took.append((time.process_time() - begun) * 1000)
        await memory.aclose()
    return took


async def measure(folder: Path) -> str:
    """Run both on the sample chats of all users.

    Args:
        folder: For files.

    Returns:
        Markdown.
    """
    chat, mem0 = sample_chat(), Mem0(folder)
    rows = []
    for name, how in WAYS.items():

        def make(user: str, _: int, how: dict[str, Any] = how) -> Mem0Memory:
            return Mem0Memory(mem0, user.partition("@")[0], how)

        found = await evaluate_recall(chat.messages, chat.questions, make_memory=make, budgets=BUDGETS)
        rows.append([name, *_means(found)])
    ours = await evaluate_recall(chat.messages, chat.questions, embed_model=WordLlamaEmbedding(), budgets=BUDGETS)
    rows.append(["TieredMemory + VectorMemoryBlock, defaults", *_means(ours)])
    versions = f"mem0ai {metadata.version('mem0ai')}, qdrant-client {metadata.version('qdrant-client')} (local mode)"
    puts = [
        [name, f"{median(took):.1f}", f"{sorted(took)[len(took) * 95 // 100]:.1f}"]
        for name, took in (
            ("mem0 `add(infer=False)`", mem0.took),
            ("TieredMemory, inline", await our_puts(folder, chat)),
        )
    ]
    return (
        "# Next to mem0, `infer=False`\n\n"
        f"Made by `python -m benchmarks.mem0_recall`. {versions}; {len(chat.messages)} messages, {len(chat.questions)} "
        "questions; mean share of the evidence in the context at so many tokens.\n\n"
        + table(["memory", *map(str, BUDGETS)], rows)
        + "\n\nCPU milliseconds from a message to its being found, one by one; mem0 with its store in this process.\n\n"
        + table(["", "median", "p95"], puts)
    )


def _means(report: RecallReport) -> list[str]:
    return [f"{row['mean']:.3f}" for row in report.rows if row["group"] == "all"]


def main() -> int:
    """Measure, print, and write `MEM0.md` beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder))) + "\n"
    sys.stdout.write(results)
    (Path(__file__).parent / "MEM0.md").write_text(results, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
