"""JournalMemoryBlock on real folders: exact keys, whole files, the user's days, nobody else's folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_memory_tiers import ConfigurationError, ForgetFilter, JournalMemoryBlock, Storage, TieredMemory
from llama_index_memory_tiers.blocks.journal.block import Journal
from llama_index_memory_tiers.blocks.journal.files import OwnerFiles, folder_name
from llama_index_memory_tiers.blocks.journal.text import heading, inert, read, removed, sections, written
from llama_index_memory_tiers.records import Scope
from tests.doubles import Clock, said

SECRET = "hunter2secretvalue"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journals"


def memory_of(
    storage: Storage, folder: Path, user: str | None = "ann", session: str = "s1", **fields: object
) -> TieredMemory:
    block = JournalMemoryBlock(**{"directory": folder, **fields})
    return TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=[block])


def journal_of(memory: TieredMemory, **settings: str) -> Journal:
    block = memory.memory_blocks[0]
    assert isinstance(block, JournalMemoryBlock)
    return block.of(memory, **settings)


def written_files(folder: Path) -> set[Path]:
    return set(folder.rglob("*.md"))


async def context(memory: TieredMemory) -> str:
    return "\n".join(message.content or "" for message in await memory.aget(input="hello"))


# --- MEMORY.md --------------------------------------------------------------------------------------------------

BY_HAND = """\
# What I know

Written by Ann.

## ab

about ab

## a

old

```sh
## not a heading
```

## a b

about a b
"""


def test_keys_are_exact() -> None:
    changed = written(BY_HAND, "a", "new")
    assert read(changed, "a") == "new"
    assert changed == BY_HAND.replace("old\n\n```sh\n## not a heading\n```", "new")
    assert [section.key for section in sections(BY_HAND)] == ["", "ab", "a", "a b"]
    assert read(BY_HAND, "A") is None
    assert read(BY_HAND, "not a heading") is None
    assert removed(BY_HAND, "b") is None
    assert removed(BY_HAND, "a") == BY_HAND.replace("## a\n\nold\n\n```sh\n## not a heading\n```\n\n", "")


def test_line_ends_and_foreign_parts_stay_as_they_are() -> None:
    by_hand = BY_HAND.replace("\n", "\r\n")
    assert written(by_hand, "a", "new\nlines") == by_hand.replace(
        "old\r\n\r\n```sh\r\n## not a heading\r\n```", "new\r\nlines"
    )


TEXTS = st.text(alphabet=st.sampled_from("ab #\\`~\n")) | st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.tuples(st.sampled_from(["a", "ab", "a b", "C#", "## a"]), TEXTS), max_size=6))
def test_whatever_is_written_opens_no_section_and_reads_as_the_last_one_said(pairs: list[tuple[str, str]]) -> None:
    text, wanted = "", {}
    for key, body in pairs:
        words = heading(key)
        text = written(text, words, body)
        wanted[words] = body
    assert [section.key for section in sections(text)][1:] == list(wanted)
    for key, body in wanted.items():
        plain = "\n".join(body.splitlines()).strip("\n").rstrip()
        found = read(text, key)
        assert found is not None
        assert found == plain or found.startswith(plain)  # an open code fence was closed
        assert written(text, key, found) == text


async def test_keys_are_written_read_and_removed(storage: Storage, folder: Path) -> None:
    journal = journal_of(memory_of(storage, folder))
    assert await journal.read() == ""
    assert await journal.get("tea") is None
    await journal.set("tea", "green")
    await journal.set("coffee", "## none\nblack")
    await journal.set("tea", "black")
    assert await journal.keys() == ["tea", "coffee"]
    assert (await journal.get("tea"), await journal.get("coffee")) == ("black", "## none\nblack")
    assert await journal.remove("tea")
    assert not await journal.remove("tea")
    assert await journal.keys() == ["coffee"]


async def test_what_people_write_by_hand_is_read_and_kept(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    journal = journal_of(memory)
    await journal.set("tea", "green")
    path = journal.folder / "MEMORY.md"
    path.write_bytes(b"I wrote this. \xff\n\n" + path.read_bytes())
    assert "I wrote this." in await context(memory)
    await journal.set("tea", "black")
    assert path.read_bytes() == b"I wrote this. \xff\n\n## tea\n\nblack\n"


async def test_an_editor_that_saves_meanwhile_loses_nothing(folder: Path) -> None:
    files = OwnerFiles(folder, 10_000)
    files.change_memory(lambda _: "## a\n\n1\n")
    path = folder / "MEMORY.md"
    saved: list[int] = []

    def change(old: str) -> str:
        if not saved:
            saved.append(path.write_text(old + "\n## by hand\n\nkept\n"))
        return written(old, "a", "2")

    files.change_memory(change)
    assert (read(files.memory(), "a"), read(files.memory(), "by hand")) == ("2", "kept")


async def test_keys_written_at_once_are_all_there(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    await asyncio.gather(*(journal_of(memory).set(f"key {number}", str(number)) for number in range(20)))
    journal = journal_of(memory)
    assert {key: await journal.get(key) for key in await journal.keys()} == {f"key {n}": str(n) for n in range(20)}


WRITER = """
import sys
from pathlib import Path
from llama_index_memory_tiers.blocks.journal.files import OwnerFiles
from llama_index_memory_tiers.blocks.journal.text import written
files = OwnerFiles(Path(sys.argv[1]), 10_000_000)
for number in range(10**9):
    files.change_memory(lambda old: written(old, "a", f"{number} " * 50_000))
"""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that writes all the time, until it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_whoever_reads_and_a_kill_find_the_old_file_or_the_new_one(folder: Path) -> None:
    files = OwnerFiles(folder, 10_000_000)
    seen = set()
    with writing(folder) as child:
        while len(seen) < 5:
            assert child.poll() is None
            found = tuple((read(files.memory(), "a") or "").split())
            assert len(found) == 50_000 or (not seen and not found)
            assert len(set(found)) <= 1
            seen.update(found)
    found = tuple((read(files.memory(), "a") or "").split())
    assert (len(found), len(set(found))) == (50_000, 1)
    files.change_memory(lambda old: written(old, "b", "the lock of the dead one is free"))
    assert read(files.memory(), "b") is not None


def test_whoever_writes_waits_for_other_processes(folder: Path) -> None:
    files = OwnerFiles(folder, 10_000)
    files.append(date(2026, 3, 2), "first\n")
    with next((folder.parent / ".locks").iterdir()).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one open file is to another what a process is to another
        writers = [
            threading.Thread(target=files.append, args=(date(2026, 3, 2), "second\n")),
            threading.Thread(target=files.change_memory, args=(lambda _: "text\n",)),
        ]
        for writer in writers:
            writer.start()
        writers[0].join(timeout=0.2)
        assert (files.memory(), files.day(date(2026, 3, 2))) == ("", "first\n")
    for writer in writers:
        writer.join()
    assert (files.memory(), files.day(date(2026, 3, 2))) == ("text\n", "first\nsecond\n")


WRITING = """
import sys
from datetime import date
from pathlib import Path
from llama_index_memory_tiers.blocks.journal.files import OwnerFiles
files = OwnerFiles(Path(sys.argv[1]), 10_000)
print("ready", flush=True)
files.append(date(2026, 3, 2), "a day\\n")
files.change_memory(lambda old: old + "a note\\n")
"""


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_whoever_waits_while_a_folder_is_erased_writes_into_a_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OwnerFiles(folder / "ann", 10_000)
    files.append(date(2026, 3, 1), "erased\n")
    (files.folder / ".lock").touch()  # as earlier versions left it
    waiting: list[subprocess.Popen[str]] = []
    delete = shutil.rmtree

    def late(path: Path) -> None:
        child = started(WRITING, path)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        waiting.append(child)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        delete(path)
        assert not path.exists()

    monkeypatch.setattr(shutil, "rmtree", late)
    assert files.erase() == 1
    _, trouble = waiting[0].communicate(timeout=30)
    assert (waiting[0].returncode, trouble) == (0, "")
    assert [files.day(day) for day, _, _ in files.days()] == ["a day\n"]
    assert files.memory() == "a note\n"


def test_many_write_while_a_folder_is_erased_again_and_again(folder: Path) -> None:
    files = OwnerFiles(folder / "ann", 1_000_000)
    loop = WRITING.replace("files.append", "for _ in range(40): files.append")
    children = [started(loop, files.folder) for _ in range(2)]
    while any(child.poll() is None for child in children):
        files.erase()
    assert [child.communicate() for child in children] == [("ready\n", "")] * 2
    files.erase()
    assert list(folder.iterdir()) == [folder / ".locks"]


def test_what_is_left_of_an_erased_folder_does_not_say_whose_it_was(folder: Path) -> None:
    scope = Scope("ann", "s")
    files = OwnerFiles(folder / folder_name(scope), 10_000)
    files.append(date(2026, 3, 1), "erased\n")
    assert files.erase() == 1
    left = [path.name for path in folder.rglob("*")]
    assert not any("ann" in name or folder_name(scope)[-20:] in name for name in left)
    assert files.erase() == 0


def test_days_are_written_as_bytes_where_files_of_text_are_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real = os.open

    def noting(path: Any, flags: int, *rest: int, **more: Any) -> int:
        opened.append(flags)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "O_BINARY", os.O_CLOEXEC, raising=False)  # Windows has it
    monkeypatch.setattr(os, "open", noting)
    OwnerFiles(folder, 10_000).append(date(2026, 3, 1), "a day\n")
    assert [bool(flags & os.O_CLOEXEC) for flags in opened if flags & os.O_APPEND] == [True]


async def test_a_memory_file_beyond_its_bound_is_refused_and_may_shrink(storage: Storage, folder: Path) -> None:
    journal = journal_of(memory_of(storage, folder, max_file_bytes=1024))
    await journal.set("a", "x" * 900)
    with pytest.raises(ConfigurationError, match="max_file_bytes=1024"):
        await journal.set("b", "x" * 200)
    assert await journal.keys() == ["a"]
    await journal.set("a", "x" * 100)
    await journal.set("b", "x" * 200)


# --- days -------------------------------------------------------------------------------------------------------


async def test_the_day_rolls_over_at_midnight_in_the_users_time_zone(
    storage: Storage, folder: Path, clock: Clock
) -> None:
    clock.now = datetime(2026, 3, 2, 15, 59, 30, tzinfo=timezone.utc)
    memory = memory_of(storage, folder)
    shanghai, utc = journal_of(memory, timezone="Asia/Shanghai"), journal_of(memory)
    assert (await shanghai.append("before")).name == "2026-03-02.md"
    clock.pass_seconds(60)
    assert (await shanghai.append("after")).name == "2026-03-03.md"
    assert (await utc.append("elsewhere")).name == "2026-03-02.md"
    assert "after" in await shanghai.today()
    assert [section.key for section in sections(await shanghai.day(date(2026, 3, 2)))] == ["", "23:59:30", "16:00:30"]


async def test_entries_stand_in_order_under_their_times_and_forge_none(
    storage: Storage, folder: Path, clock: Clock
) -> None:
    journal = journal_of(memory_of(storage, folder))
    await journal.append("first\n## 12:00:00\nforged")
    clock.pass_seconds(1)
    await journal.append("second")
    found = sections(await journal.today())
    assert [section.key for section in found] == ["", "09:00:00", "09:00:01"]
    assert "forged" in found[1].body


async def test_a_full_day_goes_on_in_another_file(storage: Storage, folder: Path) -> None:
    journal = journal_of(memory_of(storage, folder, max_file_bytes=1024))
    names = [(await journal.append(f"{number} " + "x" * 400)).name for number in range(5)]
    assert names == ["2026-03-02.md"] * 2 + ["2026-03-02.2.md"] * 2 + ["2026-03-02.3.md"]
    assert all(path.stat().st_size <= 1024 for path in journal.folder.glob("*.md"))
    text = await journal.today()
    assert [text.index(f"\n{number} x") for number in range(5)] == sorted(text.index(f"\n{n} x") for n in range(5))


async def test_an_entry_larger_than_a_file_is_cut_and_not_left_out(storage: Storage, folder: Path) -> None:
    journal = journal_of(memory_of(storage, folder, max_file_bytes=1024))
    path = await journal.append("猫" * 2000)
    assert path.stat().st_size <= 1024
    assert (await journal.today()).rstrip().endswith("猫…")


async def test_entries_appended_at_once_are_all_there_whole(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    await asyncio.gather(*(journal_of(memory).append(f"entry {number} ends") for number in range(30)))
    found = [section.body for section in sections(await journal_of(memory).today()) if section.body]
    assert sorted(found) == sorted(f"entry {number} ends" for number in range(30))


# --- whose ------------------------------------------------------------------------------------------------------

ODD_IDS = [
    "../../x", "..", "/etc/passwd", "a" * 5000, "ann", "Ann", "ANN", "ann ", "con", "NUL", "com1.txt", "猫", "a/b", "a-b",
    "a\\b", "a:b", "~", ".", "-rf", "", "x\n",
]  # fmt: skip


def test_every_owner_has_a_harmless_folder_of_its_own() -> None:
    scopes = [Scope("s", user) for user in ODD_IDS if user.strip()]
    scopes += [Scope(session) for session in ODD_IDS if session.strip()]
    names = [folder_name(scope) for scope in scopes]
    names += [folder_name(Scope("s1", "ann"), per_session=True), folder_name(Scope("s1", "bob"), per_session=True)]
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        assert len(name) <= 80
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert name[0] in "us"
        assert "-" in name  # no reserved name of Windows has one


@pytest.mark.parametrize("user", ["../../x", "a" * 5000, "con", "猫"])
async def test_nothing_is_written_outside_of_the_directory(storage: Storage, folder: Path, user: str) -> None:
    journal = journal_of(memory_of(storage, folder, user))
    await journal.set("a", "mine")
    await journal.append("mine")
    assert await journal.get("a") == "mine"
    assert journal.folder.parent == folder
    assert written_files(folder.parent) == {journal.folder / "MEMORY.md", journal.folder / "2026-03-02.md"}


async def test_nobody_sees_the_journal_of_another(storage: Storage, folder: Path) -> None:
    ann = memory_of(storage, folder, "ann")
    await journal_of(ann).set("present", "a bicycle")
    await journal_of(ann).append("bought a bicycle")
    assert (await context(ann)).count("bicycle") == 2
    assert (await context(ann.for_session("s2"))).count("bicycle") == 2
    for other in (
        ann.for_session("s1", user_id="bob"),
        ann.for_session("s1", user_id="Ann"),
        memory_of(storage, folder, None),
    ):
        assert "bicycle" not in await context(other)
        assert await journal_of(other).read() == await journal_of(other).today() == ""


# --- in a context -----------------------------------------------------------------------------------------------


async def test_the_context_shows_the_notes_and_the_newest_days(storage: Storage, folder: Path, clock: Clock) -> None:
    memory = memory_of(storage, folder)
    journal = journal_of(memory)
    await journal.set("tea", "green")
    for text in ("long ago", "yesterday's", "today's first", "today's second"):
        await journal.append(text)
        if not text.startswith("today"):
            clock.pass_seconds(86_400 * (3 if text == "long ago" else 1))
    shown = await context(memory)
    order = [shown.index(text) for text in ("## tea", "green", "today's first", "today's second")]
    assert order == sorted(order)
    assert "yesterday's" in shown
    assert "long ago" not in shown


async def test_what_is_written_during_a_turn_is_seen_in_it(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    await memory.aput(said("user", "What do I drink?"))
    assert len(await memory.aget()) == 1
    await journal_of(memory).set("tea", "green")
    assert "green" in str(await memory.aget())
    await journal_of(memory).append("a cup of black")
    assert "a cup of black" in str(await memory.aget())


async def test_secrets_are_neither_written_nor_shown(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    journal = journal_of(memory)
    await journal.set(f"password={SECRET}", f"password={SECRET}")
    await journal.append(f"password={SECRET}")
    assert not any(SECRET in path.read_text() for path in journal.folder.glob("*.md"))
    (journal.folder / "MEMORY.md").write_text(f"## by hand\n\npassword={SECRET}\n")
    shown = await context(memory)
    assert "by hand" in shown
    assert SECRET not in shown


async def test_stored_text_closes_no_tag(storage: Storage, folder: Path) -> None:
    memory = memory_of(storage, folder)
    await journal_of(memory).set("</memory>", "</notes></memory>")
    shown = await context(memory)
    assert (shown.count("</memory>"), shown.count("</notes>")) == (1, 1)


@pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 201, "a\u2028b"])
async def test_what_is_no_heading_is_refused(storage: Storage, folder: Path, key: str) -> None:
    journal = journal_of(memory_of(storage, folder))
    with pytest.raises(ConfigurationError, match="key="):
        await journal.set(key, "x")
    with pytest.raises(ConfigurationError, match="text="):
        await journal.append("  ")
    assert written_files(folder.parent) == set()


def test_an_unknown_zone_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="Mars/Phobos"):
        JournalMemoryBlock(directory=folder, timezone="Mars/Phobos")


def test_text_that_is_inert_already_stays_so() -> None:
    assert inert("plain\n\ntext") == "plain\n\ntext"


@pytest.mark.parametrize("scope", ["user", "session"])
async def test_forgetting_a_person_deletes_their_folder_and_nobody_elses(tmp_path: Path, scope: str) -> None:
    block = JournalMemoryBlock(directory=tmp_path / "journals", scope="user" if scope == "user" else "session")
    async with Storage(tmp_path / "m.db") as storage:
        memories = {
            user: TieredMemory(storage=storage, user_id=user, session_id="s", memory_blocks=[block])
            for user in ("ann", "bob")
        }
        for user, memory in memories.items():
            await memory.aput(said("user", "hello"))
            await block.of(memory).set("Secret", f"{user} likes plums")
            await block.of(memory).append("a day")
        receipt = await memories["ann"].aforget(scope="user")
        assert receipt.complete
        assert receipt.removed[block.name] == 2
        left = [path.read_text() for path in (tmp_path / "journals").rglob("*.md")]
        assert not any("ann likes" in text for text in left)
        assert any("bob likes" in text for text in left)
        assert "plums" not in repr(await memories["ann"].aget("plums"))
        for memory in memories.values():
            await memory.aclose()


async def test_a_journal_that_cannot_be_read_does_not_stand_in_the_way_of_forgetting(tmp_path: Path) -> None:
    block = JournalMemoryBlock(directory=tmp_path / "journals")
    async with Storage(tmp_path / "m.db") as storage:
        memory = TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=[block])
        await memory.aput(said("user", "the code is plum"))
        await block.of(memory).set("Tea", "green")
        [page] = (tmp_path / "journals").rglob("MEMORY.md")
        page.unlink()
        page.mkdir()
        receipt = await memory.aforget(filter=ForgetFilter(contains="plum"))
        assert [entry.error for entry in receipt.entries if entry.store == block.name] == ["IsADirectoryError"]
        assert not receipt.complete
        assert await memory.amessages() == []
        await memory.aclose()


async def test_what_is_forgotten_is_looked_for_in_the_files_however_it_is_written(tmp_path: Path) -> None:
    block = JournalMemoryBlock(directory=tmp_path / "journals")
    async with Storage(tmp_path / "m.db") as storage:
        memory = TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=[block])
        await block.of(memory).set("Friends", "Zoe\u0308 and Z\u200boë")
        receipt = await memory.aforget(filter=ForgetFilter(contains="ZO\u00cb"))
        assert [entry.left for entry in receipt.entries if entry.store == block.name] == [2]
        await memory.aclose()


async def test_forgetting_one_session_leaves_what_belongs_to_the_person(tmp_path: Path) -> None:
    block = JournalMemoryBlock(directory=tmp_path / "journals")
    async with Storage(tmp_path / "m.db") as storage:
        memory = TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=[block])
        await block.of(memory).set("Tea", "green")
        await memory.aforget(scope="session")
        assert await block.of(memory).get("Tea") == "green"
        await memory.aclose()
