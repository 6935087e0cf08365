"""Do the fixed weights of recall hold on a chat that had no say in them? `python -m benchmarks.weights`.

Each weight in turn is chosen on all of the package's sample chats but one, and tried on that one beside the fixed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import fmean

from llama_index.core.llms import ChatMessage

from benchmarks.timing import table
from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.sample import load_chat, load_questions
from llama_index_memory_tiers.scoring import Weights
from llama_index_memory_tiers.storage import IndexQuery
from llama_index_memory_tiers.storage.index import OwnerIndex
from llama_index_memory_tiers.testing import WordLlamaEmbedding
from llama_index_memory_tiers.text import without_names

BUDGETS = (500, 1000, 2000)
TRIED: Mapping[str, Sequence[float]] = {
    "dense": (0.5, 0.7, 1.0, 1.4, 2.0),
    "bm25": (0.35, 0.5, 0.7, 1.0, 1.4),
    "session": (0.0, 0.25, 0.5, 0.75, 1.0),
    "speaker": (0.0, 0.15, 0.3, 0.45, 0.6),
    "date": (0.0, 0.05, 0.1, 0.2, 0.4),
    "question": (0.0, 0.05, 0.1, 0.2, 0.3),
    "answer": (0.0, 0.1, 0.15, 0.2, 0.3),
}


@dataclass(frozen=True, slots=True)
class _Chat:
    index: OwnerIndex
    asked: Sequence[tuple[IndexQuery, frozenset[int]]]

    def recall(self, weights: Weights) -> float:
        """Share of the evidence among the best messages that fill a budget, mean over questions and budgets."""
        self.index._weights = weights
        shares = []
        for query, evidence in self.asked:
            hits = self.index.search(query)
            for budget in BUDGETS:
                free, found = budget, 0
                for hit in hits:
                    if hit.tokens <= free:
                        free -= hit.tokens
                        found += hit.place is not None and hit.place[1] in evidence
                shares.append(found / len(evidence))
        return fmean(shares)


async def _read(user: str) -> _Chat:
    model = WordLlamaEmbedding()
    told = load_chat(user)
    seqs = {message.id: seq for seq, message in enumerate(told, 1)}
    async with Storage() as storage:
        memory = TieredMemory(
            storage=storage, user_id=user, session_id="chat", memory_blocks=[VectorMemoryBlock(embed_model=model)]
        )
        for one in told:
            message = ChatMessage(role=one.role, content=one.text)
            await memory.aput(message, created_at=one.said_at, sent_from=one.speaker)
        await memory.aflush()
        index = await storage.records.indexes.up_to_date(f"u:{user}", model.model_name)
    now = told[-1].said_at + timedelta(days=1)
    asked = []
    for question in load_questions(user):
        vector = model.get_query_embedding(without_names(question.question, index.speakers))
        query = IndexQuery(text=question.question, now=now, vector=vector, limit=len(told))
        asked.append((query, frozenset(seqs[name] for name in question.evidence)))
    return _Chat(index, asked)


async def report(users: Sequence[str] = ("maya", "liming")) -> str:
    """Choose and try.

    Args:
        users: Of the sample chats.

    Returns:
        Markdown.
    """
    chats = [await _read(user) for user in users]
    fixed = Weights()
    rows = []
    for name, values in TRIED.items():
        variants = [replace(fixed, **{name: value}) for value in values]
        scores = [[chat.recall(variant) for variant in variants] for chat in chats]
        for left, user in enumerate(users):
            others = [fmean(chat[at] for i, chat in enumerate(scores) if i != left) for at in range(len(values))]
            best = max(range(len(values)), key=others.__getitem__)
            mine = scores[left][values.index(getattr(fixed, name))]
            rows.append(
                [name, user, f"{getattr(fixed, name)}", f"{mine:.3f}", f"{values[best]}", f"{scores[left][best]:.3f}"]
            )
    return (
        "## Weights\n\nRecall of evidence on a sample chat, mean over 500, 1 000 and 2 000 tokens, by the fixed weight "
        "and by the one that is best on the other chat.\n\n"
        + table(["weight", "left out", "fixed", "recall", "best on the other", "recall"], rows)
    )


if __name__ == "__main__":
    print(asyncio.run(report()))
