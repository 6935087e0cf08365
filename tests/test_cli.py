"""The command line: every command on a full, an empty and a damaged store, for people and for machines."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from doubles import RecordingBlock, absorb_all, refuse_content, rows, said
from typer.testing import CliRunner

from llama_index_memory_tiers import ByAge, FactExtractionMemoryBlock, Storage, TieredMemory, VectorMemoryBlock
from llama_index_memory_tiers.cli import doctor, places, wording
from llama_index_memory_tiers.cli.app import app
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.errors import embedding_mismatch
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.testing import HashEmbedding, ScriptedLLM, WordLlamaEmbedding

ROOT = Path(__file__).parent.parent
FACT = '{"subject": "Ada", "relation": "drinks", "value": "oolong", "fact": "Ada drinks oolong.", "said": [1]}'
ESCAPE = "\x1b[2J"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*arguments: str | Path, stdin: str = "", **env: str) -> Ran:
    """Run a command in this process."""
    done = CliRunner().invoke(
        app, [str(each) for each in arguments], input=stdin, env={"MEMORY_TIERS_STORAGE": "", **env}
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    return Ran(done.exit_code, done.stdout, done.stderr)


# --- stores ---------------------------------------------------------------------------------------------------


async def fill(path: Path, user: str | None, session: str, *texts: str) -> None:
    async with Storage(path) as storage:
        blocks = [
            VectorMemoryBlock(embed_model=WordLlamaEmbedding()),
            FactExtractionMemoryBlock(llm=ScriptedLLM([FACT] * 9)),
        ]
        memory = TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=blocks)
        for text in texts:
            await memory.aput(said("user", text))
            await memory.aput(said("assistant", "noted"))
        await absorb_all(memory)
        await memory.aclose()


async def make_empty(path: Path) -> None:
    async with Storage(path):
        pass


@pytest.fixture(scope="module")
def once_full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "full.db"
    asyncio.run(
        fill(path, "ada", "monday", "I drink oolong tea.", "My dog is called Pixel.", f"Odd {ESCAPE} [red]text[/]")
    )
    return path


@pytest.fixture
def full(once_full: Path, tmp_path: Path) -> Path:
    """One person, one session, a vector and a fact block."""
    return Path(shutil.copy(once_full, tmp_path / "full.db"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.db"
    asyncio.run(make_empty(path))
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """No database at all."""
    path = tmp_path / "damaged.db"
    path.write_bytes(b"This is no database. " * 500)
    return path


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module with factories."""
    (tmp_path / "yours.py").write_text(
        """
from llama_index_memory_tiers import TieredMemory, VectorMemoryBlock

def memory(storage, user_id=None, session_id="worker"):
    return TieredMemory(storage=storage, user_id=user_id, session_id=session_id, memory_blocks=[VectorMemoryBlock()])

def nonsense():
    return 7

def broken():
    raise KeyError("no such model")
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "yours"
    sys.modules.pop("yours", None)


LOOKING = [
    ["tiers"],
    ["search", "tea"],
    ["inspect", "What do I drink?"],
    ["doctor"],
    ["reindex", "--memory", "yours:memory"],
    ["export", "{folder}/out.jsonl"],
    ["forget", "--contains", "no such text", "--yes"],
    ["replay", "--memory", "yours:memory"],
    ["worker", "--memory", "yours:memory", "--once"],
    ["maintain", "--memory", "yours:memory", "--dry-run"],
]
ids = [each[0] for each in LOOKING]


@pytest.mark.parametrize("as_json", [False, True])
def test_commands_that_take_one_thing_find_it_on_a_full_and_not_on_an_empty_store(as_json, full, empty, tmp_path):
    known, file = next(iter(message_ids(full).values())), tmp_path / "in.jsonl"
    json_too = ["--json"] if as_json else []
    assert command("export", file, "--storage", full).code == 0
    for arguments, codes in ((("why", known), (0, 2)), (("import", file), (0, 0)), (("chat",), (0, 0))):
        for store, code in zip((full, empty), codes, strict=True):
            ran = command(*arguments, "--storage", store, *json_too)
            assert ran.code == code, arguments
            assert not as_json or isinstance(ran.json, dict)


def filled_in(arguments: list[str], folder: Path) -> list[str]:
    return [each.format(folder=folder) for each in arguments]


@pytest.mark.parametrize("arguments", LOOKING, ids=ids)
def test_every_command_is_fine_on_a_full_and_on_an_empty_store(arguments, full, empty, tmp_path, factories):
    for store in (full, empty):
        ran = command(*filled_in(arguments, tmp_path), "--storage", store)
        assert (ran.code, ran.err) == (int(arguments[0] == "forget"), "")


@pytest.mark.parametrize("arguments", LOOKING, ids=ids)
def test_every_command_writes_one_json_document_and_nothing_else(arguments, full, empty, tmp_path, factories):
    for store in (full, empty):
        ran = command(*filled_in(arguments, tmp_path), "--storage", store, "--json")
        assert isinstance(ran.json, dict)
        assert ran.err == ""


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [*LOOKING, ["why", "x"], ["import", "{folder}/in.jsonl"], ["chat"]],
    ids=[*ids, "why", "import", "chat"],
)
def test_a_damaged_store_is_an_error_in_three_parts(arguments, as_json, damaged, full, tmp_path, factories):
    assert command("export", tmp_path / "in.jsonl", "--storage", full).code == 0
    before = damaged.read_bytes()
    ran = command(*filled_in(arguments, tmp_path), "--storage", damaged, *(["--json"] if as_json else []))
    # The worker's next round tries again, so it counts instead of ending; doctor makes a finding of it.
    failed_round = arguments[0] in {"worker", "doctor"}
    assert ran.code == 1
    if as_json and not failed_round:
        assert ran.json["error"]["kind"] == "StorageError"
        assert all(ran.json["error"][part] for part in ("given", "allowed", "remedy"))
    elif not failed_round:
        assert ran.err.startswith("Error: The file is not a SQLite database, or it is damaged")
        assert "sqlite3 .recover" in ran.err
        assert len(ran.err.splitlines()) == 3
    assert damaged.read_bytes() == before


@pytest.mark.parametrize("arguments", LOOKING[:7], ids=ids[:7])
def test_a_misspelt_path_is_refused_and_no_file_is_made(arguments, tmp_path, factories):
    missing = tmp_path / "missing.db"
    ran = command(*filled_in(arguments, tmp_path), "--storage", missing)
    assert ran.code == 2
    assert "there are none" in ran.err
    assert not missing.exists()


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path):
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    assert command("doctor", "--storage", other).code == 2
    with sqlite3.connect(other) as connection:
        assert [row[0] for row in connection.execute("SELECT name FROM sqlite_master")] == ["bookmarks"]
    connection.close()


def test_the_storage_may_stand_in_the_environment_and_has_to_stand_somewhere(full):
    assert command("tiers", MEMORY_TIERS_STORAGE=str(full)).code == 0
    ran = command("tiers")
    assert (ran.code, "MEMORY_TIERS_STORAGE" in ran.err) == (2, True)


def test_options_that_do_not_exist_are_usage():
    assert command("tiers", "--colour").code == 2
    assert command("no-such-command").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiers", "--colour"],
        ["no-such-command"],
        ["search"],
        ["search", "tea", "-k", "none"],
        ["export", "x", "--scope", "y"],
    ],
    ids=" ".join,
)
def test_errors_of_usage_are_json_too_when_that_was_asked_for(arguments, full):
    ran = command(*arguments, "--storage", full, "--json")
    assert (ran.code, ran.err) == (2, "")
    assert set(ran.json["error"]) == {"kind", "given", "allowed", "remedy"}


@pytest.fixture(scope="module")
def odd(once_full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores that commands refuse for one reason or another."""
    folder = tmp_path_factory.mktemp("odd")
    full = shutil.copy(once_full, folder / "full.db")
    asyncio.run(fill(folder / "nobody.db", None, "one", "I like Rome."))
    asyncio.run(make_empty(folder / "newer.db"))
    for name, statement in (
        ("newer.db", "INSERT INTO llama_index_memory_schema VALUES (99, 0)"),
        ("stock.db", "CREATE TABLE llama_index_memory (id, key, timestamp, role, status, data)"),
    ):
        with sqlite3.connect(folder / name) as connection:
            connection.execute(statement)
        connection.close()
    assert command("export", folder / "ada.jsonl", "--storage", full).code == 0
    return folder


PYTHON = re.compile(r"\w\(|await |Path|(?<![\w-])[a-z]+_[a-z_]+(?!\w*')|(?<![-\w])[a-z]+=(?!1)|stream of bytes")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiers", "--table-name", "a b"], ["tiers", "--db-schema", "a b"], ["tiers", "--user", " "],
        ["tiers", "--storage", "{folder}"], ["chat", "--session", " "], ["why", "x"], ["export", "{folder}"],
        ["export", "{folder}/no/x"], ["export", "{folder}/x", "--scope", "user", "--storage", "{folder}/nobody.db"],
        ["import", "{folder}/none"], ["import", "{folder}/ada.jsonl", "--user", "bob"],
        ["import", "{folder}", "--from", "memoryos"], ["forget"], ["forget", "--contains", " "], ["forget", "--id", ""],
        ["forget", "--scope", "user", "--storage", "{folder}/nobody.db"], ["doctor", "--storage", "{folder}/stock.db"],
        ["doctor", "--storage", "{folder}/newer.db"], ["chat", "--llm", "nonsense"],
        ["chat", "--llm", "http://localhost:1/v1"], ["reindex"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_errors_speak_of_options_not_of_python(arguments, odd):
    ran = command(arguments[0], "--storage", odd / "full.db", *filled_in(arguments[1:], odd))
    assert ran.code != 0
    assert len(ran.err.splitlines()) == 3
    names = ran.err.replace(str(odd), "").replace("llama_index_memory", "").replace("data_storage_path", "")
    assert PYTHON.findall(names) == []


def test_a_folder_is_called_a_folder(full, tmp_path):
    ran = command("export", tmp_path / "no" / "x", "--storage", full)
    assert (ran.code, "a folder that exists" in ran.err, "FILE that exists" in ran.err) == (2, True, False)


def test_a_mismatch_of_embeddings_is_mended_by_a_command():
    error = embedding_mismatch(stored_dimensions=3, asked_dimensions=4)
    assert "`memory-tiers reindex --memory module:factory`" in wording.spoken(error.remedy)
    assert PYTHON.findall(wording.spoken(error.remedy)) == []


# --- looking --------------------------------------------------------------------------------------------------


def test_search_finds_by_meaning_with_the_model_that_made_the_vectors(full):
    found = command("search", "What is the name of the pet?", "-k", "1", "--storage", full, "--json").json["found"]
    assert [one["text"] for one in found] == ["My dog is called Pixel."]
    assert 0 < found[0]["distance"] < 1


def test_a_line_that_only_stands_next_to_a_match_says_so_and_comes_after_it(tmp_path):
    path = tmp_path / "words.db"

    async def filled() -> None:
        async with Storage(path) as storage:
            memory = TieredMemory(storage=storage, user_id="ada", session_id="1", memory_blocks=[VectorMemoryBlock()])
            for text in ("It was great!", "I saw a giraffe.", "Lovely weather.", "Back at noon."):
                await memory.aput(said("user", text))
            await absorb_all(memory)
            await memory.aclose()

    asyncio.run(filled())
    lines = [line for line in command("search", "giraffe", "--storage", path).out.splitlines() if "user" in line]
    assert [("giraffe" in line, "next to a match" in line) for line in lines] == [(True, False)] + [(False, True)] * 3
    assert "distance" not in command("search", "giraffe", "--storage", path).out
    shown = command("inspect", "giraffe", "--storage", path).out.splitlines()
    assert {"bm25" in line for line in shown if "giraffe" in line} == {True}
    assert {("bm25" in line, "next to a match" in line) for line in shown if "noon" in line} == {(False, True)}


def test_inspect_shows_what_a_new_conversation_would_be_given_and_which_leg_found_it(full):
    report = command("inspect", "What do I drink?", "--storage", full, "--json").json
    texts = "\n".join(message["content"] for message in report["messages"])
    assert "I drink oolong tea." in texts
    assert "Ada drinks oolong." in texts
    assert report["tokens"] <= report["limit"]
    vector = next(part for part in report["parts"] if part["name"] == "RetrievedMessages")
    assert "bm25" in vector["kept"][0]["legs"]


def test_looking_changes_nothing(full, factories):
    before = sorted(full.parent.glob("full.db*")), dump(full)
    for arguments in (
        *LOOKING[:5],
        ["inspect", "tea", "--memory", "yours:memory"],
        ["search", "tea", "--session", "monday"],
    ):
        assert command(*arguments, "--storage", full).code == 0
    assert (sorted(full.parent.glob("full.db*")), dump(full)) == before


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        found = list(connection.iterdump())
    connection.close()
    return found


def test_why_leads_from_a_fact_to_its_message_and_back(full):
    def kept() -> list[dict[str, Any]]:
        async def listed() -> list[dict[str, Any]]:
            async with Storage(full) as storage:
                return await TieredMemory(storage=storage, user_id="ada", memory_blocks=[]).alist()

        return asyncio.run(listed())

    fact = next(row for row in kept() if row["kind"] == "fact")
    origin = command("why", fact["id"], "--storage", full, "--json").json
    assert origin["text"] == "Ada drinks oolong."
    assert [source["text"] for source in origin["sources"]] == ["I drink oolong tea."]
    assert origin["about"]["prompt"].startswith("facts-")
    back = command("why", origin["sources"][0]["id"], "--storage", full, "--json").json
    assert "Ada drinks oolong." in [one["text"] for one in back["derived"]]
    assert command("why", "no-such-id", "--storage", full).code == 2


def message_ids(path: Path) -> dict[str, str]:
    """Id by text."""
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT uid, data FROM llama_index_memory_messages").fetchall()
    connection.close()
    return {json.loads(data)["blocks"][0]["text"]: uid for uid, data in found if data}


def rename(path: Path, text: str, uid: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE llama_index_memory_messages SET uid = ? WHERE uid = ?", (uid, message_ids(path)[text])
        )
    connection.close()


def test_the_beginning_of_an_id_is_enough_when_only_one_begins_so(full):
    rename(full, "I drink oolong tea.", "abcd-one")
    rename(full, "My dog is called Pixel.", "abcd-two")
    assert command("why", "abcd-o", "--storage", full, "--json").json["id"] == "abcd-one"
    ran = command("why", "abcd", "--storage", full)
    assert (ran.code, "abcd-one (message), abcd-two (message)" in ran.err) == (2, True)
    assert command("why", "abc", "--storage", full).code == 2  # too short to be meant for one
    assert command("why", "%bcd-one", "--storage", full).code == 2
    rename(full, "My dog is called Pixel.", "abcd")
    assert command("why", "abcd", "--storage", full, "--json").json["text"] == "My dog is called Pixel."


def test_a_beginning_finds_nothing_of_somebody_else(full):
    asyncio.run(fill(full, "bob", "tuesday", "I am Bob."))
    bobs = message_ids(full)["I am Bob."]
    assert command("why", bobs[:12], "--user", "ada", "--storage", full).code == 2
    assert command("why", bobs[:12], "--user", "bob", "--storage", full, "--json").json["id"] == bobs


def test_forget_takes_the_beginning_of_an_id_and_asks_with_the_whole(full):
    rename(full, "I drink oolong tea.", "abcd-one")
    rename(full, "My dog is called Pixel.", "abcd-two")
    assert command("forget", "--id", "abcd", "--yes", "--storage", full).code == 2
    ran = command(
        "forget", "--id", "abcd-o", "--before", "2999-01-01", "--contains", "tea", "--storage", full, stdin="y\n"
    )
    assert ran.code == 0
    assert "Forget what has the id abcd-one and was said before 2999-01-01 00:00 and has 'tea' in it of" in ran.err
    assert "abcd-one" not in message_ids(full).values()
    assert "abcd-two" in message_ids(full).values()
    again = command("forget", "--id", "abcd-one", "--yes", "--storage", full, "--json")
    assert (again.code, again.json["forgotten"], again.json["unknown"]) == (1, False, ["abcd-one"])


def test_why_does_not_answer_for_somebody_else(full):
    asyncio.run(fill(full, "bob", "tuesday", "I am Bob."))
    one = command("search", "oolong", "-k", "1", "--user", "ada", "--storage", full, "--json").json["found"][0]["id"]
    assert command("why", one, "--user", "bob", "--storage", full).code == 2
    assert command("why", one, "--user", "ada", "--storage", full).code == 0


def test_who_is_meant_must_be_said_when_there_are_several(full):
    asyncio.run(fill(full, "bob", "tuesday", "I am Bob."))
    ran = command("tiers", "--storage", full)
    assert (ran.code, "ada" in ran.err, "bob" in ran.err) == (2, True, True)
    assert command("tiers", "--session", "tuesday", "--storage", full, "--json").json["user"] == "bob"
    assert command("tiers", "--session", "nowhere", "--storage", full).code == 2


def test_sessions_without_a_user_are_looked_at_one_by_one(tmp_path):
    path = tmp_path / "nobody.db"
    asyncio.run(fill(path, None, "one", "I like Rome."))
    assert command("search", "Rome", "--storage", path, "--json").json["found"][0]["text"] == "I like Rome."
    asyncio.run(fill(path, None, "two", "I like Oslo."))
    assert command("tiers", "--storage", path).code == 2
    assert command("search", "Oslo", "--session", "one", "--storage", path, "--json").json["found"] != []
    texts = [
        one["text"] for one in command("search", "Oslo", "--session", "one", "--storage", path, "--json").json["found"]
    ]
    assert "I like Oslo." not in texts


def test_stored_text_can_neither_command_the_terminal_nor_be_taken_for_markup(full):
    ran = command("search", "odd text", "--storage", full)
    assert "\x1b" not in ran.out
    assert "[red]text[/]" in ran.out


def test_a_session_that_is_named_is_all_that_is_searched_and_counted(full):
    two_sessions(full)
    within = ("--session", "tuesday", "--storage", full, "--json")
    assert {one["metadata"]["session_id"] for one in command("search", "oolong", *within).json["found"]} == {"tuesday"}
    assert command("tiers", *within).json["kept"][0]["count"] == 2


def test_only_commands_that_begin_a_conversation_say_so(full):
    for name in ("tiers", "search", "why", "export", "forget", "replay", "maintain", "reindex", "import"):
        assert "default a new one" not in command(name, "--help").out, name


def test_nothing_kept_shows_no_session_of_our_own(empty):
    ran = command("tiers", "--storage", empty)
    assert (ran.code, ran.out) == (0, "Nothing is kept.\n")
    assert "look-" not in command("tiers", "--storage", empty, "--json").out


def test_of_one_block_no_name_is_repeated(tmp_path):
    path = tmp_path / "one.db"

    async def filled() -> None:
        async with Storage(path) as storage:
            memory = TieredMemory(storage=storage, user_id="ada", session_id="1", memory_blocks=[VectorMemoryBlock()])
            await memory.aput(said("user", "I like Rome."))
            await absorb_all(memory)
            await memory.aclose()

    asyncio.run(filled())
    assert command("inspect", "Rome", "--storage", path).out.count("RetrievedMessages") == 1


# --- moving ---------------------------------------------------------------------------------------------------


def test_an_export_goes_into_a_new_database_and_is_the_same_there(full, tmp_path):
    file, copy = tmp_path / "all.jsonl", tmp_path / "copy.db"
    written = command("export", file, "--storage", full, "--json").json
    taken = command("import", file, "--storage", copy, "--json").json
    assert written["messages"] == taken["messages"] == 6
    assert (
        command("search", "pet", "--storage", copy, "--json").json
        == command("search", "pet", "--storage", full, "--json").json
    )
    assert command("import", file, "--storage", copy, "--json").json["skipped"] == 1


def test_an_export_of_a_session_without_a_user_finds_its_way_home(tmp_path):
    source, file, copy = tmp_path / "a.db", tmp_path / "one.jsonl", tmp_path / "b.db"
    asyncio.run(fill(source, None, "one", "I like Rome."))
    assert command("export", file, "--session", "one", "--storage", source).code == 0
    assert command("import", file, "--storage", copy).code == 0
    assert command("search", "Rome", "--storage", copy, "--json").json["found"][0]["text"] == "I like Rome."


def test_a_file_that_is_no_export_is_refused(full, tmp_path):
    file = tmp_path / "cut.jsonl"
    file.write_text("{}\n", encoding="utf-8")
    assert command("import", file, "--storage", tmp_path / "new.db").code == 2
    assert command("import", tmp_path / "nothing", "--storage", tmp_path / "new.db").code == 2
    assert command("export", tmp_path / "no" / "folder", "--storage", full).code == 2


def test_an_import_that_is_refused_leaves_no_file_and_says_whose_it_is(full, tmp_path):
    file, new = tmp_path / "ada.jsonl", tmp_path / "new.db"
    assert f"user 'ada' to {file}\n" in command("export", file, "--storage", full).out
    ran = command("import", file, "--user", "bob", "--storage", new)
    assert (ran.code, "an export of 'ada'" in ran.err) == (2, True)
    assert command("import", tmp_path / "missing", "--storage", new).code == 2
    ran = command("import", file, "--from", "memoryos", "--user", "ada", "--storage", new)
    assert (ran.code, f"{file} is not a folder." in ran.err) == (2, True)
    assert list(tmp_path.glob("new.db*")) == []
    assert f"user 'ada' from {file}\n" in command("import", file, "--storage", new).out


@pytest.mark.parametrize("answer", ["", "n\n", "maybe\n"])
def test_forget_asks_and_keeps_everything_without_a_yes(answer, full):
    before = dump(full)
    ran = command("forget", "--scope", "user", "--user", "ada", "--storage", full, "--json", stdin=answer)
    assert (ran.code, ran.json) == (1, {"forgotten": False})
    assert "cannot be undone" in ran.err
    assert dump(full) == before


def test_forget_with_a_yes_leaves_nothing_and_says_so(full):
    ran = command("forget", "--scope", "user", "--user", "ada", "--storage", full, "--json", stdin="y\n")
    assert (ran.code, ran.json["complete"]) == (0, True)
    assert next(one for one in ran.json["entries"] if one["store"] == "messages")["removed"] == 6
    assert command("tiers", "--user", "ada", "--storage", full, "--json").json["kept"] == []


def test_a_receipt_leaves_out_stores_that_had_nothing(full):
    ran = command("forget", "--contains", "Pixel", "--yes", "--storage", full)
    assert "messages" in ran.out
    assert "dead letters" not in ran.out


def test_forget_wants_to_be_told_what(full):
    for arguments in ([], ["--scope", "session"], ["--before", "yesterday"]):
        ran = command("forget", "--user", "ada", "--yes", *arguments, "--storage", full)
        assert ran.code == 2, arguments
        assert len(ran.err.splitlines()) == 3
    assert command("tiers", "--storage", full, "--json").json["kept"] != []


def test_forget_by_text_takes_what_was_learnt_from_it_along(full):
    command("forget", "--contains", "oolong", "--yes", "--storage", full)
    left = command("inspect", "What do I drink?", "--storage", full, "--json").out
    assert "I drink oolong" not in left
    assert "Ada drinks oolong" not in left
    assert "Pixel" in left


def two_sessions(path: Path) -> None:
    asyncio.run(fill(path, "ada", "tuesday", "I drink oolong on Tuesdays."))


@pytest.mark.parametrize("limit", [("--contains", "oolong"), ("--before", "2999-01-01"), ("--speaker", "user")])
def test_forget_stays_in_the_session_that_was_named(limit, full):
    two_sessions(full)
    ran = command("forget", *limit, "--session", "monday", "--storage", full, stdin="y\n")
    assert (ran.code, "user 'ada', session 'monday'" in ran.err) == (0, True)
    assert "I drink oolong on Tuesdays." in message_ids(full)
    assert "I drink oolong tea." not in message_ids(full)


@pytest.mark.parametrize("arguments", [["forget", "--yes"], ["export", "{folder}/out.jsonl"]], ids=["forget", "export"])
def test_all_of_a_user_and_one_session_cannot_be_meant_at_once(arguments, full, tmp_path):
    before = dump(full)
    where = ("--scope", "user", "--session", "monday", "--storage", full)
    ran = command(*filled_in(arguments, tmp_path), *where)
    assert (ran.code, "--session" in ran.err) == (2, True)
    assert dump(full) == before
    assert not (tmp_path / "out.jsonl").exists()


def records_of(path: Path, kind: str) -> dict[str, str]:
    """Id by text."""

    async def listed() -> dict[str, str]:
        async with Storage(path) as storage:
            return {found.text: found.id for _, found in await storage.survey.records("ada") if found.kind == kind}

    return asyncio.run(listed())


def test_forgetting_what_search_found_leaves_no_copy(full):
    found = command("search", "oolong", "-k", "1", "--storage", full, "--json").json["found"][0]
    ran = command("forget", "--id", found["id"], "--yes", "--storage", full, "--json")
    assert (ran.code, ran.json["messages_that_stay"]) == (0, [])
    assert "oolong" not in "\n".join(dump(full)).casefold()


def test_forgetting_a_fact_says_which_messages_stay(full):
    source = message_ids(full)["I drink oolong tea."]
    fact = records_of(full, "fact")["Ada drinks oolong."]
    ran = command("forget", "--id", fact, "--storage", full, stdin="y\n")
    stay = f"The messages that it came from stay: {source}."
    assert (ran.code, stay in ran.err, stay in ran.out) == (0, True, True)
    assert "I drink oolong tea." in message_ids(full)


@pytest.mark.parametrize("arguments", [*LOOKING[:3], *LOOKING[4:7], *LOOKING[7:10:2]], ids=lambda each: each[0])
@pytest.mark.parametrize(
    "unknown", [("--user", "nobody"), ("--user", "ada", "--session", "never"), ("--session", "never")]
)
def test_somebody_unknown_is_refused_and_those_who_are_known_are_named(arguments, unknown, full, tmp_path, factories):
    (tmp_path / "out.jsonl").write_text("good", encoding="utf-8")
    before = dump(full)
    ran = command(*filled_in(arguments, tmp_path), *unknown, "--storage", full)
    known = "ada" if unknown[-2] == "--user" else "monday"
    assert (ran.code, f"Known are: {known}" in ran.err) == (2, True)
    assert (tmp_path / "out.jsonl").read_text("utf-8") == "good"
    assert dump(full) == before


def test_of_many_who_are_known_ten_are_named(full):
    for number in range(12):
        asyncio.run(put_only(full, f"user-{number}", "one", "hello"))
    ran = command("tiers", "--user", "nobody", "--storage", full)
    assert (ran.code, ran.err.count("user-"), "and 3 more" in ran.err) == (2, 10, True)


def test_where_nothing_matches_nothing_is_asked_and_nothing_is_changed(full):
    before = dump(full)
    for arguments in (["--contains", "no such text"], ["--id", "ffff-unknown"], ["--before", "1999-01-01"]):
        ran = command("forget", *arguments, "--storage", full)
        assert (ran.code, ran.err, "Nothing was forgotten." in ran.out) == (1, "", True)
    assert (
        "No message or record of user 'ada' begins with 'ffff-unknown'."
        in command("forget", "--id", "ffff-unknown", "--storage", full).out
    )
    assert command("forget", "--id", "abc", "--yes", "--storage", full).code == 2
    assert dump(full) == before


def test_an_unknown_id_among_known_ones_is_told(full):
    known = message_ids(full)["I drink oolong tea."]
    ran = command("forget", "--id", known, "--id", "ffff-unknown", "--yes", "--storage", full, "--json")
    assert (ran.code, ran.json["complete"], ran.json["unknown"]) == (1, True, ["ffff-unknown"])


def test_the_question_says_how_much_will_go_from_which_file_with_a_short_example(full):
    asyncio.run(fill(full, "ada", "tuesday", f"Zebra {ESCAPE} " + "stripes " * 20))
    before = dump(full)
    ran = command("forget", "--contains", "zebra", "--storage", full, stdin="n\n")
    assert f"in {full}, and what was learnt from it: 1 message and 1 record, such as 'Zebra" in ran.err
    sample = re.search(r"such as '(.*)'\?", ran.err)
    assert sample is not None
    assert len(sample[1].replace("\\x1b", "x")) <= 60
    assert "\x1b" not in ran.err
    assert dump(full) == before


def test_what_is_foreseen_is_what_is_removed(full):
    ran = command("forget", "--scope", "user", "--storage", full, "--json", stdin="y\n")
    removed = {one["store"]: one["removed"] for one in ran.json["entries"]}
    assert f"{removed['messages']} messages and {removed['records']} records" in ran.err


# --- tending --------------------------------------------------------------------------------------------------


async def put_only(path: Path, user: str, session: str, text: str) -> None:
    async with Storage(path) as storage:
        memory = TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=[VectorMemoryBlock()])
        await memory.astop()
        await memory.aput(said("user", text))
        await memory.aput(said("assistant", "noted"))
        await memory.aclose()


def test_a_worker_absorbs_what_is_due_in_anybodys_sessions(tmp_path, factories):
    path = tmp_path / "waiting.db"
    for user, session in (("ada", "one"), ("ada", "two"), ("bob", "three")):
        asyncio.run(put_only(path, user, session, f"{user} in {session}"))
    assert command("search", "session", "--user", "bob", "--storage", path, "--json").json["found"] == []
    ran = command("worker", "--once", "--memory", "yours:memory", "--storage", path, "--json")
    assert ran.code == 0
    assert ran.json["blocks"] == [
        {"block": "RetrievedMessages", "absorbed": 6, "pending": 0, "error": None, "parked": 0, "in_window": 0}
    ]
    found = command("search", "in three", "--user", "bob", "--storage", path, "--json").json["found"]
    assert "bob in three" in [one["text"] for one in found]


def test_a_worker_ends_cleanly_on_sigterm(tmp_path, factories):
    path = tmp_path / "waiting.db"
    asyncio.run(put_only(path, "ada", "one", "I like Rome."))
    worker = subprocess.Popen(
        [sys.executable, "-m", "llama_index_memory_tiers.cli", "worker", "--memory", "yours:memory", "--every", "0.05",
         "--storage", path, "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for _ in range(600):
            if not asyncio.run(left(path)):
                break
            time.sleep(0.1)
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert (worker.returncode, err) == (0, "")
    assert json.loads(out)["blocks"][0]["absorbed"] == 2


async def left(path: Path) -> int:
    async with Storage(path) as storage:
        return sum(one.messages for one in await storage.survey.waiting(now=storage.now()))


def test_replay_tries_the_dead_letters_of_everybody(tmp_path, monkeypatch):
    path = tmp_path / "dead.db"
    block = RecordingBlock(on_prepare=refuse_content("poison"))

    async def poison() -> None:
        async with Storage(path) as storage:
            for user in ("ada", "bob"):
                memory = TieredMemory(storage=storage, user_id=user, session_id="one", memory_blocks=[block])
                await memory.astop()
                await memory.aput(said("user", "poison"))
                await memory.aput(said("assistant", "noted"))
                await absorb_all(memory)
                await memory.aclose()

    asyncio.run(poison())
    problems = command("doctor", "--storage", path, "--json")
    assert problems.code == 1
    assert {"level": "problem", "area": "Recorder"}.items() <= next(
        one for one in problems.json["findings"] if "dead letters" in one["found"]
    ).items()
    made = type(sys)("poisoned")
    made.memory = lambda storage: TieredMemory(storage=storage, session_id="x", memory_blocks=[block])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "poisoned", made)
    arguments = ("replay", "--memory", "poisoned:memory", "--storage", path, "--json")
    assert (command(*arguments).code, command(*arguments).json["dead_letters"]) == (1, 2)
    block.on_prepare = None
    assert (command(*arguments).code, command(*arguments).json["dead_letters"]) == (0, 0)


@pytest.mark.parametrize(
    "spec", ["yours", "no_such_module:memory", "yours:missing", "yours:nonsense", "yours:broken", ":", "yours:__name__"]
)
def test_a_factory_that_makes_no_memory_is_usage(spec, full, factories):
    ran = command("worker", "--once", "--memory", spec, "--storage", full)
    assert ran.code == 2
    assert spec in ran.err.replace("''", "")
    assert len(ran.err.splitlines()) == 3


@pytest.mark.parametrize("name", ["worker", "replay", "maintain", "reindex"])
def test_commands_that_run_blocks_want_to_know_which(name, full):
    ran = command(name, "--storage", full)
    assert (ran.code, "--memory" in ran.err) == (2, True)


def test_blocks_that_are_only_looked_through_never_absorb(tmp_path):
    path = tmp_path / "waiting.db"
    asyncio.run(fill(path, "ada", "one", "I like Rome."))
    asyncio.run(put_only(path, "ada", "two", "I like Oslo."))
    waiting = asyncio.run(left(path))
    assert waiting > 0
    for arguments in (["inspect", "Oslo"], ["search", "Oslo"], ["tiers"]):
        assert command(*arguments, "--storage", path).code == 0
    assert asyncio.run(left(path)) == waiting


def age(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE llama_index_memory_records SET said_at = 0, created_at = 0")
    connection.close()


def test_maintain_says_what_would_leave_and_changes_nothing_without_a_yes(full, monkeypatch):
    age(full)
    made = type(sys)("retaining")
    made.memory = lambda storage: TieredMemory(  # type: ignore[attr-defined]
        storage=storage, session_id="x", memory_blocks=[VectorMemoryBlock()], retention=[ByAge(days=365)]
    )
    monkeypatch.setitem(sys.modules, "retaining", made)
    arguments = ("maintain", "--memory", "retaining:memory", "--storage", full, "--json")
    before = dump(full)
    for extra, stdin in ((["--dry-run"], ""), ([], "n\n")):
        ran = command(*arguments, *extra, stdin=stdin)
        assert (ran.code, ran.json["dry_run"], len(ran.json["departures"])) == (0, True, 6)
        assert dump(full) == before
    ran = command(*arguments, "--yes")
    assert (ran.json["dry_run"], len(ran.json["departures"])) == (False, 6)
    assert command(*arguments, "--dry-run").json == {"dry_run": True, "departures": []}
    assert command(*arguments, "--yes").json == {"dry_run": False, "departures": []}
    assert command(*arguments[:-1], "--yes").out == "Nothing to do.\n"


def test_reindex_embeds_with_the_models_of_the_factory(full, monkeypatch):
    made = type(sys)("embedding")
    made.memory = lambda storage: TieredMemory(  # type: ignore[attr-defined]
        storage=storage, session_id="x", memory_blocks=[VectorMemoryBlock(embed_model=HashEmbedding())]
    )
    monkeypatch.setitem(sys.modules, "embedding", made)
    arguments = ("reindex", "--memory", "embedding:memory", "--storage", full, "--json")
    assert "found by words alone" in command("doctor", "--memory", "embedding:memory", "--storage", full, "--json").out
    ran = command(*arguments)
    assert (ran.code, ran.json["models"][0]["embedded"], ran.json["index"]["attached"]) == (0, 6, False)
    assert command(*arguments).json["models"][0]["embedded"] == 0
    assert command("doctor", "--storage", full, "--json").json["embeddings"] == {ran.json["models"][0]["model"]: 6}


def test_a_folder_of_memoryos_is_taken_over_or_refused(tmp_path):
    user = tmp_path / "theirs" / "users" / "ada"
    user.mkdir(parents=True)
    page = {"user_input": "Where is Pixel?", "agent_response": "In the garden.", "timestamp": "2025-03-01 10:00:00"}
    (user / "short_term.json").write_text(json.dumps([page]), encoding="utf-8")
    path = tmp_path / "ours.db"
    arguments = ("import", tmp_path / "theirs", "--from", "memoryos", "--storage", path)
    ran = command(*arguments, "--user", "ada", "--json")
    assert (ran.code, ran.json["pages"]) == (0, 1)
    assert command(*arguments, "--user", "nobody").code == 2
    assert command("tiers", "--user", "ada", "--storage", path, "--json").json["kept"][0]["count"] == 2


# --- doctor ---------------------------------------------------------------------------------------------------


def findings(path: Path, *arguments: str) -> dict[tuple[str, str], str]:
    ran = command("doctor", "--storage", path, "--json", *arguments)
    return {(one["level"], one["area"]): one["found"] for one in ran.json["findings"]}


def test_doctor_finds_a_healthy_store_healthy(full):
    ran = command("doctor", "--storage", full, "--json")
    assert (ran.code, ran.json["healthy"]) == (0, True)
    assert {one["level"] for one in ran.json["findings"]} == {"ok"}
    assert ran.json["versions"]["llama-index-core"]
    assert ran.json["embeddings"] == {"wordllama-256": 6}


def test_doctor_makes_a_finding_of_a_file_that_is_no_database_or_is_torn(full, damaged):
    whole = full.read_bytes()
    full.write_bytes(whole[:100] + b"\0" * (len(whole) - 100))
    for path in (full, damaged):
        ran = command("doctor", "--storage", path, "--json")
        assert (ran.code, ran.json["healthy"], "python" in ran.json["versions"]) == (1, False, True)
        (found,) = ran.json["findings"]
        assert "not a SQLite database, or it is damaged" in found["found"]
        assert "sqlite3 .recover" in found["remedy"]


def test_numbers_have_the_noun_that_they_want(tmp_path, factories):
    path = tmp_path / "one.db"
    asyncio.run(put_only(path, "ada", "one", "I like Rome."))
    told = [command(name, *more, "--storage", path).out for name, *more in (["doctor"], *LOOKING[8:9])]
    assert not re.search(r"(?<![\d.:])1 [a-z ]*(messages|records|sessions|rounds|blocks|people|texts)", "\n".join(told))
    assert "1 round\n" in told[1]


def test_doctor_finds_damaged_rows_and_secrets_that_were_stored_without_redaction(tmp_path):
    path = tmp_path / "bad.db"

    async def spoil() -> None:
        async with Storage(path) as storage:
            memory = TieredMemory(storage=storage, user_id="ada", session_id="one", memory_blocks=[], redaction=None)
            await memory.aput(said("user", "my key is sk-proj-" + "a1B2c3D4e5F6g7H8i9J0" * 2), uid="secret-1")
            await memory.aput(said("user", "harmless"), uid="torn-1")
            await memory.aclose()

    asyncio.run(spoil())
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE llama_index_memory_messages SET data = '{\"role' WHERE uid = 'torn-1'")
    connection.close()
    found = findings(path)
    assert "torn-1" in found["problem", "texts"]
    assert "secret-1" in found["problem", "secrets"]
    assert "sk-proj" not in json.dumps(list(found.values()))


def test_doctor_finds_what_failed_what_waits_and_a_worker_that_died(tmp_path):
    path = tmp_path / "busy.db"
    asyncio.run(put_only(path, "ada", "one", "I like Rome."))
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE llama_index_memory_cursors SET claim = 'dead', claim_until = 1, error = 'ConnectError'"
        )
    connection.close()
    ran = command("doctor", "--storage", path, "--json")
    told = [(one["level"], one["found"]) for one in ran.json["findings"] if one["area"] == "RetrievedMessages"]
    assert told == [
        ("problem", "failing in 1 session: ConnectError"),
        ("advice", "1 expired claim"),
        ("advice", "2 messages to absorb in 1 session"),
    ]
    assert ran.code == 1


def test_doctor_compares_the_embedding_model_with_the_language_of_the_texts(tmp_path):
    path = tmp_path / "zh.db"
    asyncio.run(fill(path, "mei", "one", "我每天早上喝乌龙茶。", "我的狗叫小白。"))
    assert "wordllama-256" in findings(path)["problem", "embeddings"]


@pytest.mark.parametrize(
    ("model", "share", "level"),
    [
        ("wordllama-256", 0.0, "ok"), ("wordllama-256", 0.9, "problem"), ("BAAI/bge-small-en-v1.5", 0.9, "problem"),
        ("BAAI/bge-m3", 0.9, "ok"), ("intfloat/multilingual-e5-small", 0.9, "ok"), ("my-own-model", 0.9, "advice"),
        ("text-embedding-3-small", 0.9, "ok"),
    ],
)  # fmt: skip
def test_a_models_name_tells_its_languages(model, share, level):
    assert doctor._language_fit(model, share)[0] == level


def test_doctor_looks_at_the_configuration_of_a_factory(full, factories):
    found = findings(full, "--memory", "yours:memory")
    assert "ExtractedFacts" in found["advice", "configuration"] or "reserve_tokens" in found["advice", "configuration"]
    assert ("ok", "configuration") in found


# --- beginning ------------------------------------------------------------------------------------------------


def test_a_chat_remembers_across_processes(tmp_path):
    path = tmp_path / "chat.db"
    first = command(
        "chat", "--storage", path, "--json", stdin="My dog is called Pixel.\n\n/why\n/flush\n/help\n/quit\nnever\n"
    )
    assert first.code == 0
    assert [turn["user"] for turn in first.json["turns"]] == ["My dog is called Pixel."]
    second = command("chat", "--storage", path, "--session", "another", stdin="What is my dog called?\n")
    assert second.code == 0
    assert "Pixel" in second.out


def test_a_chat_is_with_the_only_person_there(full):
    assert command("chat", "--storage", full, "--json", stdin="").json["user"] == "ada"
    asyncio.run(put_only(full, "bob", "one", "hello"))
    ran = command("chat", "--storage", full, stdin="")
    assert (ran.code, "ada" in ran.err, "--user" in ran.err) == (2, True, True)
    assert command("chat", "--session", "", "--storage", full, "--user", "ada").code == 2


def test_a_chat_needs_no_storage_and_shows_why(tmp_path):
    ran = command("chat", stdin="What is 17 * 23?\n/why\n")
    assert ran.code == 0
    assert "391" in ran.out
    assert "RetrievedMessages" in ran.out
    assert "Nothing is kept" in ran.out


def test_a_chat_refuses_an_address_that_is_none():
    ran = command("chat", "--llm", "nonsense")
    assert (ran.code, len(ran.err.splitlines())) == (2, 3)


def test_the_notebooks_are_copied_and_what_was_changed_is_not_overwritten_unasked(tmp_path):
    books = sorted(book.name for book in (ROOT / "notebooks").glob("*.ipynb"))
    target = tmp_path / "deep" / "books"
    assert [Path(one).name for one in command("notebooks", target, "--json").json["copied"]] == books
    (target / books[0]).write_text("mine", encoding="utf-8")
    assert command("notebooks", target, stdin="n\n").code == 1
    assert (target / books[0]).read_text(encoding="utf-8") == "mine"
    assert command("notebooks", target, "--yes").code == 0
    assert (target / books[0]).read_bytes() == (ROOT / "notebooks" / books[0]).read_bytes()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert command("notebooks", tmp_path / "file").code == 2


def test_the_demo_is_played_with_the_options_and_its_exit_code(monkeypatch):
    played: list[list[str]] = []

    def play(arguments: list[str]) -> int:
        played.append(arguments)
        sys.stdout.write("1. Live.\n")
        return 1

    monkeypatch.setattr("llama_index_memory_tiers.cli.app.play_demo", play)
    ran = command("demo", "--questions", "3", "--json")
    assert (ran.code, ran.json, played) == (1, {"kept": False, "output": ["1. Live."]}, [["--questions", "3"]])
    assert command("demo").out == "1. Live.\n"


# --- the whole ------------------------------------------------------------------------------------------------


def test_it_runs_as_a_process_of_its_own(full):
    done = subprocess.run(
        [sys.executable, "-m", "llama_index_memory_tiers.cli", "search", "oolong", "-k", "1", "--json"],
        cwd=ROOT, env={**os.environ, "MEMORY_TIERS_STORAGE": str(full)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["found"][0]["text"] == "I drink oolong tea."


def test_without_the_extra_it_says_which_one_to_install():
    code = """
import sys
sys.modules["typer"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "typer" else real(name, *rest)
from llama_index_memory_tiers.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "llama-index-memory-tiers[cli]" in done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_every_command_and_option_says_what_it_is_for():
    reference = importlib.import_module("llama_index_memory_tiers.cli.reference")
    for name, made in reference.commands().items():
        assert made.help, name
        assert all(getattr(option, "help", None) for option in made.params), name
        assert name == "demo" or "--json" in {opt for option in made.params for opt in option.opts}


def test_the_list_of_commands_is_whole_on_a_narrow_terminal():
    ran = command("--help", COLUMNS="80", TERMINAL_WIDTH="80")
    reference = importlib.import_module("llama_index_memory_tiers.cli.reference")
    for name, made in reference.commands().items():
        assert re.search(rf"^  {name} +{re.escape(made.help.partition('.')[0])}\.$", ran.out, re.MULTILINE), name


def test_the_reference_is_what_help_says():
    reference = importlib.import_module("llama_index_memory_tiers.cli.reference")
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == reference.as_markdown(), "run: python -m llama_index_memory_tiers.cli.reference docs/cli.md"


async def test_blocks_that_a_storage_knows_are_told_by_their_records(full):
    async with Storage(full) as storage:
        blocks = await places.known_blocks(storage, Scope("x", "ada"))
        assert {type(block) for block in blocks} == {VectorMemoryBlock, FactExtractionMemoryBlock}
        assert await places.known_blocks(storage, Scope("x", "nobody else")) == []
        assert (await places.chosen_scope(storage, Where())).user_id == "ada"
        assert await rows(storage, "SELECT 1 FROM {t}_sessions WHERE session_id LIKE 'look-%'") == []


def test_a_factory_without_a_person_is_asked_about_the_only_one(full, factories):
    yours = ("--memory", f"{factories}:memory", "--storage", full)
    before = dump(full)
    assert "oolong" in command("search", "tea oolong", *yours).out
    assert dump(full) == before
    target = full.parent / "all.jsonl"
    assert command("export", target, *yours).code == 0
    assert "oolong" in target.read_text("utf-8")
    assert command("forget", "--contains", "oolong", "--yes", *yours).code == 0
    assert "oolong" not in command("search", "tea oolong", *yours).out


def test_with_several_people_a_factory_without_one_is_refused(full, factories):
    asyncio.run(fill(full, "bob", "friday", "I drink coffee."))
    ran = command("forget", "--contains", "tea", "--yes", "--memory", f"{factories}:memory", "--storage", full)
    assert (ran.code, "ada" in ran.err, "--user" in ran.err) == (2, True, True)
