"""The ``meshplan`` command: which sub-commands exist, and how every error leaves the process.

Sub-commands are loaded when they are called, so that ``meshplan --help`` costs neither SQLAlchemy nor NumPy nor a
solver. A new command is one line in :data:`SUBCOMMANDS` and one module with a Typer ``app``.

Exit codes: 0 done, 1 a bug of meshplan, 2 usage or spec, 3 no feasible plan, 4 catalog, 5 solver, 6 emit (see
:mod:`meshplan.catalogs.errors`); 130 after Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshplan.catalogs.errors import EXIT_BUG, EXIT_EMIT, EXIT_OK, EXIT_SOLVER, MeshplanError
from meshplan.catalogs.untrusted.text import shown
from meshplan.cli.once import once_in, refuse_repeated

DEBUG_OPTION = "--debug"
REMOTE = ("plan", "estimate")  # what --server can answer
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
# New objects after which Python looks for garbage in cycles: walks through all that was imported, for little, as arrays
# are in no cycles. With its own 700 that and a last look at the end are a tenth of a plan, with 50,000 still 0.07 s of
# each (2026-11-26).
OBJECTS_BEFORE_COLLECTION = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """Where a sub-command lives.

    Args:
        module: importable module with a Typer application named ``app``.
        help: the line that ``meshplan --help`` shows.
    """

    module: str
    help: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "plan": Subcommand(
        module="meshplan.cli.commands.plan", help="Find the best plan for a spec, store it, write its files."
    ),
    "init": Subcommand(module="meshplan.cli.commands.init", help="Write a commented spec from five answers."),
    "estimate": Subcommand(module="meshplan.cli.commands.estimate", help="Price one pinned configuration."),
    "explain": Subcommand(
        module="meshplan.cli.commands.explain", help="Why this plan, and what another choice would cost."
    ),
    "replan": Subcommand(
        module="meshplan.cli.commands.replan", help="Plans for when nodes are lost: what moves, wait or go on."
    ),
    "batch": Subcommand(module="meshplan.cli.commands.batch", help="Which global batch trains soonest."),
    "emit": Subcommand(module="meshplan.cli.commands.emit", help="Write the launcher files of a plan."),
    "import": Subcommand(
        module="meshplan.cli.commands.import_",
        help="Your current launch command as a spec, and a better plan.",
    ),
    "experts": Subcommand(
        module="meshplan.cli.commands.experts", help="Place experts by recorded routing: copies, devices, advice."
    ),
    "compare": Subcommand(
        module="meshplan.cli.commands.compare", help="Plans side by side, or a plan against its measurement."
    ),
    "plans": Subcommand(
        module="meshplan.cli.commands.plans", help="List, show, tag, delete stored plans; record measurements."
    ),
    "sweep": Subcommand(
        module="meshplan.cli.studies.sweep", help="Answer many specs that differ in a few fields, as a study."
    ),
    "validate": Subcommand(module="meshplan.cli.commands.measured.validate", help="Predicted against measured runs."),
    "calibrate": Subcommand(
        module="meshplan.cli.commands.measured.calibrate", help="Fit the estimator's constants to measured runs."
    ),
    "catalog": Subcommand(
        module="meshplan.cli.commands.catalog",
        help="Show, import and upgrade hardware, models and prices.",
    ),
    "profile": Subcommand(
        module="meshplan.cli.commands.measured.profile",
        help="Measure this machine and its links, and write the catalog.",
    ),
    "serve": Subcommand(module="meshplan.cli.web.serve", help="Answer questions over HTTP."),
    "work": Subcommand(module="meshplan.cli.web.work", help="Answer the questions that wait in a database."),
}


class _NotLoaded(TyperCommand):
    """Stands in for a sub-command in listings, suggestions and completion until it is called."""


class LazyGroup(TyperGroup):
    """A command group whose members are imported on the call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, subcommand in SUBCOMMANDS.items():
            self.commands[name] = _NotLoaded(name=name, help=subcommand.help, callback=None)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command, each once."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command that ``args`` call, importing it if need be."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, _NotLoaded) and name is not None:
            module = importlib.import_module(SUBCOMMANDS[name].module)
            command = typer.main.get_command(once_in(module.app))
            command.help = command.help or SUBCOMMANDS[name].help
            command.name = name
            self.commands[name] = command
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C ends it with the code that shells expect, in every version of Typer."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            _complain(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"meshplan {version('meshplan')}\n")
        raise typer.Exit(EXIT_OK)


# Plain help: the rich one costs 0.1 s and breaks when piped into a pager.
app = typer.Typer(
    name="meshplan",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=False)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG_OPTION, help="Show the traceback of an unexpected error.")] = False,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Let a service (meshplan serve) answer; for plan and estimate. Its token: $MESHPLAN_TOKEN.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Find the best way to train or serve a model on given accelerators, and prove how good it is."""
    if server is not None and context.invoked_subcommand not in REMOTE:
        raise typer.BadParameter(
            f"{context.invoked_subcommand} is answered here; a service answers {' and '.join(REMOTE)}",
            param_hint="--server",
        )


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``meshplan`` script: run a command line and exit with its code.

    Args:
        arguments: without the program's name; those of the process where None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    _look_for_garbage_less()
    _ask_no_plugins()
    try:
        typer.main.get_command(app)(args=given, prog_name="meshplan")
    except MeshplanError as error:
        _complain(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        if DEBUG_OPTION in given:
            raise
        _leave_stdout()
        where = f" {error.filename}" if error.filename else ""
        _complain(f"error: the system refuses{where}: {error.strerror or error}")
        sys.exit(EXIT_EMIT)
    except MemoryError:
        _complain("error: there is not enough memory for this; ask a smaller question, or give --time-limit")
        sys.exit(EXIT_SOLVER)
    except Exception as error:  # the outermost frame: a bug is reported as one, without a traceback
        if DEBUG_OPTION in given:
            raise
        _complain(f"error: this is a bug of meshplan, not of your input: {type(error).__name__}: {error}")
        _complain(f"run it again as 'meshplan {DEBUG_OPTION} …' and report the traceback")
        sys.exit(EXIT_BUG)


def _look_for_garbage_less() -> None:
    """Collect seldom while the command runs, and not once more when its process ends anyway."""
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    atexit.register(gc.freeze)


def _ask_no_plugins() -> None:
    """Nothing that happens to be installed sees what is validated, and no distribution is asked whether it has plugins:
    pydantic would read the metadata of them all before its first model (0.01 s where there are eighty).
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def _open_streams() -> None:
    """Streams that take any text: none may be closed, and what an encoding lacks is written out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_stdout() -> None:
    """Python would try to write what is left in the buffer again while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{shown(message)}\n")


if __name__ == "__main__":
    run()
