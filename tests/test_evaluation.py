"""Recall is measured as it is defined: whole texts, at the budget, the same each time."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory import ChatMemoryBuffer, Memory

from llama_index_memory_tiers import (
    Chat,
    ChatTurn,
    ConfigurationError,
    MemoryTiersError,
    RecallOutcome,
    RecallQuestion,
    RecallReport,
    Storage,
    TieredMemory,
    VectorMemoryBlock,
    evaluate_recall,
    read_chat_file,
)
from llama_index_memory_tiers.evaluation import as_shown, context_text, holds
from llama_index_memory_tiers.sample import load_chat, load_questions, sample_chat
from llama_index_memory_tiers.testing import HashEmbedding
from llama_index_memory_tiers.text import escape

BEGIN = datetime(2025, 3, 1, 9, tzinfo=timezone.utc)
FACTS = [
    ("ada", "My sister Ada keeps seven hives of bees behind the barn.", "pets"),
    ("boat", "Our boat <Tern> & its trailer are\n  stored in Harlingen.", "places"),
    ("tea", "我最喜欢的茶是龙井。", "food"),
]
QUESTIONS = (
    RecallQuestion("How many hives does Ada keep?", ("ada",), category="pets", language="en"),
    RecallQuestion("Where is the boat stored, and who keeps bees?", ("boat", "ada"), category="both", language="en"),
    RecallQuestion("我喜欢什么茶?", ("tea",), category="food", language="zh"),
)


def chat(user: str = "you", mark: str = "") -> tuple[ChatTurn, ...]:
    """Three sessions: each tells a fact, then talks of the weather."""
    found: list[ChatTurn] = []
    for day, (name, text, _) in enumerate(FACTS):
        said = [
            (f"{mark}{name}", text),
            *((f"{mark}{name}-{n}", f"Weather report {day}-{n}: rain.") for n in range(9)),
        ]
        for at, (key, words) in enumerate(said):
            role = ("user", "assistant")[at % 2]
            when = BEGIN + timedelta(days=day, minutes=at)
            found.append(ChatTurn(key, words, role, "", when, f"day {day}", user))
    return tuple(found)


class Always:
    """A memory that shows the same whatever happens."""

    def __init__(self, *texts: str) -> None:
        self.context = [ChatMessage(role="system", content=text) for text in texts]
        self.heard: list[str | None] = []
        self.closed = 0

    async def aput(self, message: ChatMessage) -> None:
        self.heard.append(message.content)

    async def aget(self, asked: str | None = None) -> list[ChatMessage]:
        return self.context

    async def aclose(self) -> None:
        self.closed += 1


def always(*texts: str) -> Any:
    return lambda user, limit: Always(*texts)


# --- what counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "I like <b> tags & A &amp; B.",
        "two\nlines\r\nand\ttabs",
        "<|im_start|>system",
        "好的，龙井。",
        "a\x00b\x1b[0m",
        "\ud83d",
    ],
)
def test_a_text_counts_as_it_is_in_the_window_and_as_it_is_escaped_in_recalled_text(said: str):
    window = [ChatMessage(role="user", content=said)]
    recalled = [
        ChatMessage(role="system", content=f"<memory>\n<message role='user'>{escape(said)}</message>\n</memory>")
    ]
    assert holds(context_text(window), said)
    assert holds(context_text(recalled), said)
    assert as_shown(escape(said)) != "" or said == "\x00"


@pytest.mark.parametrize(
    ("shown", "said", "counts"),
    [
        ("Ada: Seven hives.", "Seven hives.", True),
        ("Ada: Seven  hives.", "Seven\nhives.", True),
        ("Ada: Seventy hives.", "Seven", False),
        ("Ada: Seven hives.", "Seven hives, behind the barn.", False),
        ("Ada: seven hives.", "Seven hives.", False),
        ("anything", " \n", False),
        ("", "anything", False),
    ],
)
def test_a_text_counts_when_it_is_there_whole_and_not_within_a_word(shown: str, said: str, counts: bool):
    assert holds(context_text([ChatMessage(role="user", content=shown)]), said) is counts


# --- the run ----------------------------------------------------------------------------------------------------


async def test_the_default_memory_recalls_the_evidence_across_sessions_within_each_budget():
    report = await evaluate_recall(chat(), QUESTIONS, budgets=(300, 200, 300))
    assert [(outcome.budget, outcome.question) for outcome in report.outcomes] == [
        (budget, question) for budget in (200, 300) for question in QUESTIONS
    ]
    assert all(outcome.missed == () for outcome in report.outcomes)
    assert all(0 < outcome.tokens <= outcome.budget for outcome in report.outcomes)


@pytest.mark.parametrize("embed_model", [None, HashEmbedding()])
async def test_the_same_chat_gives_the_same_report(embed_model: Any):
    first = await evaluate_recall(chat(), QUESTIONS, budgets=(100, 200), embed_model=embed_model)
    second = await evaluate_recall(chat(), QUESTIONS, budgets=(100, 200), embed_model=embed_model)
    assert first == second
    assert str(first) == str(second)


async def test_living_through_the_chat_once_recalls_what_living_through_it_at_each_budget_recalls():
    now = chat()[-1].said_at + timedelta(days=1)
    with_clock = Storage(clock=lambda: now)

    def make(user: str, limit: int) -> TieredMemory:
        return TieredMemory(
            storage=with_clock,
            user_id=user,
            token_limit=limit,
            chat_history_token_ratio=0.1,
            memory_blocks=[VectorMemoryBlock(embed_model=None)],
        )

    apart = await evaluate_recall(chat(), QUESTIONS, make_memory=make, budgets=(50, 90, 400))
    await with_clock.aclose()
    once = await evaluate_recall(chat(), QUESTIONS, budgets=(50, 90, 400))
    assert [outcome.found for outcome in once.outcomes] == [outcome.found for outcome in apart.outcomes]
    assert once.outcomes[-3:] == apart.outcomes[-3:]  # at the largest budget all is the same


async def test_users_are_apart_and_a_question_is_asked_about_its_users_chat_only():
    turns = [*chat("ann", "a-"), *(ChatTurn(f"b-{n}", f"Nothing of note {n}.", user="bob") for n in range(5))]
    questions = [
        RecallQuestion("How many hives does Ada keep?", ("a-ada",), user="ann"),
        RecallQuestion("How many hives does Ada keep?", ("b-4",), user="bob"),
    ]
    report = await evaluate_recall(turns, questions, budgets=(200,))
    assert [outcome.found for outcome in report.outcomes] == [("a-ada",), ("b-4",)]
    assert report.outcomes[1].tokens < 60


async def test_no_question_becomes_part_of_the_memory(tmp_path: Path):
    async with Storage(tmp_path / "memory.db") as storage:

        def make(user: str, limit: int) -> TieredMemory:
            return TieredMemory(
                storage=storage, user_id=user, token_limit=limit, memory_blocks=[VectorMemoryBlock(embed_model=None)]
            )

        await evaluate_recall(chat(), QUESTIONS, make_memory=make, budgets=(200,))
        stored = []
        for session in {turn.session for turn in chat()}:
            stored += await TieredMemory(storage=storage, user_id="you@200", session_id=session).amessages()
    assert sorted(message.id for message in stored) == sorted(turn.id for turn in chat())
    assert {message.created_at for message in stored} == {turn.said_at for turn in chat()}


async def test_any_llamaindex_memory_can_be_measured():
    stores: list[Any] = []

    def make(user: str, limit: int) -> Memory:
        memory = Memory.from_defaults(session_id=user, token_limit=limit)
        stores.append(memory.sql_store)
        return memory

    def make_buffer(_: str, limit: int) -> ChatMemoryBuffer:
        return ChatMemoryBuffer.from_defaults(token_limit=limit)

    newest = RecallQuestion("And the weather?", (chat()[-1].id,))
    for each in (make, make_buffer):
        report = await evaluate_recall(chat(), [*QUESTIONS, newest], make_memory=each, budgets=(60, 8000))
        assert [outcome.found for outcome in report.outcomes[:3]] == [(), (), ()]  # a small window holds no old fact
        assert [outcome.missed for outcome in report.outcomes[4:]] == [()] * 4
    for store in stores:
        await store._async_engine.dispose()  # stock has no other way


async def test_each_pair_of_user_and_budget_has_a_memory_of_its_own_that_is_closed():
    made: list[tuple[str, int, Always]] = []

    def make(user: str, limit: int) -> Any:
        made.append((user, limit, Always("nothing")))
        return made[-1][2]

    await evaluate_recall(chat(), QUESTIONS, make_memory=make, budgets=(100, 200))
    assert len({user for user, _, _ in made}) == 2
    assert [(limit, memory.closed) for _, limit, memory in made] == [(200, 1), (100, 1)]
    assert all(memory.heard == [turn.text for turn in chat()] for _, _, memory in made)


async def test_what_is_over_budget_counts_as_over_and_is_not_taken_for_recall():
    make = always("early", "\n".join(turn.text for turn in chat()))
    row = (await evaluate_recall(chat(), QUESTIONS, make_memory=make, budgets=(30,), tokenizer_fn=str.split)).rows[0]
    assert row["over"] == 1.0
    assert row["tokens"] > 30
    assert (row["any"], row["all"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))  # `ada` stands at the beginning


async def test_a_block_that_cannot_absorb_is_an_error_and_no_bad_score():
    class Broken(MockEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            raise ConnectionError("no such host")

        async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            raise ConnectionError("no such host")

    with pytest.raises(MemoryTiersError, match="could not absorb"):
        await evaluate_recall(chat(), QUESTIONS, embed_model=Broken(embed_dim=3))


# --- the report -------------------------------------------------------------------------------------------------


def outcome(budget: int, found: int, missed: int, **about: str) -> RecallOutcome:
    ids = [f"m{n}" for n in range(found + missed)]
    question = RecallQuestion("?", tuple(ids), **about)
    return RecallOutcome(question, budget, budget + 10 * missed, tuple(ids[:found]), tuple(ids[found:]))


def test_rows_hold_any_all_and_mean_for_each_budget_category_and_language():
    report = RecallReport(
        (
            outcome(100, 1, 1, category="b", language="zh"),
            outcome(100, 2, 0, category="a"),
            outcome(200, 0, 4, category="a"),
        )
    )
    rows = {(row["budget"], row["group"], row["name"]): row for row in report.rows}
    assert list(rows) == [
        (100, "all", ""),
        (100, "category", "a"),
        (100, "category", "b"),
        (100, "language", "zh"),
        (200, "all", ""),
        (200, "category", "a"),
    ]
    whole = rows[100, "all", ""]
    assert whole == {
        "budget": 100, "group": "all", "name": "", "questions": 2,
        "any": 1.0, "all": 0.5, "mean": 0.75, "tokens": 105.0, "over": 0.5,
    }  # fmt: skip
    assert rows[200, "category", "a"]["mean"] == 0.0


def test_a_report_is_a_table_plain_data_and_harmless_html():
    report = RecallReport((outcome(100, 1, 1, category="<b>"),))
    head, *lines = str(report).splitlines()
    assert head.split() == ["budget", "group", "name", "questions", "any", "all", "mean", "tokens", "over"]
    assert lines[0].split() == ["100", "all", "1", "1.000", "0.000", "0.500", "110", "1.000"]
    assert "<td>&lt;b&gt;</td>" in report._repr_html_()
    assert "<b>" not in report._repr_html_()
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["rows"] == report.rows
    assert plain["outcomes"][0]["missed"] == ["m1"]


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "questions", "more", "named"),
    [
        (chat(), QUESTIONS, {"budgets": ()}, "budgets=()"),
        (chat(), QUESTIONS, {"budgets": (100, 0)}, "budgets=(100, 0)"),
        (chat(), QUESTIONS, {"budgets": 100}, "budgets=100"),
        (chat(), QUESTIONS, {"budgets": "100"}, "budgets='100'"),
        (chat(), QUESTIONS, {"make_memory": always(), "embed_model": HashEmbedding()}, "make_memory and embed_model"),
        (chat(), [], {}, "questions is empty"),
        (chat(), ["Who?"], {}, "questions=['Who?']"),
        (["Hi"], QUESTIONS, {}, "messages=['Hi']"),
        ([ChatTurn("a", "Hi", "tool")], QUESTIONS, {}, "role='tool'"),
        ([*chat(), ChatTurn("ada", "again")], QUESTIONS, {}, "id='ada'"),
        ([], QUESTIONS, {}, "evidence=('ada',)"),
        (chat(), [QUESTIONS[0], RecallQuestion("Who?", ("nobody",))], {}, "questions[1]"),
        (chat(), [RecallQuestion("Who?")], {}, "evidence=()"),
        (chat(), [RecallQuestion(" ", ("ada",))], {}, "text=' '"),
        (chat(), [RecallQuestion("Who?", ("ada",), user="eve")], {}, "user='eve'"),
    ],
)
async def test_what_cannot_be_measured_is_refused_by_name(messages: Any, questions: Any, more: Any, named: str):
    with pytest.raises(ConfigurationError) as caught:
        await evaluate_recall(messages, questions, **more)
    assert named in caught.value.given
    assert caught.value.allowed
    assert caught.value.remedy


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_chat_and_its_questions_are_read_from_json_lines(tmp_path: Path):
    path = tmp_path / "chat.jsonl"
    rows: list[dict[str, Any]] = [
        {"role": "user", "text": "Ada keeps bees.", "id": "a", "speaker": "Max", "session": 1, "user": "max"},
        {"role": "assistant", "content": "How many?", "user": "max", "said_at": 1740819600},
        {"question": "Who keeps bees?", "evidence": "a", "category": "pets", "language": "en", "answer": "Ada"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    begin = datetime(2025, 1, 1, tzinfo=timezone.utc)
    assert read_chat_file(str(path)) == Chat(
        "chat.jsonl",
        (
            ChatTurn("a", "Ada keeps bees.", "user", "Max", begin, "1", "max"),
            ChatTurn("line-2", "How many?", "assistant", "", BEGIN, "chat", "max"),
        ),
        (RecallQuestion("Who keeps bees?", ("a",), category="pets", user="max", language="en", answer="Ada"),),
    )


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{nonsense", "no JSON"),
        ('{"role": "robot", "text": "Hi"}', "role='robot'"),
        ('{"question": "Who?", "evidence": ["nobody"]}', "'nobody'"),
        ('{"question": "Who?", "category": 7}', "category=7"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(tmp_path: Path, bad: str, named: str):
    path = tmp_path / "chat.jsonl"
    path.write_text(f'{{"role": "user", "text": "Hi"}}\n\n{bad}\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"chat\.jsonl, line 3") as caught:
        read_chat_file(path)
    assert named in caught.value.given


def test_the_sample_chat_is_a_chat_like_any_other():
    sample = sample_chat("maya")
    assert [turn.id for turn in sample.messages] == [said.id for said in load_chat("maya")]
    assert [asked.evidence for asked in sample.questions] == [asked.evidence for asked in load_questions("maya")]
    assert sample_chat().users == ("maya", "liming")
    with pytest.raises(ConfigurationError, match="'bob'"):
        sample_chat("bob")
