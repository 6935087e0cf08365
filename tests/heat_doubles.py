"""A model that analyses pages by rule, chats on topics, and what the tests of the heat block look at."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from doubles import Clock, said
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.llms.mock import MockLLM
from pydantic import PrivateAttr

from llama_index_memory_tiers import HeatMemoryBlock, Storage, TieredMemory
from llama_index_memory_tiers.storage import OwnerReader

PURPOSES = {"You index": "pages", "You keep a profile": "profile", "You note": "knowledge"}

TOPICS = {
    "cat": [
        ("My cat Tom was sick last night, what should I do?", "If your cat Tom is still sick tomorrow, call the vet."),
        ("The vet says my cat Tom needs a diet.", "Then give the cat Tom less dry food, and weigh him every week."),
        ("How much should the cat Tom eat after the vet?", "Fifty grams of dry food a day for a cat of five kilos."),
        ("Did the vet say what my cat Tom weighs?", "The vet said that the cat Tom weighs six kilos."),
        ("Is wet food better for the cat Tom?", "The vet prefers wet food for a cat on a diet."),
    ],
    "train": [
        ("I want to book a train to Berlin.", "There is a train to Berlin at nine in the morning."),
        ("Is there also a night train to Berlin?", "The night train leaves at eleven and is in Berlin at seven."),
        ("Please book a seat on the night train to Berlin.", "I booked a seat on the night train to Berlin."),
        ("What does the train ticket to Berlin cost?", "The ticket for the night train to Berlin is 80 euros."),
        ("Can I take a bicycle on the train to Berlin?", "Yes, book a bicycle ticket for the train to Berlin."),
    ],
    "soup": [
        ("Give me a recipe for lentil soup.", "Cook lentils with carrots for thirty minutes, then season the soup."),
        ("How long do lentils have to cook in the soup?", "Red lentils cook in fifteen minutes in the soup."),
        ("Can I freeze the lentil soup?", "Yes, the lentil soup keeps three months in the freezer."),
        ("Which spices go into the lentil soup?", "Cumin and vinegar go well with the lentil soup."),
        ("Is lentil soup good with red lentils?", "Red lentils make a smooth lentil soup."),
    ],
}


def answer(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False)


class Analyst(MockLLM):
    """Answers each of the three prompts by rule; a test puts other answers, errors or waits in their place."""

    _rules: dict[str, Any] = PrivateAttr(default_factory=dict)
    _calls: list[tuple[str, str]] = PrivateAttr(default_factory=list)

    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self._rules = rules

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="analyst")

    @property
    def purposes(self) -> list[str]:
        return [purpose for purpose, _ in self._calls]

    def prompts(self, purpose: str) -> list[str]:
        return [prompt for wanted, prompt in self._calls if wanted == purpose]

    def rule(self, purpose: str, value: Any) -> None:
        self._rules[purpose] = value

    async def achat(self, messages: Any, **_: Any) -> ChatResponse:
        prompt = "\n".join(message.content or "" for message in messages)
        purpose = next(name for words, name in PURPOSES.items() if words in prompt)
        self._calls.append((purpose, prompt))
        given = self._rules.get(purpose, getattr(self, f"_{purpose}"))
        if callable(given):
            given = given(prompt)
        if isinstance(given, Awaitable):
            given = await given
        await asyncio.sleep(0)
        if isinstance(given, BaseException):
            raise given
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=given))

    def _pages(self, prompt: str) -> str:
        lines = []
        pages = re.findall(r'<page number="(\d+)">(.*?)</page>', prompt, re.DOTALL)
        for number, text in pages:
            topic = next((name for name in TOPICS if name in text.casefold()), "other")
            words = [topic, *sorted({"vet", "diet", "berlin", "lentil"} & set(re.findall(r"\w+", text.casefold())))]
            lines.append(answer(page=int(number), topic=topic, keywords=words, continues=number != "1", summary=topic))
        return "\n".join(lines)

    def _profile(self, prompt: str) -> str:
        return answer(profile=[f"Speaks of {name}." for name in TOPICS if name in prompt.casefold()] or ["Speaks."])

    def _knowledge(self, prompt: str) -> str:
        return "[]"


def note(text: str, **fields: Any) -> str:
    return answer(**{"about": "user", "fact": text, "pages": [1], **fields})


Make = Callable[..., TieredMemory]


def memory(
    storage: Storage, block: HeatMemoryBlock, user: str | None = "ann", session: str = "s", **more: Any
) -> TieredMemory:
    return TieredMemory(
        storage=storage, user_id=user, session_id=session, memory_blocks=[block], delivery="inline", **more
    )


def block(llm: Any = None, **fields: Any) -> HeatMemoryBlock:
    return HeatMemoryBlock(llm=llm, embed_model=fields.pop("embed_model", None), **fields)


async def talk(of: TieredMemory, *pairs: tuple[str, str]) -> None:
    for asked, answered in pairs:
        await of.aput_messages([said("user", asked), said("assistant", answered)])


def reader(storage: Storage, user: str = "ann", key: str = "HeatMemory") -> OwnerReader:
    return OwnerReader(storage.records, f"u:{user}", key)


async def titles(storage: Storage, user: str = "ann") -> dict[str, int]:
    """Segments with the number of their pages."""
    return {record.data["title"]: record.data["pages"] for record in await reader(storage, user).light("segment")}


__all__ = ["TOPICS", "Analyst", "Clock", "answer", "block", "memory", "note", "reader", "said", "talk", "titles"]
