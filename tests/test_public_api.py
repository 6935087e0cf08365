"""The public surface: a list that changes only on purpose, light to import, typed, and quiet."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llama_index_memory_tiers

PACKAGE = Path(inspect.getfile(llama_index_memory_tiers)).parent
PROJECT = PACKAGE.parent

PUBLIC = [
    "AgentStatement",
    "BudgetError",
    "ByAge",
    "ByDisuse",
    "ByHeat",
    "ByImportance",
    "Chat",
    "ChatTurn",
    "ConfigurationError",
    "ContextReport",
    "Episode",
    "EpisodeStep",
    "EpisodicMemoryBlock",
    "Fact",
    "FactExtractionMemoryBlock",
    "FactProposal",
    "FlushReport",
    "ForgetFilter",
    "ForgetReceipt",
    "HeatMemoryBlock",
    "InvalidMessageError",
    "JournalMemoryBlock",
    "MaintenanceReport",
    "MemoryTiersError",
    "MemoryView",
    "MessageBoard",
    "NearDuplicates",
    "Partition",
    "ProfileVersion",
    "Provenance",
    "RecallOutcome",
    "RecallQuestion",
    "RecallReport",
    "Recollection",
    "Redactor",
    "StaticMemoryBlock",
    "Storage",
    "StorageError",
    "StoredMessage",
    "SummaryMemoryBlock",
    "Takeover",
    "TieredChatStore",
    "TieredMemory",
    "TieredMemoryBlock",
    "TiersReport",
    "TokenBudget",
    "ToolUse",
    "TransferReport",
    "VectorMemoryBlock",
    "WorkingMemoryBlock",
    "WritePolicy",
    "attributed",
    "evaluate_recall",
    "import_memoryos",
    "read_chat_file",
]
OPTIONAL = ["asyncpg", "IPython", "matplotlib", "pandas", "pytest", "rich", "typer", "wordllama"]


def in_a_new_process(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_public_names_are_these() -> None:
    assert sorted(llama_index_memory_tiers.__all__) == PUBLIC
    assert list(llama_index_memory_tiers.__all__) == sorted(llama_index_memory_tiers.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported_and_says_what_it_is_for(name: str) -> None:
    value = getattr(llama_index_memory_tiers, name)
    assert inspect.getdoc(value)
    assert value.__module__.split(".")[0] == "llama_index_memory_tiers"


def test_everything_else_in_the_package_is_a_module_or_private() -> None:
    found = {
        name
        for name, value in vars(llama_index_memory_tiers).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert found == set(PUBLIC)


def test_the_version_is_that_of_the_project_file() -> None:
    written = re.search(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert written is not None
    assert llama_index_memory_tiers.__version__ == written[1]


def test_type_hints_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert "Typing :: Typed" in (PROJECT / "pyproject.toml").read_text("utf-8")


def test_importing_the_package_needs_no_optional_package_no_network_and_no_file() -> None:
    out = in_a_new_process(
        f"""
import json, os, socket, sys, warnings
warnings.simplefilter("default")  # LlamaIndex's own dependencies may warn
import llama_index.core.memory, qdrant_client, sqlalchemy.ext.asyncio, numpy, tiktoken  # what is required anyway
before = set(sys.modules)
def refuse(*_, **__):
    raise RuntimeError("network at import")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" and given[1] and
                 set(str(given[1])) & set("wax+") and not str(given[0]).endswith((".pyc",)) and "__pycache__" not in str(given[0]) else None)
import llama_index_memory_tiers
print(json.dumps([sorted({{name.split(".")[0] for name in set(sys.modules) - before}} & set({OPTIONAL!r})), opened]))
"""
    )
    assert json.loads(out.splitlines()[-1]) == [[], []]


def test_importing_the_package_touches_no_model_setting_and_starts_no_thread() -> None:
    out = in_a_new_process(
        """
import threading, warnings
warnings.simplefilter("default")
import llama_index.core
before = threading.active_count()
import llama_index_memory_tiers
from llama_index.core.settings import Settings
print(Settings._llm, Settings._embed_model, threading.active_count() - before)
"""
    )
    assert out.splitlines()[-1] == "None None 0"


@pytest.mark.parametrize(
    "module",
    sorted(
        ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if "__main__" not in path.name
    ),
)
def test_every_module_says_in_one_line_what_it_is_for(module: str) -> None:
    found = importlib.import_module(module)
    first = (inspect.getdoc(found) or "").partition("\n")[0]
    assert first.endswith("."), f"{module}: {first!r}"
