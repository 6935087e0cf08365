"""Options that commands share, and how a function becomes a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from llama_index_memory_tiers.cli.outcome import Outcome, run, show_error
from llama_index_memory_tiers.cli.places import Where
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.storage import DEFAULT_TABLE_NAME

Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, Outcome]])

StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", envvar="MEMORY_TIERS_STORAGE", help="Database file, or a URI such as postgresql+asyncpg://…"
    ),
]
UserOption = Annotated[str | None, typer.Option("--user", help="The person; may be left out when there is only one.")]
SessionOption = Annotated[str | None, typer.Option("--session", help="The conversation; default a new one.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="module:factory of a TieredMemory with your own blocks.")
]
TableOption = Annotated[str, typer.Option("--table-name", help="Prefix of the tables.")]
SchemaOption = Annotated[str | None, typer.Option("--db-schema", help="Database schema; PostgreSQL only.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

PLACES: Mapping[str, Any] = {
    "storage": StorageOption,
    "user": UserOption,
    "session": SessionOption,
    "memory": MemoryOption,
    "table_name": TableOption,
    "db_schema": SchemaOption,
}
"""Fields of `Where` and the options that fill them."""

EVERYBODY = {name: option for name, option in PLACES.items() if name not in {"user", "session"}}
PLACES_OF_A_CHAT = {name: option for name, option in PLACES.items() if name != "memory"}


def _session(says: str) -> Any:
    return Annotated[str | None, typer.Option("--session", help=says)]


PLACES_WITHIN = {**PLACES, "session": _session("Only this conversation.")}
PLACES_OF_SOMEBODY = {**PLACES, "session": _session("A conversation of the person; without a person, only this one.")}
PLACES_OF_AN_IMPORT = {
    **PLACES,
    "user": Annotated[str | None, typer.Option("--user", help="The person; default the one in the file.")],
    "session": _session("The conversation, when it is nobody's; default the one in the file."),
}


class Commands(TyperGroup):
    """Commands whose errors of usage are JSON too, when that was asked for."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command; see `TyperGroup.main`."""
        given = sys.argv[1:] if args is None else list(args)
        if "--json" not in given:
            return super().main(args, *rest, **options)
        try:
            sys.exit(super().main(args, *rest, **{**options, "standalone_mode": False}))
        except Exception as error:
            # Typer's own errors of usage have come from different packages over its releases.
            if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
                raise
            said = f"{error.format_message().rstrip('.')}."
            remedy = (
                f"Look at `memory-tiers {given[0]} --help`."
                if given[0] != "--json"
                else "Look at `memory-tiers --help`."
            )
            wrong = ConfigurationError(said, allowed="Commands and options are in --help.", remedy=remedy)
            show_error(wrong, as_json=True)
            sys.exit(error.exit_code)


def make_app() -> typer.Typer:
    """The application, without commands yet."""
    return typer.Typer(
        name="memory-tiers",
        cls=Commands,
        help="Look into, move and tend the memories of llama-index-memory-tiers.\n\n"
        "Begin with `memory-tiers demo`, or with `memory-tiers doctor --storage memory.db`.\n\n"
        "Exit codes: 0 fine, 1 a finding or failure, 2 usage.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def command(app: typer.Typer, *, name: str | None = None, places: Mapping[str, Any] = PLACES) -> Callable[[Work], Work]:
    """Make a command of a coroutine function: its first argument is where, the others are its own options.

    The options of `places` and `--json` come after its own. What it returns is written, and its code ends the process.

    Args:
        app: Gets the command.
        name: Default the function's.
        places: Field of `Where` → the option that fills it.

    Returns:
        A decorator that leaves the function as it is.
    """

    def register(work: Work) -> Work:
        hints = get_type_hints(work, include_extras=True)
        _, *own = signature(work).parameters
        wants_json = "as_json" in own

        def invoke(**given: Any) -> None:
            where = Where(**{field: given.pop(field) for field in places})
            as_json = given["as_json"] if wants_json else given.pop("as_json")
            finish(run(lambda: work(where, **given), as_json=as_json))

        options = {each: hints[each] for each in own} | dict(places) | {"as_json": JsonOption}
        defaults = {each: signature(work).parameters[each].default for each in own}
        defaults = {"table_name": DEFAULT_TABLE_NAME, "as_json": False, **defaults}
        parameters = [
            Parameter(each, Parameter.KEYWORD_ONLY, default=defaults.get(each), annotation=options[each])
            for each in sorted(options, key=lambda each: each == "as_json")
        ]
        # What typer reads instead of a signature of its own.
        invoke.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        invoke.__annotations__ = options
        invoke.__name__, invoke.__doc__ = work.__name__, work.__doc__
        app.command(name=name)(invoke)
        return work

    return register


def finish(code: int) -> NoReturn:
    """End the process with an exit code."""
    raise typer.Exit(code)
