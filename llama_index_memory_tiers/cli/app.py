"""The commands: each reads its options and hands over to a function of this folder."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from llama_index_memory_tiers.cli import chatting, doctor, forgetting, looking, moving, notebooks, tending
from llama_index_memory_tiers.cli.options import (
    EVERYBODY,
    PLACES_OF_A_CHAT,
    PLACES_OF_AN_IMPORT,
    PLACES_OF_SOMEBODY,
    PLACES_WITHIN,
    JsonOption,
    YesOption,
    command,
    finish,
    make_app,
)
from llama_index_memory_tiers.cli.outcome import Outcome, write_json
from llama_index_memory_tiers.cli.places import Where, notebooks_folder, opened_memory, opened_storage
from llama_index_memory_tiers.demo.__main__ import main as play_demo
from llama_index_memory_tiers.display import counted
from llama_index_memory_tiers.errors import StorageError

app = make_app()

LlmOption = Annotated[
    str | None, typer.Option("--llm", envvar="LLM", help="http://localhost:8000/v1#model of a server.")
]
ScopeOption = Annotated[
    Literal["user", "session"] | None, typer.Option("--scope", help="All of the user, or one session.")
]


# --- to begin with ----------------------------------------------------------------------------------------------


@app.command()
def demo(
    chat: Annotated[
        Path | None, typer.Option(help="Your own chat: JSON Lines, or ChatGPT's conversations.json.")
    ] = None,
    llm: LlmOption = None,
    questions: Annotated[int | None, typer.Option(min=1, help="At most so many per language.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch an agent that remembers, next to one that does not. Needs no key."""
    options = {"--chat": chat, "--llm": llm, "--questions": questions}
    arguments = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    if not as_json:
        finish(play_demo(arguments))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = play_demo(arguments)
    write_json({"kept": code == 0, "output": said.getvalue().splitlines()})
    finish(code)


@command(app, places=PLACES_OF_A_CHAT)
async def chat(where: Where, llm: LlmOption = None, as_json: JsonOption = False) -> Outcome:
    """Talk with a small agent whose memory lasts. Without --llm it can only quote what it remembers."""
    return await chatting.chat(where, llm, as_json=as_json)


@command(app, name="notebooks", places={})
async def notebooks_command(
    _: Where,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; made if need be.")],
    yes: YesOption = False,
) -> Outcome:
    """Copy the notebooks that come with the package."""
    return notebooks.copy_notebooks(notebooks_folder(), folder, sure=moving.sure(yes))


# --- to look inside ---------------------------------------------------------------------------------------------


@command(app)
async def inspect(where: Where, question: Annotated[str, typer.Argument(help="What the agent is asked.")]) -> Outcome:
    """Show what an agent would be given for a question, and why. Also where its tokens went and what was left out."""
    async with opened_memory(where) as memory:
        return await looking.inspect_context(memory, question)


@command(app, places=PLACES_WITHIN)
async def search(
    where: Where,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="At most so many.")] = 5,
) -> Outcome:
    """Find what was said or noted, by meaning and by words."""
    async with opened_memory(where) as memory:
        return await looking.search(memory, query, top_k, where.session)


@command(app, places=PLACES_OF_SOMEBODY)
async def why(
    where: Where,
    id: Annotated[str, typer.Argument(help="Id of a message, fact or any other record, or its first characters.")],  # noqa: A002  # the field's word
) -> Outcome:
    """Say where a memory comes from. Of a record, the messages behind it; of a message, what came from it."""
    async with opened_memory(where) as memory:
        return await looking.why(memory, id)


@command(app, places=PLACES_WITHIN)
async def tiers(where: Where) -> Outcome:
    """Count what is kept of somebody, tier by tier."""
    async with opened_memory(where) as memory:
        return await looking.tiers(memory, where.session)


@command(app, name="doctor", places=EVERYBODY)
async def doctor_command(where: Where, as_json: JsonOption = False) -> Outcome:
    """Look a storage over and say what to do. Versions, contents, what waits or failed, secrets, languages.

    No memory is changed.
    """
    try:
        if where.memory is None:
            async with opened_storage(where) as found:
                return await doctor.examine(found, None, as_json=as_json)
        async with opened_memory(where, everybody=True) as yours:
            return await doctor.examine(yours.storage, yours, as_json=as_json)
    except StorageError as error:
        if type(error) is not StorageError:  # a newer schema, a server that is away: nothing is wrong with the file
            raise
        return doctor.unreadable(where, error)


# --- to move and delete -----------------------------------------------------------------------------------------


@command(app, places=PLACES_WITHIN)
async def export(
    where: Where,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it is replaced in one step.")],
    scope: ScopeOption = None,
    as_json: JsonOption = False,
) -> Outcome:
    """Write all that is kept of somebody to a file. For a backup, or for another database."""
    chosen = moving.chosen_scope(scope, where)
    async with opened_memory(where) as memory:
        return await moving.export(memory, target, chosen, as_json=as_json)


@command(app, name="import", places=PLACES_OF_AN_IMPORT)
async def import_command(
    where: Where,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote; a folder of MemoryOS.")],
    kind: Annotated[Literal["export", "memoryos"], typer.Option("--from", help="What it is.")] = "export",
    as_json: JsonOption = False,
) -> Outcome:
    """Take in what `export` wrote. All of it or nothing, and twice is the same as once."""
    if kind == "memoryos":
        moving.check_folder(source)
        async with opened_memory(where, make=True) as memory:
            return await moving.take_over(memory, source)
    async with opened_memory(moving.whose_export(where, source), make=True) as memory:
        return await moving.take_in(memory, source, as_json=as_json)


@command(app, places=PLACES_WITHIN)
async def forget(
    where: Where,
    scope: ScopeOption = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id", metavar="ID", help="A message or record, or the first characters of its id; may be repeated."
        ),
    ] = None,
    before: Annotated[str | None, typer.Option(help="What was said before: 2026-03-01, or with a time.")] = None,
    contains: Annotated[str | None, typer.Option(help="What has this text in it.")] = None,
    speaker: Annotated[str | None, typer.Option(help="What was said by this speaker or role.")] = None,
    derived: Annotated[
        Literal["drop", "rederive"], typer.Option(help="Of records that also come from other messages.")
    ] = "drop",
    yes: YesOption = False,
) -> Outcome:
    """Forget messages and what was learnt from them, and prove it. Asks before it deletes."""
    what = forgetting.forget_arguments(
        scope=moving.chosen_scope(scope, where),
        ids=ids or [],
        before=before,
        derived=derived,
        contains=contains,
        speaker=speaker,
    )
    async with opened_memory(where) as memory:
        return await forgetting.forget(memory, what, sure=moving.sure(yes))


# --- to tend ----------------------------------------------------------------------------------------------------


@command(app, places=EVERYBODY)
async def worker(
    where: Where,
    once: Annotated[bool, typer.Option("--once", help="One round, then end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.05, metavar="SECONDS", help="Pause between rounds.")] = 10.0,
) -> Outcome:
    """Let blocks absorb what is due in anybody's sessions. Needs --memory. Ends at SIGTERM or Ctrl-C; many may run."""
    tending.needs_memory(where, "worker")
    async with opened_memory(where, working=True) as memory:
        return await tending.work(memory, once=once, every_seconds=every)


@command(app, places=PLACES_OF_SOMEBODY)
async def replay(where: Where) -> Outcome:
    """Try again what a block could not absorb and put aside. Needs --memory."""
    tending.needs_memory(where, "replay")
    async with opened_memory(where, everybody=True) as memory:
        return await tending.replay(memory, where)


@command(app, places=PLACES_OF_SOMEBODY)
async def maintain(
    where: Where,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would leave, and why.")] = False,
    yes: YesOption = False,
) -> Outcome:
    """Put aside what your memory's rules of retention let go. Needs --memory. Nothing is deleted. Asks first."""
    tending.needs_memory(where, "maintain")
    async with opened_memory(where, everybody=True) as memory:
        planned = await tending.maintain(memory, where, dry_run=True)
        count = len(planned.data["departures"])
        if not count:
            return Outcome({"dry_run": dry_run, "departures": []}, "Nothing to do.")
        if dry_run or not moving.sure(yes)(f"Put {counted(count, 'record')} aside?"):
            return planned
        return await tending.maintain(memory, where, dry_run=False)


@command(app, places=PLACES_WITHIN)
async def reindex(
    where: Where,
    again: Annotated[bool, typer.Option("--again", help="Embed also what these models have embedded.")] = False,
    as_json: JsonOption = False,
) -> Outcome:
    """Embed what your models have not embedded yet. Needs --memory. Also brings an index on a server in step."""
    tending.needs_memory(where, "reindex")
    async with opened_memory(where, everybody=True) as memory:
        return await tending.reindex(memory, where, again=again, as_json=as_json)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"{doctor.installed()['llama-index-memory-tiers']}\n")
        finish(0)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    del version
