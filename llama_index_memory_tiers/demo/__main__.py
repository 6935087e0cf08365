"""The demo's order of acts: `python -m llama_index_memory_tiers.demo`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llama_index_memory_tiers.chats import Chat, RecallQuestion
from llama_index_memory_tiers.demo.agents import Heard, make_embedding, make_llm, shown_address
from llama_index_memory_tiers.demo.chats import language_of, read_chat, spread
from llama_index_memory_tiers.demo.contenders import (
    TOKEN_LIMIT,
    WINDOW_RATIO,
    Contender,
    NoMemory,
    Ours,
    Score,
    Stock,
    answered,
    live_part,
    plain,
    score,
    shown,
)
from llama_index_memory_tiers.demo.crash import MESSAGES, crash, put_until_killed
from llama_index_memory_tiers.errors import MemoryTiersError
from llama_index_memory_tiers.sample import sample_chat
from llama_index_memory_tiers.testing import HashEmbedding

PARTS = 2
QUESTIONS = 40
QUESTIONS_WITH_LLM = 5
# How far ahead in evidence, 0 to 1; measured: 0.49 in English, 0.75 in Chinese on all questions of the sample.
CLEARLY = 0.15
_SHORT = 12
_BEST = 3
_LANGUAGES = {"en": "English", "zh": "Chinese"}


def say(text: str = "") -> None:
    """Write a line to the terminal, now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Promise:
    """What this act has to prove.

    Args:
        text: The promise.
        kept: Whether it was.
    """

    text: str
    kept: bool


@dataclass(slots=True)
class Stage:
    """What the acts share.

    Args:
        chat: Lived through.
        options: From the command line.
        folder: For databases.
        ours: The agent with our memory.
        heard: What it answered.
    """

    chat: Chat
    options: argparse.Namespace
    folder: Path
    ours: Ours | None = None
    heard: list[tuple[RecallQuestion, Heard]] = field(default_factory=list)

    @property
    def database(self) -> Path:
        """Where our memory is."""
        return self.folder / "memory.db"

    @property
    def whole(self) -> bool:
        """Whether this is the sample chat, for which the scores are a promise."""
        return self.options.chat is None

    def example(self) -> RecallQuestion | None:
        """A question that our agent answered in the expected words, if there is one; the longest answer tells most."""
        told = [question for question, run in self.heard if answered(run.reply, question.answer, ())]
        first = next((question for question, _ in self.heard), None)
        return max(told, key=lambda question: len(question.answer), default=first)


Act = Callable[[Stage], Awaitable[list[Promise]]]


# --- 1. live ----------------------------------------------------------------------------------------------------


async def act_live(stage: Stage) -> list[Promise]:
    """Live through the chat in two processes over one SQLite file."""
    chat = stage.chat
    count = sum(len(chat.sessions(user)) for user in chat.users)
    say(f"1. Live. {', '.join(chat.users)}: {len(chat.messages)} messages in {count} sessions, from {chat.name}.")
    say(f"   Token limit {TOKEN_LIMIT}, window {TOKEN_LIMIT * WINDOW_RATIO:.0f}; one SQLite file.")
    told: list[dict[str, Any]] = []
    for part in range(PARTS):
        lived = await _child(stage.options, "--act", "live", "--part", str(part), "--database", str(stage.database))
        told.append(lived)
        say(
            f"   process {lived['pid']}: {lived['sessions']} sessions, {lived['messages']} messages; "
            f"the window was full {lived['flushes']} times, {lived['left']} old messages left it; "
            f"tools run: {', '.join(lived['tools']) or 'none'}"
        )
    agent = Ours(stage.database, make_llm(stage.options.llm), make_embedding()).at(chat)
    waiting = await agent.catch_up(chat)
    missing = await agent.missing(chat)
    await agent.aclose()
    say(f"   process {os.getpid()}: takes up {waiting} messages that they had left unabsorbed")
    promises = [Promise("every message is in the log, once and in order", missing == 0)]
    if stage.whole:
        promises.append(Promise("old turns leave the window", all(lived["flushes"] for lived in told)))
        tools = {tool for lived in told for tool in lived["tools"]}
        promises.append(Promise("both tools were really called", tools == {"calculate", "time_in"}))
    return promises


async def _child(options: argparse.Namespace, *arguments: str) -> dict[str, Any]:
    passed = [*(("--chat", options.chat) if options.chat else ()), *(("--llm", options.llm) if options.llm else ())]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llama_index_memory_tiers.demo",
        *arguments,
        *passed,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"The process of {' '.join(arguments[:4])} ended with {child.returncode}.")
    found: dict[str, Any] = json.loads(out)
    return found


# --- 2. questions -----------------------------------------------------------------------------------------------


async def act_questions(stage: Stage) -> list[Promise]:
    """Ask three agents the same questions."""
    questions = spread(stage.chat.questions, stage.options.questions)
    say(f"\n2. Ask {len(questions)} questions: same model, same token limit; ours in a third process and new sessions.")
    llm = make_llm(stage.options.llm)
    embed_model = make_embedding()
    if embed_model is None:
        say("   wordllama is not installed: ours recalls by words alone, stock embeds by hashed words.")
    contenders: list[Contender] = [NoMemory(llm)]
    if Stock.installed():
        stock = Stock(llm, embed_model or HashEmbedding())
        await stock.live(stage.chat)
        contenders.append(stock)
        say("   Stock Memory keeps its static and vector blocks (Qdrant) in one process all along: to its advantage.")
    else:
        say("   llama-index-vector-stores-qdrant is not installed: stock Memory is left out.")
    stage.ours = Ours(stage.database, llm, embed_model, learning=False).at(stage.chat)
    contenders.append(stage.ours)
    heard = {each.name: [(question, await each.ask(question)) for question in questions] for each in contenders}
    for each in contenders:
        if each is not stage.ours:
            await each.aclose()
    stage.heard = heard[stage.ours.name]
    if not questions:
        say('   The chat has no questions. A line such as {"question": "…", "answer": "…"} asks one.')
        return []
    return _compared(stage, heard)


def _compared(stage: Stage, heard: dict[str, list[tuple[RecallQuestion, Heard]]]) -> list[Promise]:
    ours = Ours.name
    promises: list[Promise] = []
    say(f"\n   {'':22}{'evidence in context':>20}{'answered right':>16}{'over the limit':>16}")
    for language in dict.fromkeys(language_of(question) for question, _ in stage.heard):
        scores = {
            name: score(stage.chat, [run for run in runs if language_of(run[0]) == language])
            for name, runs in heard.items()
        }
        for name, found in scores.items():
            label = f"{_LANGUAGES[language]:9}{name}"
            say(f"   {label:22}{found.evidence:>20.0%}{found.right:>16.0%}{f'{found.over} of {found.asked}':>16}")
        promises += _won(scores, language) if stage.whole else []
        promises.append(Promise(f"{_LANGUAGES[language]}: no context of ours over the limit", not scores[ours].over))
    say("   Evidence: the share of the messages needed for an answer that the model was given.")
    if stage.options.llm is None:
        say(
            "   This model, which needs no key, only quotes one message of its context: often not the one that answers."
        )
    return promises


def _won(scores: dict[str, Score], language: str) -> list[Promise]:
    """Evidence is the memory's own work, so the margin is asked of it; the reply is also the model's."""
    ours = scores[Ours.name]
    others = [found for name, found in scores.items() if name != Ours.name]
    ahead = all(ours.evidence - other.evidence >= CLEARLY for other in others)
    right = all(ours.right > other.right for other in others)
    points = f"{_LANGUAGES[language]}: ours shows at least {CLEARLY * 100:.0f} points more of the evidence"
    promises = [Promise(points, ahead)]
    if ours.asked >= QUESTIONS:  # among ten, one lucky quote decides
        promises.append(Promise(f"{_LANGUAGES[language]}: ours gives more right answers", right))
    return promises


# --- 3. kill ----------------------------------------------------------------------------------------------------


async def act_kill(stage: Stage) -> list[Promise]:
    """Kill a process in mid-delivery."""
    say("\n3. Kill -9 a process while its block is being fed, start again, flush.")
    found = await crash(stage.folder, after=stage.options.puts)
    say(f"   acknowledged {found.acknowledged}, of which {found.waiting} had not reached the vector block")
    say(f"   log:          found {found.found}, doubled {found.doubled}")
    say(f"   vector block: found {found.recalled}, doubled {found.recalled_twice}")
    return [
        Promise(f"the process was killed at work (exit code {found.exit_code})", found.waiting > 0),
        Promise("0 lost", found.lost == 0),
        Promise("0 doubled", found.twice == 0),
    ]


# --- 4. another user --------------------------------------------------------------------------------------------


async def act_stranger(stage: Stage) -> list[Promise]:
    """Ask the same question as another user."""
    asked = stage.example()
    if asked is None or stage.ours is None:
        return []
    run = await stage.ours.ask(RecallQuestion(asked.text, user="a stranger"))
    text = shown(run.context).replace(plain(asked.text), "")
    leaked = [line for line in stage.chat.messages if len(line.text) >= _SHORT and plain(line.text) in text]
    say(f"\n4. Another user asks: {asked.text}\n   Answer: {run.reply}")
    return [Promise("nothing of anybody else's is in a stranger's context", not leaked)]


# --- 5. explain -------------------------------------------------------------------------------------------------


async def act_explain(stage: Stage) -> list[Promise]:
    """Show where one answer comes from."""
    asked = stage.example()
    if asked is None or stage.ours is None:
        return []
    reply = next(run.reply for question, run in stage.heard if question is asked)
    report = await stage.ours.explain(asked)
    say(f"\n5. {asked.user} asked: {asked.text}\n   Answer: {reply}")
    say("   " + str(report).replace("\n", "\n   "))
    say("   The best, and what made their scores: bm25 same words, dense like meaning, session the talk around it.")
    items = sorted((item for part in report.parts for item in part.kept), key=lambda item: -item.score)
    for item in items[:_BEST]:
        legs = ", ".join(f"{leg} {value:.2f}" for leg, value in item.legs.items())
        say(f"   {item.score:6.2f}  {_cut(item.text)}  [{legs}]")
    return [Promise("what was recalled is explained", bool(items))]


def _cut(text: str, length: int = 72) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


# --- all of it --------------------------------------------------------------------------------------------------

ACTS: tuple[Act, ...] = (act_live, act_questions, act_kill, act_stranger, act_explain)


async def play(stage: Stage, acts: Sequence[Act] = ACTS) -> int:
    """Play the acts and check their promises.

    Args:
        stage: What they share.
        acts: In order.

    Returns:
        0 when all promises were kept, else 1.
    """
    begin = time.monotonic()
    broken = kept = 0
    try:
        for act in acts:
            for promise in await act(stage):
                say(f"   {'ok    ' if promise.kept else 'BROKEN'} {promise.text}")
                kept += promise.kept
                broken += not promise.kept
    finally:
        if stage.ours is not None:
            await stage.ours.aclose()
    say(f"\n{kept} promises kept, {broken} broken, in {time.monotonic() - begin:.0f} s.")
    return 1 if broken else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llama_index_memory_tiers.demo", description=__doc__)
    parser.add_argument("--chat", help="your own chat: JSON Lines, or ChatGPT's conversations.json")
    parser.add_argument("--llm", help="an OpenAI-compatible server: http://localhost:8000/v1#model-name")
    parser.add_argument("--questions", type=int, help="at most so many per language")
    parser.add_argument("--puts", type=int, default=MESSAGES, help="acknowledged puts before the kill")
    parser.add_argument("--act", choices=("live", "put"), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--database", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.questions is None:
        options.questions = QUESTIONS if options.llm is None else QUESTIONS_WITH_LLM
    if options.questions < 1 or options.puts < 1:
        parser.error("--questions and --puts are whole numbers from 1")
    return options


async def run(options: argparse.Namespace) -> int:
    """Play the demo, or the part of a child process.

    Args:
        options: From the command line.

    Returns:
        The exit code.
    """
    if options.act == "put":
        await put_until_killed(options.database)
        return 0
    chat = read_chat(Path(options.chat)) if options.chat is not None else sample_chat()
    llm = make_llm(options.llm)
    if options.act == "live":
        lived = await live_part(chat, options.database, llm, part=options.part, parts=PARTS)
        say(json.dumps({"pid": os.getpid(), **asdict(lived)}))
        return 0
    say(f"Model: {'one that only quotes its context' if options.llm is None else shown_address(options.llm)}\n")
    with tempfile.TemporaryDirectory(prefix="memory-tiers-demo-") as folder:
        return await play(Stage(chat, options, Path(folder)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the demo.

    Args:
        arguments: Of the command line; default those of this process.

    Returns:
        0 when all promises were kept, 1 when one was broken, 2 when it could not begin.
    """
    try:
        return asyncio.run(run(_options(arguments)))
    except MemoryTiersError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
