"""A chat in the terminal, with a memory that lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, TextIO

from llama_index_memory_tiers.blocks import VectorMemoryBlock
from llama_index_memory_tiers.cli.outcome import Outcome, show
from llama_index_memory_tiers.cli.places import Where, unclear
from llama_index_memory_tiers.demo.agents import Clock, make_agent, make_embedding, make_llm, run_agent
from llama_index_memory_tiers.display import harmless
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage

HELP = "/why shows what the last answer was given, /flush absorbs what waits, /quit ends."
_ENDS = frozenset({"/quit", "/exit"})


async def chat(where: Where, llm: str | None, *, as_json: bool) -> Outcome:
    """Talk until the input ends.

    Args:
        where: The storage; `None` in it is a private one that ends with the chat.
        llm: Address of an OpenAI-compatible server; `None` is the model that only quotes.
        as_json: Stay silent, and return all turns at the end.

    Returns:
        The turns.
    """
    user = await _whose(where)
    clock = Clock()
    agent = make_agent(make_llm(llm), clock)
    storage = Storage(where.storage, table_name=where.table_name, db_schema=where.db_schema)
    memory = TieredMemory(
        storage=storage,
        user_id=user,
        session_id=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}" if where.session is None else where.session,
        memory_blocks=[VectorMemoryBlock(embed_model=make_embedding())],
    )
    turns: list[dict[str, Any]] = []
    tell = _silent if as_json else _tell
    try:
        kept = "Nothing is kept after this chat (--storage FILE keeps it)" if storage.private else storage.file
        tell(f"{kept or storage.address}, user {memory.user_id}. {HELP}")
        for line in _lines(sys.stdin, prompt=not as_json):
            if line.startswith("/"):
                await _command(memory, line, turns, tell=tell, as_json=as_json)
                continue
            clock.now = datetime.now(timezone.utc)
            heard = await run_agent(agent, memory, line)
            turns.append({"user": line, "assistant": heard.reply, "tools": list(heard.tools)})
            tell(heard.reply)
        await memory.aflush()
    finally:
        await memory.aclose()
        await storage.aclose()
    return Outcome({"user": memory.user_id, "session": memory.session_id, "turns": turns})


async def _whose(where: Where) -> str:
    """Who talks: who was named, else the only one whom the storage knows, else "me".

    Raises:
        ConfigurationError: The storage knows several.
    """
    if where.user is not None or not where.storage:
        return "me" if where.user is None else where.user
    async with Storage(where.storage, table_name=where.table_name, db_schema=where.db_schema) as storage:
        people = [person.user_id for person in await storage.survey.people() if person.user_id]
    if len(people) > 1:
        raise unclear("--user", people)
    return next(iter(people), "me")


async def _command(
    memory: TieredMemory, line: str, turns: list[dict[str, Any]], *, tell: Callable[[str], None], as_json: bool
) -> None:
    if line == "/why":
        report = await memory.aexplain(turns[-1]["user"] if turns else None)
        if not as_json:
            show(Outcome(None, report), as_json=False)
    elif line == "/flush":
        tell(str(await memory.aflush()))
    else:
        tell(HELP)


def _lines(source: TextIO, *, prompt: bool) -> Iterator[str]:
    """What is typed, without blank lines, until the end of the input or `/quit`."""
    asking = prompt and source.isatty()
    while True:
        if asking:
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = source.readline()
        if not line or line.strip() in _ENDS:
            return
        if line.strip():
            yield line.strip()


def _tell(text: str) -> None:
    sys.stdout.write(f"{harmless(text)}\n")
    sys.stdout.flush()


def _silent(_: str) -> None:
    return
