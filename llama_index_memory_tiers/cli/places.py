"""Which memory a command looks at: a storage with what is in it, or a factory of yours."""

from __future__ import annotations

import contextlib
import inspect
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_memory_tiers.blocks import (
    EpisodicMemoryBlock,
    FactExtractionMemoryBlock,
    HeatMemoryBlock,
    SummaryMemoryBlock,
    TieredMemoryBlock,
    VectorMemoryBlock,
    WorkingMemoryBlock,
)
from llama_index_memory_tiers.errors import ConfigurationError, MemoryTiersError
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME, Storage
from llama_index_memory_tiers.testing import QuotingLLM, WordLlamaEmbedding

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class Where:
    """What the options said.

    Args:
        storage: File path or database URI.
        table_name: Prefix of the tables.
        db_schema: Database schema, PostgreSQL only.
        user: The person.
        session: The conversation.
        memory: `module:factory` of a memory with your blocks.
    """

    storage: str | None = None
    table_name: str = DEFAULT_TABLE_NAME
    db_schema: str | None = None
    user: str | None = None
    session: str | None = None
    memory: str | None = None


@contextlib.asynccontextmanager
async def opened_storage(where: Where, *, make: bool = False) -> AsyncIterator[Storage]:
    """Open the storage that was named.

    Args:
        where: See `Where`.
        make: Make what is missing; else it is refused, so that a misspelt path is not taken for an empty memory.

    Yields:
        The storage, open.

    Raises:
        ConfigurationError: None was named, or it holds no tables of ours.
    """
    if not where.storage:
        raise ConfigurationError(
            "No storage was named.",
            allowed="It is the path of a database file, or a URI such as postgresql+asyncpg://user@host/database.",
            remedy="Pass --storage, or set MEMORY_TIERS_STORAGE.",
        )
    storage = Storage(where.storage, table_name=where.table_name, db_schema=where.db_schema)
    new = storage.file is not None and not storage.file.exists()
    done = False
    try:
        if not make:
            await _check_made(storage)
        yield await storage.aopen()
        done = True
    finally:
        unused = new and not done and await _is_empty(storage)
        await storage.aclose()
        if unused and storage.file is not None:
            storage.file.unlink(missing_ok=True)


async def _is_empty(storage: Storage) -> bool:
    """Whether a file was made, and nothing came into it."""
    if storage.file is None or not storage.file.exists():
        return False
    with contextlib.suppress(MemoryTiersError):
        return not await storage.survey.people()
    return False


async def _check_made(storage: Storage) -> None:
    if not await storage.amade():
        raise ConfigurationError(
            f"--storage={storage.address} was given.",
            allowed=f"It holds tables that begin with {storage.table_name}_; there are none.",
            remedy="Correct the path, --table-name or --db-schema; a memory makes its tables at its first use.",
        )


async def _check_known(storage: Storage, where: Where, user: str | None = None) -> None:
    """Refuse a user or session that the storage does not know: a slip would be taken for an empty memory.

    Raises:
        ConfigurationError: Names those that are known.
    """
    people = [person.user_id for person in await storage.survey.people()]
    # Notes need no session.
    if where.user not in (None, *people) and not await storage.survey.kept(where.user, now=storage.now()):
        raise _unknown("--user", where.user or "", [name for name in people if name])
    if where.session is None:
        return
    user = where.user if where.user is not None else user
    whose = people if user is None else [user]
    sessions = [session.session_id for each in whose for session in await storage.log.sessions(each)]
    if where.session not in sessions:
        raise _unknown("--session", where.session, sessions)


@contextlib.asynccontextmanager
async def opened_memory(
    where: Where, *, make: bool = False, working: bool = False, everybody: bool = False
) -> AsyncIterator[TieredMemory]:
    """Open the memory that was asked for: one of your factory, or one that has the blocks that the storage knows.

    Args:
        where: See `Where`.
        make: See `opened_storage`.
        working: Let the factory's memory absorb in the background; else nothing is absorbed and no model is called
            but for embedding a question.
        everybody: The command is about all people: the factory's memory is taken as it is.

    Yields:
        The memory.

    Raises:
        ConfigurationError: See `opened_storage`; or the factory makes no memory, or the person is not clear.
    """
    if where.memory is not None:
        made = make_memory(where)
        try:
            if not working:
                await made.astop()
            if not working and not make:
                await _check_made(made.storage)
                await _check_known(made.storage, where, made.user_id)
            yield await _at(made, where, anybody=working or make or everybody)
        finally:
            await made.aclose()
        return
    async with opened_storage(where, make=make) as storage:
        if not make:
            await _check_known(storage, where)
        scope = await chosen_scope(storage, where)
        found = TieredMemory(
            storage=storage,
            user_id=scope.user_id,
            session_id=scope.session_id,
            memory_blocks=[*await known_blocks(storage, scope)],
        )
        # These blocks are for looking: what your own would learn with their models must not be lost to them.
        await found.astop()
        yield found


# --- a factory --------------------------------------------------------------------------------------------------


def make_memory(where: Where) -> TieredMemory:
    """Call the factory that `--memory module:factory` names.

    Args:
        where: What was given of `storage`, `table_name`, `db_schema`, `user_id` and `session_id` is passed to it, as
            far as it takes arguments of these names.

    Returns:
        Its memory.

    Raises:
        ConfigurationError: There is no such factory, it fails, or it makes something else.
    """
    spec = where.memory or ""
    factory = _factory(spec)
    if isinstance(factory, TieredMemory):
        return factory
    try:
        made = factory(**_arguments(factory, where))
    except ConfigurationError:
        raise
    except Exception as error:
        raise _no_factory(spec, f"it raised {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(made, TieredMemory):
        raise _no_factory(spec, f"it returned {type(made).__name__}")
    return made


def _factory(spec: str) -> Any:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise _no_factory(spec, "it has no colon between module and factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script of the current folder, as `python -m` finds it
    try:
        found = getattr(import_module(module), name)
    except ImportError as error:
        raise _no_factory(spec, f"its module cannot be imported: {error}") from error
    except AttributeError as error:
        raise _no_factory(spec, f"the module has no {name}") from error
    except Exception as error:
        raise _no_factory(spec, f"its module raised {type(error).__name__}: {str(error)[:200]}") from error
    if not callable(found) and not isinstance(found, TieredMemory):
        raise _no_factory(spec, f"{name} is {type(found).__name__}")
    return found


def _arguments(factory: Any, where: Where) -> dict[str, Any]:
    given: Mapping[str, Any] = {
        "storage": where.storage,
        "table_name": where.table_name if where.table_name != DEFAULT_TABLE_NAME else None,
        "db_schema": where.db_schema,
        "user_id": where.user,
        "session_id": where.session,
    }
    known = inspect.signature(factory).parameters
    return {name: value for name, value in given.items() if name in known and value is not None}


def _no_factory(spec: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--memory={spec!r:.100} was given, but {why}.",
        allowed="It is module:factory, and the factory returns a TieredMemory; it may take storage, table_name, "
        "db_schema, user_id and session_id.",
        remedy="Correct it; a module in the current folder is found by its name without .py.",
    )


async def _at(memory: TieredMemory, where: Where, *, anybody: bool) -> TieredMemory:
    """The factory's memory, at the person and session that were asked for; without a person, at the only one."""
    if memory.user_id is None and where.user is None and not anybody:
        scope = await chosen_scope(memory.storage, where)
        return memory.for_session(scope.session_id, scope.user_id)
    user = where.user if where.user is not None else memory.user_id
    session = where.session if where.session is not None else memory.session_id
    if (user, session) == (memory.user_id, memory.session_id):
        return memory
    return memory.for_session(session, user)


# --- what a storage knows ---------------------------------------------------------------------------------------


async def chosen_scope(storage: Storage, where: Where) -> Scope:
    """Whose memory is meant: who was named, else the only one who is there.

    Args:
        storage: Open.
        where: What was named.

    Returns:
        The scope; without a session that was named, a new one of the person, as the next conversation would be.

    Raises:
        ConfigurationError: Several people are there, or several sessions of nobody.
    """
    if where.user is not None:
        return Scope(_session(where), where.user)
    people = [person.user_id for person in await storage.survey.people()]
    if where.session is not None:
        people = [user for user in people if await storage.log.session(user, where.session) is not None]
    if len(people) > 1:
        raise unclear("--user", [user or "(nobody)" for user in people])
    user = people[0] if people else ""
    if where.session is not None or user:
        return Scope(_session(where), user or None)
    sessions = [session.session_id for session in await storage.log.sessions("")]
    if len(sessions) > 1:
        raise unclear("--session", sessions)
    return Scope(sessions[0] if sessions else _session(where))


def _session(where: Where) -> str:
    """The session that was named, or a new one."""
    return f"look-{uuid.uuid4()}" if where.session is None else where.session


def unclear(option: str, names: list[str]) -> ConfigurationError:
    """The error for an option that was left out, where several could be meant."""
    return ConfigurationError(
        f"{option} was left out, and there are several.",
        allowed=f"Known are: {_some(names)}.",
        remedy=f"Pass {option} with one of them.",
    )


def _unknown(option: str, given: str, names: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{option}={given!r:.100} was given, which this storage does not know.",
        allowed=f"Known are: {_some(names)}." if names else "None is known yet.",
        remedy=f"Pass {option} with one of them." if names else "Correct --storage, --table-name or --db-schema.",
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


async def known_blocks(storage: Storage, scope: Scope) -> list[TieredMemoryBlock]:
    """Blocks that can show what is stored for somebody; they are never let to absorb.

    Args:
        storage: Open.
        scope: Whose.

    Returns:
        One block per name that has records, of the kind that its records tell.
    """
    session = None if scope.user_id is not None else scope.session_id
    kinds: dict[str, set[str]] = {}
    for kept in await storage.survey.kept(scope.user_id or "", session, now=storage.now()):
        if kept.place not in {"window", "archive", "cleared"}:
            kinds.setdefault(kept.place, set()).add(kept.kind)
    model = embedding_of(await storage.survey.embeddings())
    found = (_block(name, of_block, model) for name, of_block in kinds.items())
    return [block for block in found if block is not None]


def embedding_of(models: Collection[str]) -> BaseEmbedding | None:
    """The embedding model that made what is stored, if it is one that this command can load by itself."""
    local = {WordLlamaEmbedding.model_fields["model_name"].default: WordLlamaEmbedding}
    if find_spec("wordllama") is None:
        return None
    return next((local[name]() for name in models if name in local), None)


def _block(name: str, kinds: Collection[str], model: BaseEmbedding | None) -> TieredMemoryBlock | None:
    """The block whose kinds of records these are; the first that fits, as the heat block has facts too."""
    makers: tuple[tuple[set[str], Callable[[], TieredMemoryBlock]], ...] = (
        ({"page", "segment", "profile"}, lambda: HeatMemoryBlock(name=name, embed_model=model, llm=None)),
        ({"fact"}, lambda: FactExtractionMemoryBlock(name=name, llm=QuotingLLM(), embed_model=model)),
        ({"message", "note"}, lambda: VectorMemoryBlock(name=name, embed_model=model)),
        ({"summary"}, lambda: SummaryMemoryBlock(name=name, llm=QuotingLLM())),
        ({"working"}, lambda: WorkingMemoryBlock(name=name)),
        (
            {"episode", "episode.running", "episode.failure", "episode.interrupted"},
            lambda: EpisodicMemoryBlock(name=name, embed_model=model),
        ),
    )
    return next((make() for known, make in makers if known & set(kinds)), None)


def notebooks_folder() -> Path | None:
    """Where the notebooks are: inside the installed package, or beside it in a checkout; `None` for neither."""
    package = Path(__file__).parent.parent
    places = (package / "notebooks", package.parent / "notebooks")
    return next((place for place in places if any(place.glob("*.ipynb"))), None)
