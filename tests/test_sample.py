"""The sample chat keeps what it promises: size, order, languages, and evidence that holds the answers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import FrozenInstanceError
from datetime import date, timedelta
from importlib.resources import files
from itertools import pairwise

import pytest

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.sample import SampleMessage, load_chat, load_questions

USERS = {"maya": "en", "liming": "zh"}
CHAT = load_chat()
QUESTIONS = load_questions()
BY_ID = {message.id: message for message in CHAT}
HAN = re.compile(r"[\u4e00-\u9fff]")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September")
FULL_DATE_EN = re.compile(r"(\d{1,2}) (\w+) (\d{4})")
FULL_DATE_ZH = re.compile(r"(\d{4})年(\d{1,2})月(\d{1,2})日")


def sessions_of(user: str) -> dict[str, list[SampleMessage]]:
    sessions: dict[str, list[SampleMessage]] = defaultdict(list)
    for message in load_chat(user):
        sessions[message.session].append(message)
    return dict(sessions)


def test_the_chat_belongs_to_exactly_the_known_users():
    assert {message.user for message in CHAT} == set(USERS)
    assert {question.user for question in QUESTIONS} == set(USERS)


@pytest.mark.parametrize("user", USERS)
def test_each_user_has_at_least_eight_sessions_and_two_hundred_messages_over_months(user):
    messages = load_chat(user)
    assert len(sessions_of(user)) >= 8
    assert len(messages) >= 200
    assert messages[-1].said_at - messages[0].said_at > timedelta(days=150)


@pytest.mark.parametrize("user", USERS)
def test_a_user_filter_returns_that_users_items_in_the_same_order(user):
    assert load_chat(user) == tuple(m for m in CHAT if m.user == user)
    assert load_questions(user) == tuple(q for q in QUESTIONS if q.user == user)


def test_ids_are_unique():
    assert len(BY_ID) == len(CHAT)
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("user", USERS)
def test_an_id_tells_the_session_and_the_position_in_it(user):
    for session, messages in sessions_of(user).items():
        assert session.startswith(f"{user}-")
        assert [m.id for m in messages] == [f"{session}-{n:03d}" for n in range(1, len(messages) + 1)]


def test_every_time_carries_a_zone():
    assert all(message.said_at.utcoffset() is not None for message in CHAT)


@pytest.mark.parametrize("user", USERS)
def test_a_users_messages_are_strictly_in_time_order(user):
    assert all(earlier.said_at < later.said_at for earlier, later in pairwise(load_chat(user)))


@pytest.mark.parametrize("user", USERS)
def test_each_session_lasts_one_day_begins_with_the_user_and_ends_with_the_assistant(user):
    for messages in sessions_of(user).values():
        assert len({m.said_at.date() for m in messages}) == 1
        assert (messages[0].role, messages[-1].role) == ("user", "assistant")


def test_the_assistant_never_speaks_twice_in_a_row():
    for earlier, later in pairwise(CHAT):
        assert (earlier.role, later.role) != ("assistant", "assistant")


def test_role_and_speaker_agree():
    assert {(m.user, m.role, m.speaker) for m in CHAT} == {
        ("maya", "user", "Maya"),
        ("maya", "assistant", "Assistant"),
        ("liming", "user", "李明"),
        ("liming", "assistant", "Assistant"),
    }


def test_no_text_is_blank_or_padded():
    for item in (*(m.text for m in CHAT), *(q.question for q in QUESTIONS), *(q.answer for q in QUESTIONS)):
        assert item
        assert item == item.strip()


@pytest.mark.parametrize("user", USERS)
def test_lengths_vary_from_a_word_to_a_long_story(user):
    lengths = [len(message.text) for message in load_chat(user)]
    assert min(lengths) <= 6
    assert max(lengths) >= 200


def test_the_english_chat_has_no_chinese_and_the_chinese_chat_is_mostly_chinese():
    chinese = [message for message in load_chat("liming") if HAN.search(message.text)]
    assert not any(HAN.search(message.text) for message in load_chat("maya"))
    assert len(chinese) / len(load_chat("liming")) > 0.98


def test_hardly_any_sentence_is_said_twice():
    repeated = [text for text, times in Counter(message.text for message in CHAT).items() if times > 1]
    assert len(repeated) <= 2


@pytest.mark.parametrize("phrase", ["What is 17 * 23?", "What time is it in Oslo?"])
def test_users_ask_for_tools_in_fixed_words(phrase):
    assert phrase in {message.text for message in load_chat("maya") if message.role == "user"}


@pytest.mark.parametrize("user", USERS)
def test_every_product_that_is_told_is_right(user):
    products = re.findall(r"(\d+) \* (\d+) = (\d+)", " ".join(m.text for m in load_chat(user)))
    assert products
    assert all(int(a) * int(b) == int(c) for a, b, c in products)


def test_the_clock_the_assistant_reads_for_another_city_fits_the_moment():
    told = {
        "Lisbon": timedelta(hours=0),
        "Oslo": timedelta(hours=2),
    }
    for city, offset in told.items():
        answer = next(m for m in CHAT if f" in {city}, " in m.text and m.text.startswith("It's "))
        there = answer.said_at - answer.said_at.utcoffset() + offset
        assert f"{there:%H:%M}" in answer.text


def test_there_are_enough_questions_in_each_language_and_category():
    assert sum(q.language == "en" for q in QUESTIONS) >= 45
    assert sum(q.language == "zh" for q in QUESTIONS) >= 35
    count = Counter(q.category for q in QUESTIONS)
    assert set(count) == {"single-hop", "multi-hop", "temporal", "update", "assistant"}
    assert min(count["multi-hop"], count["temporal"]) >= 15
    assert count["update"] >= 12
    assert count["assistant"] >= 10


def test_a_question_is_asked_and_answered_in_its_users_language():
    for question in QUESTIONS:
        assert question.language == USERS[question.user]
        is_chinese = question.language == "zh"
        assert bool(HAN.search(question.question)) is is_chinese
        assert is_chinese or not HAN.search(question.answer)


def test_no_question_is_asked_twice():
    assert len({question.question for question in QUESTIONS}) == len(QUESTIONS)


def test_evidence_is_one_to_four_distinct_messages_of_the_same_user():
    for question in QUESTIONS:
        assert 1 <= len(question.evidence) <= 4
        assert len(set(question.evidence)) == len(question.evidence)
        assert {BY_ID[id_].user for id_ in question.evidence} == {question.user}


def test_a_multi_hop_question_needs_several_messages():
    assert all(len(q.evidence) >= 2 for q in QUESTIONS if q.category == "multi-hop")


def test_a_question_about_the_assistant_rests_on_what_the_assistant_said():
    for question in QUESTIONS:
        if question.category == "assistant":
            assert {BY_ID[id_].role for id_ in question.evidence} == {"assistant"}


def test_every_session_holds_evidence_and_no_session_holds_most_of_it():
    held = Counter(BY_ID[id_].session for question in QUESTIONS for id_ in question.evidence)
    assert set(held) == {message.session for message in CHAT}
    assert max(held.values()) < 0.15 * sum(held.values())


def test_no_question_repeats_its_evidence_and_most_short_answers_stand_in_it():
    direct = [q for q in QUESTIONS if q.category in {"single-hop", "assistant"}]
    stands = [q for q in direct if q.answer in " ".join(BY_ID[id_].text for id_ in q.evidence)]
    assert len(stands) / len(direct) > 0.95
    for question in QUESTIONS:
        assert all(question.question not in BY_ID[id_].text for id_ in question.evidence)


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.category != "update"], ids=lambda q: q.id)
def test_an_answer_is_not_given_away_by_its_question(question):
    assert question.answer.casefold() not in question.question.casefold()


def test_a_dated_answer_lies_near_the_message_it_rests_on():
    dated = 0
    for question in QUESTIONS:
        if match := FULL_DATE_EN.fullmatch(question.answer):
            day = date(int(match[3]), MONTHS.index(match[2]) + 1, int(match[1]))
        elif match := FULL_DATE_ZH.fullmatch(question.answer):
            day = date(int(match[1]), int(match[2]), int(match[3]))
        else:
            continue
        dated += 1
        gaps = [abs(BY_ID[id_].said_at.date() - day) for id_ in question.evidence]
        assert min(gaps) <= timedelta(days=20), question.id
    assert dated >= 15


@pytest.mark.parametrize("load", [load_chat, load_questions])
@pytest.mark.parametrize("stranger", ["bob", "", "Maya"])
def test_an_unknown_user_is_refused_by_name_with_the_known_ones(load, stranger):
    with pytest.raises(ConfigurationError) as caught:
        load(stranger)
    assert repr(stranger) in str(caught.value)
    assert all(repr(user) in str(caught.value) for user in USERS)


def test_messages_and_questions_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        CHAT[0].text = "something else"
    with pytest.raises(FrozenInstanceError):
        QUESTIONS[0].answer = "something else"


@pytest.mark.parametrize("name", ["chat.jsonl", "questions.jsonl"])
def test_the_files_are_plain_utf8_one_object_a_line(name):
    data = files("llama_index_memory_tiers.sample").joinpath(name).read_bytes()
    assert data.endswith(b"}\n")
    assert b"\r" not in data
    assert all(line.startswith("{") and line.endswith("}") for line in data.decode().rstrip("\n").split("\n"))
