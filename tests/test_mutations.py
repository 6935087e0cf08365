"""Each guard is needed: with it taken out, the test of its promise fails. Part of `make soak`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import SOAK

ROOT = Path(__file__).parent.parent
PACKAGE = "llama_index_memory_tiers"


@dataclass(frozen=True)
class Mutation:
    """A guard, how to take it out, and which tests must notice."""

    guard: str
    file: str
    old: str
    new: str
    tests: str


MATRIX = "tests/test_fault_matrix.py::test_no_fault_loses_doubles_or_brings_back_anything[file]"
FORGETTING = "tests/storage/test_forgetting.py::"
TRANSFER = "tests/storage/test_transfer.py::"

MUTATIONS = [
    Mutation(
        "a retried put leaves out what an unknown commit has stored",
        "storage/log.py",
        "if tries > 1:",
        "if tries > 99:",
        "tests/storage/test_log.py",
    ),
    Mutation(
        "a server that is away is waited for",
        "storage/faults.py",
        "not isinstance(error, lasting)",
        "False",
        "tests/storage/test_database.py::test_a_server_that_is_away_is_waited_for",
    ),
    Mutation(
        "a cursor moves only for the attempt that claimed it",
        "storage/cursors.py",
        '.where(mine, c.c.pos == bindparam("b_lo"), c.c.claim == bindparam("b_me"))',
        ".where(mine)",
        "tests/test_delivery.py",
    ),
    Mutation(
        "a merge whose owner was forgotten meanwhile is rolled back",
        "storage/records.py",
        "if now_epoch != epoch or not await fence(connection):",
        "if not await fence(connection):",
        "tests/storage/test_records.py",
    ),
    Mutation(
        "a lost reply to a merge is not merged again",
        "storage/records.py",
        "if now_epoch != epoch or not await fence(connection):",
        "if now_epoch != epoch or (await fence(connection) and False):",
        MATRIX,
    ),
    Mutation(
        "an interrupted job goes on at the next start",
        "storage/__init__.py",
        "self._database.after_open = self.forgetting.resume",
        "self._database.after_open = None",
        f"{FORGETTING}test_an_interrupted_job_is_finished_when_the_storage_is_opened_again",
    ),
    Mutation(
        "a job is written down before it begins",
        "storage/__init__.py",
        "self._database.after_open = self.forgetting.resume",
        "self._database.after_open = None",
        MATRIX,
    ),
    Mutation(
        "claims on a session are void when something of it is forgotten",
        "storage/forgetting.py",
        "            await eraser.void_claims(connection, sid)\n",
        "",
        f"{FORGETTING}test_a_claim_on_the_session_is_void_afterwards",
    ),
    Mutation(
        "records that came from a forgotten message go with it",
        "storage/forgetting.py",
        "counts = await eraser.delete(connection, rows.values(), revisions)",
        "counts = await eraser.delete(connection, (), revisions)",
        f"{FORGETTING}test_a_forgotten_message_leaves_no_text_in_any_table",
    ),
    Mutation(
        "a receipt comes from a second reading",
        "storage/forgetting.py",
        'left["messages"] += len(page)',
        "pass",
        f"{FORGETTING}test_a_receipt_is_not_taken_in_by_deletes_that_did_nothing",
    ),
    Mutation(
        "what a forgotten record had replaced is current again",
        "storage/erasing.py",
        "            await self._relink(connection, part, replaced, revisions)\n",
        "",
        f"{FORGETTING}test_a_record_with_one_forgotten_source_goes_and_what_it_had_replaced_is_current_again",
    ),
    Mutation(
        "a deletion reaches its user only",
        "storage/meant.py",
        "select(s.c.sid, s.c.head_seq).where(s.c.user_id == selection.user_id)",
        "select(s.c.sid, s.c.head_seq)",
        f"{FORGETTING}test_ids_of_others_are_out_of_reach",
    ),
    Mutation(
        "a deletion by id reaches the records of its user only",
        "storage/meant.py",
        "query.where(self._of_person(selection.user_id)) for query in named",
        "query for query in named",
        f"{FORGETTING}test_ids_of_others_are_out_of_reach",
    ),
    Mutation(
        "packed indexes go",
        "storage/packs.py",
        "    await connection.execute(delete(tables.packs).where(tables.packs.c.owner == owner))\n",
        "",
        f"{FORGETTING}test_packed_indexes_of_before_go",
    ),
    Mutation(
        "cached windows go",
        "storage/forgetting.py",
        "        self._log.drop_cached(run.selection.user_id, run.selection.session_id)\n",
        "",
        f"{FORGETTING}test_the_running_turn_as_it_was_said_and_remembered_recalls_go_from_memory",
    ),
    Mutation(
        "the write-ahead log is emptied",
        "storage/database.py",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA wal_checkpoint(PASSIVE)",
        f"{FORGETTING}test_the_bytes_of_the_file_hold_no_forgotten_text",
    ),
    Mutation(
        "deleted text is overwritten in the file",
        "storage/forgetting.py",
        'await connection.exec_driver_sql("PRAGMA secure_delete=ON")',
        'await connection.exec_driver_sql("PRAGMA secure_delete=OFF")',
        f"{FORGETTING}test_the_bytes_of_the_file_hold_no_forgotten_text",
    ),
    Mutation(
        "a changed file is noticed",
        "storage/transfer.py",
        'if fields != {"end": counts, "digest": digest.hexdigest()} or file.read(1):',
        "if False:",
        f"{TRANSFER}test_a_spoilt_file_is_refused_and_leaves_nothing_behind",
    ),
    Mutation(
        "a session that holds something else is refused",
        "storage/importing.py",
        'if found is None or _said(_clean(state.redactor, "message", found)[1]) != _said(fields):',
        "if found is None:",
        f"{TRANSFER}test_what_was_forgotten_does_not_come_back_by_an_import",
    ),
    Mutation(
        "an export of another user is refused",
        "storage/transfer.py",
        'if (header.get("user_id") or "") != user_id:',
        "if False:",
        f"{TRANSFER}test_an_export_of_another_user_is_refused",
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_a_guard_stands_once_and_its_test_is_there(mutation: Mutation) -> None:
    assert (ROOT / PACKAGE / mutation.file).read_text("utf-8").count(mutation.old) == 1
    file, _, test = mutation.tests.partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text("utf-8")


@pytest.mark.skipif(not SOAK, reason="an hour of tests: make soak")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guard)
def test_a_guard_is_missed_when_it_is_taken_out(mutation: Mutation, tmp_path: Path) -> None:
    for name in (PACKAGE, "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / PACKAGE / mutation.file
    source = path.read_text("utf-8")
    assert source.count(mutation.old) == 1
    path.write_text(source.replace(mutation.old, mutation.new), "utf-8")
    environment = {**os.environ, "MEMORY_TIERS_SOAK": "0"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", mutation.tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:]  # tests failed; anything else is no test result
