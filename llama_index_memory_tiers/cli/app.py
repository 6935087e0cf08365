"""The commands: each reads its options and hands over to a function of this folder."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from llama_index_memory_tiers.cli import chatting, doctor, looking, moving, notebooks, tending
from llama_index_memory_tiers.cli.outcome import Outcome, run, write_json
from llama_index_memory_tiers.cli.places import Where, notebooks_folder, opened_memory, opened_storage
from llama_index_memory_tiers.demo.__main__ import main as play_demo
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME

app = typer.Typer(
    name="memory-tiers",
    help="Look into, move and tend the memories of llama-index-memory-tiers.\n\n"
    "Exit codes: 0 fine, 1 a finding or failure, 2 usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", envvar="MEMORY_TIERS_STORAGE", help="Database file, or a URI such as postgresql+asyncpg://…"
    ),
]
TableOption = Annotated[str, typer.Option("--table-name", help="Prefix of the tables.")]
SchemaOption = Annotated[str | None, typer.Option("--db-schema", help="Database schema; PostgreSQL only.")]
UserOption = Annotated[str | None, typer.Option("--user", help="The person; may be left out when there is only one.")]
SessionOption = Annotated[str | None, typer.Option("--session", help="The conversation; default a new one.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="module:factory of a TieredMemory with your own blocks.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _finish(code: int) -> None:
    raise typer.Exit(code)


def _with_memory(
    where: Where, work: Callable[[TieredMemory], Awaitable[Outcome]], *, as_json: bool, make: bool = False
) -> None:
    async def opened() -> Outcome:
        async with opened_memory(where, make=make) as memory:
            return await work(memory)

    _finish(run(opened, as_json=as_json))


# --- to begin with ----------------------------------------------------------------------------------------------


@app.command()
def demo(
    chat: Annotated[
        Path | None, typer.Option(help="Your own chat: JSON Lines, or ChatGPT's conversations.json.")
    ] = None,
    llm: Annotated[str | None, typer.Option(envvar="LLM", help="http://localhost:8000/v1#model of a server.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="At most so many per language.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch an agent that remembers, next to one that does not. Needs no key."""
    options = {"--chat": chat, "--llm": llm, "--questions": questions}
    arguments = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    if not as_json:
        _finish(play_demo(arguments))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = play_demo(arguments)
    write_json({"kept": code == 0, "output": said.getvalue().splitlines()})
    _finish(code)


@app.command()
def chat(
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    llm: Annotated[str | None, typer.Option(envvar="LLM", help="http://localhost:8000/v1#model of a server.")] = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Talk with a small agent whose memory lasts. Without --llm it can only quote what it remembers."""
    where = Where(storage, table_name, db_schema, user, session)
    _finish(run(lambda: chatting.chat(where, llm, as_json=as_json), as_json=as_json))


@app.command(name="notebooks")
def notebooks_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; made if need be.")],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the notebooks that come with the package."""

    async def copied() -> Outcome:
        return notebooks.copy_notebooks(notebooks_folder(), folder, sure=_sure(yes))

    _finish(run(copied, as_json=as_json))


# --- to look inside ---------------------------------------------------------------------------------------------


@app.command()
def inspect(
    question: Annotated[str, typer.Argument(help="What the agent is asked.")],
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an agent would be given for a question, where its tokens went, and what was left out and why."""
    where = Where(storage, table_name, db_schema, user, session, memory)
    _with_memory(where, lambda found: looking.inspect_context(found, question), as_json=as_json)


@app.command()
def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="At most so many.")] = 5,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what was said or noted, by meaning and by words."""
    where = Where(storage, table_name, db_schema, user, session, memory)
    _with_memory(where, lambda found: looking.search(found, query, top_k), as_json=as_json)


@app.command()
def why(
    id: Annotated[str, typer.Argument(help="Id of a message, fact or any other record.")],  # noqa: A002  # the field's word
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say where a memory comes from: the messages behind it, and what came from a message."""
    where = Where(storage, table_name, db_schema, user, session, memory)
    _with_memory(where, lambda found: looking.why(found, id), as_json=as_json)


@app.command()
def tiers(
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count what is kept of somebody, tier by tier."""
    where = Where(storage, table_name, db_schema, user, session, memory)
    _with_memory(where, looking.tiers, as_json=as_json)


@app.command(name="doctor")
def doctor_command(
    storage: StorageOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look a storage over: versions, contents, what waits or failed, secrets, languages. Changes no memory."""
    where = Where(storage, table_name, db_schema, memory=memory)

    async def examined() -> Outcome:
        if where.memory is None:
            async with opened_storage(where) as found:
                return await doctor.examine(found, None, as_json=as_json)
        async with opened_memory(where, everybody=True) as yours:
            return await doctor.examine(yours.storage, yours, as_json=as_json)

    _finish(run(examined, as_json=as_json))


# --- to move and delete -----------------------------------------------------------------------------------------


@app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it is replaced in one step.")],
    scope: Annotated[Literal["user", "session"] | None, typer.Option(help="All of the user, or one session.")] = None,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write all that is kept of somebody to a file, for a backup or another database."""
    where = Where(storage, table_name, db_schema, user, session, memory)
    chosen = scope if scope is not None or session is None else "session"

    async def exported(found: TieredMemory) -> Outcome:
        moving.check_session(chosen, where)
        return await moving.export(found, target, chosen, as_json=as_json)

    _with_memory(where, exported, as_json=as_json)


@app.command(name="import")
def import_command(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote; a folder of MemoryOS.")],
    kind: Annotated[Literal["export", "memoryos"], typer.Option("--from", help="What it is.")] = "export",
    storage: StorageOption = None,
    user: Annotated[str | None, typer.Option("--user", help="The person; default the one in the file.")] = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take in what `export` wrote: all of it or nothing, and twice is the same as once."""
    if kind == "memoryos":
        theirs = Where(storage, table_name, db_schema, user, session, memory)
        _with_memory(theirs, lambda found: moving.take_over(found, source), as_json=as_json, make=True)
    its_user, its_session = moving.exported_scope(source)
    whose = (user, session) if user is not None or session is not None else (its_user, its_session)
    where = Where(storage, table_name, db_schema, *whose, memory)
    _with_memory(where, lambda found: moving.take_in(found, source, as_json=as_json), as_json=as_json, make=True)


@app.command()
def forget(
    scope: Annotated[
        Literal["user", "session"] | None, typer.Option(help="Everything of the user, or of one session.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--id", metavar="ID", help="A message or record; may be repeated.")
    ] = None,
    before: Annotated[str | None, typer.Option(help="What was said before: 2026-03-01, or with a time.")] = None,
    contains: Annotated[str | None, typer.Option(help="What has this text in it.")] = None,
    speaker: Annotated[str | None, typer.Option(help="What was said by this speaker or role.")] = None,
    derived: Annotated[
        Literal["drop", "rederive"], typer.Option(help="Of records that also come from other messages.")
    ] = "drop",
    yes: YesOption = False,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    memory: MemoryOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget messages and what was learnt from them, and prove it. Asks before it deletes."""
    where = Where(storage, table_name, db_schema, user, session, memory)

    async def forgotten() -> Outcome:
        what = moving.forget_arguments(
            scope=scope, ids=ids or [], before=before, derived=derived, contains=contains, speaker=speaker
        )
        moving.check_session(scope, where)
        async with opened_memory(where) as found:
            return await moving.forget(found, what, sure=_sure(yes))

    _finish(run(forgotten, as_json=as_json))


# --- to tend ----------------------------------------------------------------------------------------------------


@app.command()
def worker(
    memory: MemoryOption = None,
    once: Annotated[bool, typer.Option("--once", help="One round, then end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.05, metavar="SECONDS", help="Pause between rounds.")] = 10.0,
    storage: StorageOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the blocks absorb what is due in anybody's sessions, until SIGTERM or Ctrl-C. Several may run."""
    where = Where(storage, table_name, db_schema, memory=memory)

    async def worked() -> Outcome:
        tending.needs_memory(where, "worker")
        async with opened_memory(where, working=True) as found:
            return await tending.work(found, once=once, every_seconds=every)

    _finish(run(worked, as_json=as_json))


@app.command()
def replay(
    memory: MemoryOption = None,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try dead letters again: what a block could not absorb and put aside."""
    where = Where(storage, table_name, db_schema, user, session, memory)

    async def replayed() -> Outcome:
        tending.needs_memory(where, "replay")
        async with opened_memory(where, everybody=True) as found:
            return await tending.replay(found, where)

    _finish(run(replayed, as_json=as_json))


@app.command()
def maintain(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would leave, and why.")] = False,
    yes: YesOption = False,
    memory: MemoryOption = None,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put aside what your memory's rules of retention let go. Nothing is deleted. Asks first."""
    where = Where(storage, table_name, db_schema, user, session, memory)

    async def maintained() -> Outcome:
        tending.needs_memory(where, "maintain")
        async with opened_memory(where, everybody=True) as found:
            planned = await tending.maintain(found, where, dry_run=True)
            count = len(planned.data["departures"])
            if dry_run or not count or not _sure(yes)(f"Put {count} records aside?"):
                return planned
            return await tending.maintain(found, where, dry_run=False)

    _finish(run(maintained, as_json=as_json))


@app.command()
def reindex(
    again: Annotated[bool, typer.Option("--again", help="Embed also what these models have embedded.")] = False,
    memory: MemoryOption = None,
    storage: StorageOption = None,
    user: UserOption = None,
    session: SessionOption = None,
    table_name: TableOption = DEFAULT_TABLE_NAME,
    db_schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Embed what your embedding models have not embedded yet, and bring an index on a server in step."""
    where = Where(storage, table_name, db_schema, user, session, memory)

    async def done() -> Outcome:
        tending.needs_memory(where, "reindex")
        async with opened_memory(where, everybody=True) as found:
            return await tending.reindex(found, where, again=again, as_json=as_json)

    _finish(run(done, as_json=as_json))


def _sure(yes: bool) -> Callable[[str], bool]:
    return (lambda _: True) if yes else moving.ask_on_terminal


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"{doctor.installed()['llama-index-memory-tiers']}\n")
        _finish(0)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    del version
