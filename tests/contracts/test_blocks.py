"""The block contract on our blocks, on LlamaIndex's, and on one that a user might write."""

from __future__ import annotations

import json
import re
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.llms.mock import MockLLM
from llama_index.core.memory import StaticMemoryBlock as StockStaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import FactProposal, StaticMemoryBlock, StoredMessage, VectorMemoryBlock
from llama_index_memory_tiers.blocks.facts import FactExtractionMemoryBlock
from llama_index_memory_tiers.testing import WordLlamaEmbedding
from llama_index_memory_tiers.testing.contracts import BlockContract

_STATIC = "The user is called Logan."


class TestStaticMemoryBlock(BlockContract):
    """Says the same to everybody and learns nothing."""

    capabilities = frozenset({"keeps_sessions_apart"})

    def make_block(self) -> StaticMemoryBlock:
        return StaticMemoryBlock(name="core", static_content=_STATIC)


class TestStockStaticMemoryBlock(BlockContract):
    """LlamaIndex's; its base class writes the session's id into the caller's messages."""

    capabilities = frozenset({"keeps_sessions_apart"})

    def make_block(self) -> StockStaticMemoryBlock:
        return StockStaticMemoryBlock(name="core", static_content=_STATIC)


class TestVectorMemoryBlockByWords(BlockContract):
    def make_block(self) -> VectorMemoryBlock:
        return VectorMemoryBlock(embed_model=None)


class _PickyEmbedding(WordLlamaEmbedding):
    """Like tokenizers and HTTP clients, refuses what is not UTF-8."""

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return super()._get_text_embeddings([text.encode().decode() for text in texts])


class TestVectorMemoryBlockByMeaning(BlockContract):
    told = "My cat is called Tom."
    asked = "What is the name of my pet?"

    def make_block(self) -> VectorMemoryBlock:
        return VectorMemoryBlock(embed_model=_PickyEmbedding())


class TestVectorMemoryBlockOfOneSession(BlockContract):
    def make_block(self) -> VectorMemoryBlock:
        return VectorMemoryBlock(embed_model=None, scope="session")


class _CatFinder(MockLLM):
    """A model that finds one kind of fact, without chance and without network."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="cat-finder")

    async def achat(self, messages: Any, **_: Any) -> ChatResponse:
        text = "\n".join(message.content or "" for message in messages)
        conversation = text.partition("<known_facts>")[0]
        facts = [
            {
                "subject": "cat",
                "relation": "is called",
                "value": name,
                "fact": f"The user's cat is called {name}.",
                "said": [1],
            }
            for name in dict.fromkeys(re.findall(r"My cat is called (\w+)", conversation))
        ]
        answer = "\n".join(json.dumps(fact) for fact in facts) or "[]"
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=answer))


class TestFactExtractionMemoryBlock(BlockContract):
    def make_block(self) -> FactExtractionMemoryBlock:
        return FactExtractionMemoryBlock(llm=_CatFinder())


def _find_cats(messages: list[StoredMessage]) -> list[FactProposal]:
    return [
        FactProposal(f"The user's cat is called {found[1]}.", "cat", "is called", found[1], said=(message.id,))
        for message in messages
        if (found := re.search(r"My cat is called (\w+)", message.text))
    ]


class TestFactExtractionMemoryBlockWithoutAModel(BlockContract):
    def make_block(self) -> FactExtractionMemoryBlock:
        return FactExtractionMemoryBlock(extractor=_find_cats)


class MentionCounter(BaseMemoryBlock[str]):
    """Counts how often a word was said: a user's own block, whose state is in the object."""

    word: str = "Tom"
    count: int = 0

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
        return f"{self.word} was mentioned {self.count} times."

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.count += sum(self.word in (message.content or "") for message in messages)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        return ""


class TestMentionCounter(BlockContract):
    capabilities = frozenset({"recalls"})
    expected = "Tom was mentioned 1 times."

    def make_block(self) -> MentionCounter:
        return MentionCounter(name="mentions")
