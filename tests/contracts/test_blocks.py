"""The block contract on our blocks, on LlamaIndex's, and on one that a user might write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.llms.mock import MockLLM
from llama_index.core.memory import StaticMemoryBlock as StockStaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers import (
    EpisodicMemoryBlock,
    FactProposal,
    HeatMemoryBlock,
    JournalMemoryBlock,
    StaticMemoryBlock,
    StoredMessage,
    SummaryMemoryBlock,
    VectorMemoryBlock,
    WorkingMemoryBlock,
)
from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
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


class _Analyst(MockLLM):
    """A model that indexes pages and finds nothing lasting, without chance and without network."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="analyst")

    async def achat(self, messages: Any, **_: Any) -> ChatResponse:
        text = "\n".join(message.content or "" for message in messages)
        if "You index" in text:
            pages = range(1, 1 + text.count('<page number="'))
            answer = "\n".join(json.dumps({"page": at, "topic": "talk", "keywords": ["talk"]}) for at in pages)
        else:
            answer = "[]" if "You note" in text else json.dumps({"profile": ["They speak."]})
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=answer))


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


class TestHeatMemoryBlockByWords(BlockContract):
    def make_block(self) -> HeatMemoryBlock:
        return HeatMemoryBlock(llm=None, embed_model=None)


class TestHeatMemoryBlockByMeaning(BlockContract):
    told = "My cat is called Tom."
    asked = "What is the name of my pet?"

    def make_block(self) -> HeatMemoryBlock:
        return HeatMemoryBlock(llm=None, embed_model=_PickyEmbedding())


class TestHeatMemoryBlockOfOneSession(BlockContract):
    def make_block(self) -> HeatMemoryBlock:
        return HeatMemoryBlock(llm=None, embed_model=None, scope="session")


class TestHeatMemoryBlockWithAModel(BlockContract):
    def make_block(self) -> HeatMemoryBlock:
        return HeatMemoryBlock(llm=_Analyst(), embed_model=None)


class TestHeatMemoryBlockLikeMemoryOS(BlockContract):
    def make_block(self) -> HeatMemoryBlock:
        return HeatMemoryBlock(llm=None, embed_model=_PickyEmbedding(), policy="memoryos")


class TestFactExtractionMemoryBlock(BlockContract):
    def make_block(self) -> FactExtractionMemoryBlock:
        return FactExtractionMemoryBlock(llm=_CatFinder())


class _Retelling(MockLLM):
    """A model that summarises by repeating."""

    async def achat(self, messages: Any, **_: Any) -> ChatResponse:
        text = "\n".join(message.content or "" for message in messages)
        said = re.findall(r"(?:^\[\d+\] [^:]*: |^- )(.*)$", text, re.MULTILINE)
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=" ".join(said) or "Nothing."))


class TestSummaryMemoryBlock(BlockContract):
    def make_block(self) -> SummaryMemoryBlock:
        return SummaryMemoryBlock(llm=_Retelling(), absorb_on=frozenset({"turn", "flush", "idle"}))


class _WrittenByHand(BlockContract):
    """What learns nothing from the chat."""

    capabilities = frozenset({"keeps_sessions_apart", "leaves_messages_alone"})


class TestEpisodicMemoryBlock(_WrittenByHand):
    def make_block(self) -> EpisodicMemoryBlock:
        return EpisodicMemoryBlock(embed_model=None)


class TestWorkingMemoryBlock(_WrittenByHand):
    def make_block(self) -> WorkingMemoryBlock:
        return WorkingMemoryBlock()


class TestJournalMemoryBlock(_WrittenByHand):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_block(self) -> JournalMemoryBlock:
        return JournalMemoryBlock(directory=self.folder)


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
