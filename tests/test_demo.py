"""The demo reads the chats it promises to read, scores fairly, and fails when a promise is broken."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.chats import Chat, ChatTurn, RecallQuestion
from llama_index_memory_tiers.demo import __main__ as demo
from llama_index_memory_tiers.demo.agents import (
    Heard,
    calculate,
    make_llm,
    place_time,
    put_lines,
    shown_address,
    wants_tool,
)
from llama_index_memory_tiers.demo.chats import language_of, read_chat, spread
from llama_index_memory_tiers.demo.contenders import TOKEN_LIMIT, Ours, answered, evidence_share, live_part, score
from llama_index_memory_tiers.demo.crash import Crash, crash
from llama_index_memory_tiers.errors import ConfigurationError, MissingExtraError
from llama_index_memory_tiers.sample import sample_chat
from llama_index_memory_tiers.testing import HashEmbedding, QuotingLLM

WHEN = datetime(2025, 3, 1, 9, tzinfo=timezone.utc)
LINES = [
    {"role": "user", "text": "My sister Ada keeps bees.", "id": "a", "session": "one"},
    {"role": "assistant", "text": "How many hives?", "id": "b", "session": "one"},
    {"role": "user", "text": "Seven hives, behind the barn.", "id": "c", "session": "one"},
    {"role": "assistant", "text": "Noted.", "id": "d", "session": "one"},
    {"role": "user", "text": "What is 6 * 7?", "id": "e", "session": "two"},
    {"role": "assistant", "text": "42.", "id": "f", "session": "two"},
    {"question": "How many hives stand behind the barn?", "answer": "seven hives", "evidence": ["c"]},
]


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def line(text: str, *, role: str = "user", name: str = "x", user: str = "you", session: str = "chat") -> ChatTurn:
    return ChatTurn(name, text, role, "", WHEN, session, user)


def context(*texts: str) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=MessageRole.SYSTEM, content=text) for text in texts)


# --- JSON Lines -------------------------------------------------------------------------------------------------


def test_json_lines_give_messages_in_order_and_questions_with_their_evidence(tmp_path):
    chat = read_chat(write(tmp_path / "chat.jsonl", LINES))
    assert [message.text for message in chat.messages] == [row["text"] for row in LINES if "text" in row]
    assert [[said.id for said in session] for session in chat.sessions("you")] == [["a", "b", "c", "d"], ["e", "f"]]
    assert chat.questions == (RecallQuestion("How many hives stand behind the barn?", ("c",), answer="seven hives"),)
    assert chat.texts(chat.questions[0].evidence) == ["Seven hives, behind the barn."]


def test_what_is_left_out_of_a_line_gets_a_default(tmp_path):
    chat = read_chat(
        write(
            tmp_path / "chat.jsonl", [{"role": "user", "content": "Hi"}, "", {"role": "assistant", "content": "Hello"}]
        )
    )
    first, second = chat.messages
    assert (first.id, first.user, first.session, first.speaker) == ("line-1", "you", "chat", "")
    assert second.id == "line-3"
    assert first.said_at < second.said_at


@pytest.mark.parametrize(
    "said_at", ["2025-03-01T09:00:00Z", "2025-03-01T09:00:00", "2025-03-01T10:00:00+01:00", 1740819600]
)
def test_times_are_read_as_iso_or_seconds_and_become_aware(tmp_path, said_at):
    row = {"role": "user", "text": "Hi", "said_at": said_at}
    assert read_chat(write(tmp_path / "chat.jsonl", [row])).messages[0].said_at == WHEN


def test_a_line_separator_inside_a_text_and_a_byte_order_mark_break_nothing(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "\ufeff" + json.dumps({"role": "user", "text": "one\u2028two"}, ensure_ascii=False), encoding="utf-8"
    )
    assert read_chat(path).messages[0].text == "one\u2028two"


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{nonsense", "no JSON"),
        ("[1, 2]", "list"),
        ({"text": "Hi"}, "role is missing"),
        ({"role": "tool", "text": "Hi"}, "role='tool'"),
        ({"role": "user"}, "text or content is missing"),
        ({"role": "user", "text": " "}, "text=' '"),
        ({"role": "user", "text": 7}, "text=7"),
        ({"role": "user", "text": "Hi", "said_at": "soon"}, "said_at='soon'"),
        ({"role": "user", "text": "Hi", "said_at": 10**30}, "said_at="),
        ({"role": "user", "text": "Hi", "id": "a"}, "id='a' was used before"),
        ({"question": "Who?", "evidence": ["nobody"]}, "'nobody'"),
        ({"question": "Who?", "evidence": [["a"]]}, "evidence names"),
        ({"question": "Who?", "evidence": 7}, "evidence=7"),
        ({"question": "Who?", "user": "eve"}, "user='eve'"),
        ({"question": ""}, "question=''"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_what_is_wrong(tmp_path, bad, named):
    path = write(tmp_path / "chat.jsonl", [{"role": "user", "text": "Hi", "id": "a"}, bad])
    with pytest.raises(ConfigurationError, match="line 2") as refused:
        read_chat(path)
    assert named in str(refused.value)


def test_a_file_that_is_missing_empty_or_no_text_is_refused_by_name(tmp_path):
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.jsonl", write(tmp_path / "empty.jsonl", []), tmp_path, binary):
        with pytest.raises(ConfigurationError, match=path.name):
            read_chat(path)


def test_a_chat_without_questions_is_asked_its_own_again(tmp_path):
    rows = [
        {"role": "user", "text": "Where do gannets nest?", "id": "a"},
        {"role": "assistant", "text": "On cliffs.", "id": "b"},
        {"role": "user", "text": "Thanks.", "id": "c"},
    ]
    assert read_chat(write(tmp_path / "chat.jsonl", rows)).questions == (
        RecallQuestion("Where do gannets nest?", ("b",)),
    )


# --- ChatGPT's export -------------------------------------------------------------------------------------------


def node(parent: str | None, children: Sequence[str], role: str = "", text: Any = "", **more: Any) -> dict[str, Any]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}, **more} if role else None
    return {"message": message, "parent": parent, "children": list(children)}


def conversation(title: str, create_time: float, **more: Any) -> dict[str, Any]:
    mapping = {
        "root": node(None, ["s"]),
        "s": node("root", ["old", "new"], "system", "be nice"),
        "old": node("s", [], "user", "first try", create_time=1.0),
        "new": node("s", ["image"], "user", f"hello from {title}", create_time=create_time),
        "image": node("new", ["t"], "user", {"asset_pointer": "file"}),
        "t": node("image", ["h"], "tool", "a result"),
        "h": node("t", ["a"], "assistant", "hidden", metadata={"is_visually_hidden_from_conversation": True}),
        "a": node("h", [], "assistant", "welcome"),
    }
    return {"title": title, "create_time": create_time, "mapping": mapping, **more}


def test_an_export_gives_the_newest_branch_of_each_conversation_oldest_first(tmp_path):
    export = [conversation("late", 2e9), conversation("early", 1e9, current_node="a")]
    chat = read_chat(write(tmp_path / "conversations.json", [json.dumps(export, indent=1)]))
    assert [[said.text for said in session] for session in chat.sessions("you")] == [
        ["hello from early", "welcome"],
        ["hello from late", "welcome"],
    ]
    assert [said.role for said in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[0].said_at == datetime.fromtimestamp(1e9, timezone.utc)
    assert len({said.id for said in chat.messages}) == 4


def test_an_edited_message_that_is_current_wins_over_a_later_branch(tmp_path):
    export = [conversation("edited", 1e9, current_node="old")]
    chat = read_chat(write(tmp_path / "conversations.json", [json.dumps(export)]))
    assert [said.text for said in chat.messages] == ["first try"]


def test_a_circle_in_an_export_ends(tmp_path):
    mapping = {"a": node("b", ["b"], "user", "one"), "b": node("a", ["a"], "assistant", "two")}
    export = [{"title": "circle", "mapping": mapping, "current_node": "b"}]
    chat = read_chat(write(tmp_path / "conversations.json", [json.dumps(export)]))
    assert [said.text for said in chat.messages] == ["one", "two"]


def test_a_list_that_is_no_export_is_refused_by_the_conversation(tmp_path):
    export = [conversation("fine", 1e9), {"title": "without messages"}]
    with pytest.raises(ConfigurationError, match="conversation 2"):
        read_chat(write(tmp_path / "conversations.json", [json.dumps(export, indent=1)]))


# --- the sample and its tools -----------------------------------------------------------------------------------


def test_a_choice_of_questions_is_fixed_spread_and_bounded_in_each_language():
    questions = sample_chat().questions
    chosen = spread(questions, 10)
    assert chosen == spread(questions, 10)
    assert [language_of(question) for question in chosen] == ["en"] * 10 + ["zh"] * 10
    english = [question for question in questions if language_of(question) == "en"]
    assert english.index(chosen[9]) > len(english) * 0.8
    assert spread(questions, 1000) == list(questions)
    assert spread([], 10) == []


def test_five_turns_of_the_sample_ask_for_a_tool():
    assert [said.id for said in sample_chat().messages if wants_tool(said)] == [
        "maya-01-021",
        "maya-05-015",
        "maya-09-011",
        "liming-01-027",
        "liming-06-019",
    ]


def test_all_is_put_but_what_the_agent_is_asked_and_answers_itself():
    lines = [
        line("Hi", name="1"),
        line("What is 2 * 3?", name="2"),
        line("Six.", role="assistant", name="3"),
        line("Six, you say.", role="assistant", name="4"),
    ]
    assert [said.id for said in put_lines(lines)] == ["1", "4"]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("17 * 23", "17 * 23 = 391"), ("2 + 3 * -4", "2 + 3 * -4 = -10"), ("7 / 2", "7 / 2 = 3.5")],
)
def test_the_calculator_calculates(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["1 / 0", "9 ** 9", "__import__('os')", "2 *", "True + 1", "'a' * 3"])
def test_the_calculator_says_so_when_it_is_given_anything_else(expression):
    assert calculate(expression).startswith("No result")


@pytest.mark.parametrize(
    ("now", "place", "there"),
    [
        ("2025-03-16T10:24:00+00:00", "Lisbon", "10:24"),
        ("2025-07-20T15:45:00+00:00", "oslo", "17:45"),
        ("2025-01-20T15:45:00+00:00", "奥斯陆", "16:45"),
        ("2025-03-30T00:59:00+00:00", "Oslo", "01:59"),
        ("2025-03-30T01:00:00+00:00", "Oslo", "03:00"),
        ("2025-10-26T01:00:00+00:00", "Oslo", "02:00"),
        ("2025-07-20T15:45:00+00:00", "杭州", "23:45"),
    ],
)
def test_the_clock_knows_summer_time(now, place, there):
    found = place_time(datetime.fromisoformat(now))(place)
    assert found is not None
    assert f"{found:%H:%M}" == there


def test_the_clock_does_not_guess():
    assert place_time(WHEN)("Atlantis") is None


# --- the model --------------------------------------------------------------------------------------------------


def test_without_an_address_the_model_needs_no_key():
    assert isinstance(make_llm(None), QuotingLLM)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://", "gpt"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigurationError, match="--llm="):
        make_llm(address)


def test_a_missing_client_is_named_and_no_secret_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_index.llms.openai_like", None)
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    with pytest.raises(MissingExtraError, match="llama-index-llms-openai-like") as refused:
        make_llm("http://me:pass-word@host:8000/v1?key=a-secret-key#small")
    assert "pass-word" not in str(refused.value)
    assert "a-secret-key" not in str(refused.value)


def test_an_address_gives_its_model_and_the_key_comes_from_the_environment(monkeypatch):
    client = ModuleType("openai_like")
    client.OpenAILike = lambda **given: given  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "llama_index.llms.openai_like", client)
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    given: Any = make_llm("http://host:8000/v1#small")
    assert (given["model"], given["api_base"], given["api_key"]) == ("small", "http://host:8000/v1", "a-secret-key")
    assert given["is_function_calling_model"]


def test_an_address_is_shown_without_its_secrets():
    assert shown_address("https://me:pass@host:8000/v1?key=k#small") == "https://host:8000/v1#small"


# --- scoring ----------------------------------------------------------------------------------------------------


def test_evidence_counts_when_its_whole_text_is_shown_whatever_was_escaped_or_folded():
    shown = context("<memory>\nAda: I like &lt;b> tags\n  and A &amp;amp; B.\n</memory>", "Something else")
    assert evidence_share(shown, ["I like <b> tags and A &amp; B."]) == 1.0
    assert evidence_share(shown, ["I like <b> tags and A &amp; B.", "Never said."]) == 0.5
    assert evidence_share(shown, ["I like <b> tags and A &amp; B, and C."]) == 0.0
    assert evidence_share((), ["Never said."]) == 0.0
    assert evidence_share(shown, ["!"]) == 0.0
    assert evidence_share(context("As it is: <b> &amp; c"), ["<b> &amp; c"]) == 1.0
    assert evidence_share(shown, []) == 0.0


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("She has Seven hives.", "seven hives", True),
        ("It was 1391 euros", "391", False),
        ("It was 391 euros", "391", True),
        ("I don't know.", "no", False),
        ("班主任姓叶。", "叶", True),
        ("I don't know.", "", False),
        ("Ada said: Bees sting! (1 March 2025)", "ouch", True),
    ],
)
def test_a_reply_is_right_when_it_holds_the_answer_as_words_or_the_evidence(reply, answer, right):
    assert answered(reply, answer, ["Bees sting."]) is right


def test_a_score_counts_evidence_right_answers_and_contexts_over_the_limit():
    chat = Chat("chat", (line("Seven hives.", name="c"),), ())
    question = RecallQuestion("How many?", ("c",), answer="seven")
    runs = [
        (question, Heard(context("Seven hives."), "Seven hives.")),
        (question, Heard(context("word " * (TOKEN_LIMIT + 10)), "I don't know.")),
    ]
    found = score(chat, runs)
    assert (found.asked, found.evidence, found.right, found.over) == (2, 0.5, 0.5, 1)
    assert score(chat, []).asked == 0


# --- our agent --------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return read_chat(write(tmp_path / "chat.jsonl", LINES))


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # LlamaIndex's workflows
@pytest.mark.filterwarnings("ignore:is_running called from within a step")  # LlamaIndex's own loop asks that
async def test_two_parts_over_one_file_make_one_life_and_a_new_session_remembers_it(chat, tmp_path):
    database = tmp_path / "memory.db"
    parts = [await live_part(chat, database, QuotingLLM(), part=part, parts=2) for part in (0, 1)]
    assert [(part.sessions, part.messages, part.tools) for part in parts] == [(1, 4, ()), (1, 2, ("calculate",))]
    agent = Ours(database, QuotingLLM(), HashEmbedding()).at(chat)
    await agent.catch_up(chat)
    assert await agent.missing(chat) == 0
    heard = await agent.ask(chat.questions[0])
    assert evidence_share(heard.context, ["Seven hives, behind the barn."]) == 1.0
    assert answered(heard.reply, "seven hives", [])
    stranger = await agent.ask(RecallQuestion(chat.questions[0].text, user="eve"))
    assert stranger.reply == "I don't know."
    lost = Chat("lost", (*chat.messages, line("Never put.", name="z", session="one")), ())
    assert await agent.missing(lost) == 1
    await agent.aclose()


# --- promises ---------------------------------------------------------------------------------------------------


def stage(chat: Chat, tmp_path: Path, **options: Any) -> demo.Stage:
    given = {"chat": None, "llm": None, "questions": 5, "puts": 5, **options}
    return demo.Stage(chat, argparse.Namespace(**given), tmp_path)


async def test_the_exit_code_is_0_when_all_promises_are_kept_and_1_when_one_is_broken(chat, tmp_path, capsys):
    async def act(_: demo.Stage, *kept: bool) -> list[demo.Promise]:
        return [demo.Promise(f"number {at}", each) for at, each in enumerate(kept)]

    async def good(stage: demo.Stage) -> list[demo.Promise]:
        return await act(stage, True, True)

    async def bad(stage: demo.Stage) -> list[demo.Promise]:
        return await act(stage, True, False)

    assert await demo.play(stage(chat, tmp_path), [good]) == 0
    assert await demo.play(stage(chat, tmp_path), [good, bad]) == 1
    assert "BROKEN number 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault", [{"found": 8}, {"recalled": 8}, {"doubled": 1}, {"recalled_twice": 1}, {"waiting": 0}]
)
async def test_the_kill_fails_the_demo_when_anything_is_lost_or_doubled(chat, tmp_path, monkeypatch, fault):
    whole = {
        "acknowledged": 9,
        "waiting": 3,
        "found": 9,
        "doubled": 0,
        "recalled": 9,
        "recalled_twice": 0,
        "exit_code": -9,
    }

    async def stub(*_: Any, **__: Any) -> Crash:
        return Crash(**whole)

    monkeypatch.setattr(demo, "crash", stub)
    assert await demo.play(stage(chat, tmp_path), [demo.act_kill]) == 0
    whole.update(fault)
    assert await demo.play(stage(chat, tmp_path), [demo.act_kill]) == 1


class Leaking:
    """Shows everybody the same."""

    async def ask(self, question: RecallQuestion) -> Heard:
        return Heard(context(f"Ada: Seven hives, behind the barn.\n{question.text}"), "Seven hives.")

    async def aclose(self) -> None:
        """Nothing is open."""


async def test_a_leak_to_a_stranger_fails_the_demo(chat, tmp_path):
    given = stage(chat, tmp_path)
    given.ours = Leaking()  # type: ignore[assignment]  # a stand-in
    given.heard = [(chat.questions[0], Heard((), "Seven hives."))]
    assert await demo.play(given, [demo.act_stranger]) == 1


def test_being_behind_or_over_the_limit_fails_the_demo(chat, tmp_path):
    question = chat.questions[0]
    knows = (question, Heard(context("Seven hives, behind the barn."), "Seven hives."))
    knows_not = (question, Heard((), "I don't know."))
    too_long = (question, Heard(context("word " * (TOKEN_LIMIT + 10)), "I don't know."))

    def kept(ours: Any, other: Any, asked: int = demo.QUESTIONS) -> list[bool]:
        given = stage(chat, tmp_path)
        given.heard = [ours] * asked
        runs = {"no memory": [other] * asked, Ours.name: given.heard}
        return [promise.kept for promise in demo._compared(given, runs)]

    assert kept(knows, knows_not) == [True, True, True]
    assert kept(knows, knows) == [False, False, True]
    assert kept(knows_not, knows) == [False, False, True]
    assert kept(too_long, knows_not) == [False, False, False]
    assert kept(knows, knows, asked=10) == [False, True]  # ten are too few to judge replies by


async def test_a_killed_process_loses_and_doubles_nothing(tmp_path):
    found = await crash(tmp_path, after=6)
    assert found.acknowledged >= 6
    assert found.waiting > 0
    assert (found.lost, found.twice) == (0, 0)


def test_a_bad_chat_ends_with_2_and_says_what_to_do(tmp_path, capsys):
    path = write(tmp_path / "chat.jsonl", ["nonsense"])
    assert demo.main(["--chat", str(path)]) == 2
    told = capsys.readouterr()
    assert "line 1" in told.err
    assert told.out == ""


def test_the_whole_demo_plays_with_somebodys_own_chat(tmp_path):
    path = write(tmp_path / "chat.jsonl", LINES)
    command = [sys.executable, "-m", "llama_index_memory_tiers.demo", "--chat", str(path), "--puts", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "0 broken" in done.stdout
    for act in "12345":
        assert f"\n{act}. " in done.stdout
    assert len(done.stdout.splitlines()) <= 60
