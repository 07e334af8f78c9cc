"""The root command: quick help, exit codes, one readable line for every error."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from meshplan.catalogs.errors import CatalogError, EmitError, MeshplanError, Problem, SolverError, SpecError
from meshplan.cli import main
from meshplan.cli.main import SUBCOMMANDS

HEAVY = ("sqlalchemy", "alembic", "numpy", "ortools", "networkx", "pulp", "rich", "yaml")
Command = Callable[..., Any]


def loaded_by(*arguments: str, names: Sequence[str] = (*HEAVY, "pydantic")) -> set[str]:
    """Which of some packages a command line imports, in a process of its own."""
    code = (
        "import sys; from meshplan.cli.main import run\n"
        "try: run(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"sys.stderr.write(' '.join(name for name in {tuple(names)!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout
    return set(done.stderr.split())


def test_a_training_plan_loads_nothing_that_it_does_not_ask(tmp_path: Path) -> None:
    """Links are equal here, nothing is downloaded, solved as an integer programme or drawn."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "kind: training\nmodel: llama-3.1-8b\ncluster: {nodes: [{type: dgx-h100, count: 1}]}\n"
        "workload: {sequence_length: 4096, global_batch_size: 16}\n"
    )
    unasked = ("numpy.ma", "numpy.random", "urllib.request", "alembic", "ortools", "networkx", "pulp", "rich")
    assert loaded_by("plan", str(spec), "--no-store", "--db", f"{tmp_path}/c.sqlite", names=unasked) == set()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_root_loads_nothing_heavy(option: str) -> None:
    assert loaded_by(option) == set()


def test_the_help_of_a_command_loads_nothing_heavy() -> None:
    # Typer itself reads options through pydantic (from its release 0.2x on); nothing of ours may add to that.
    assert loaded_by("catalog", "list", "--help") <= {"pydantic"}


def test_the_root_help_lists_every_command(meshplan: Command) -> None:
    done = meshplan("--help")
    assert done.code == 0
    for name, subcommand in SUBCOMMANDS.items():
        assert f"  {name}" in done.out
        assert subcommand.help in done.out, f"the help of {name} is cut off: shorten it"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    assert isinstance(importlib.import_module(SUBCOMMANDS[name].module).app, typer.Typer)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("estimate a.yaml --format json --format csv", "--format"),
        ("explain latest --db a.sqlite --db b.sqlite", "--db"),
        ("emit latest --target megatron --target torchtitan", "--target"),
        ("replan latest --without 3 --without 7", "--without"),
        ("validate rows.jsonl --format=json -f csv", "--format"),
        ("calibrate rows.jsonl --db a --db b", "--db"),
        ("plans show latest --format json --format csv", "--format"),
        ("sweep sweep.yaml --db a --db b", "--db"),
        ("catalog list models --db a --db b", "--db"),
        ("profile device --db a --db b", "--db"),
        ("serve --port 1 --port 2", "--port"),
        ("--server http://a --server http://b plan spec.yaml", "--server"),
    ],
)
def test_an_option_that_is_given_twice_is_refused_by_every_command(meshplan: Command, line: str, option: str) -> None:
    outcome = meshplan(*line.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{option}" in outcome.err
    fix = "join them: --without 3,7" if option == "--without" else "keep one"
    assert f"given more than once, and only the last would count; {fix}" in " ".join(outcome.err.split())


def test_version_is_that_of_the_package(meshplan: Command) -> None:
    assert meshplan("--version").out == f"meshplan {version('meshplan')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["catlog"], "Did you mean 'catalog'?"),
        (["catalog", "shwo"], "Did you mean 'show'?"),
        (["catalog", "list", "--fromat", "json"], "--format"),
        (["catalog", "list", "--format", "xml"], "'markdown'"),
        (["catalog", "show"], "Missing argument"),
    ],
)
def test_usage_errors_exit_2_and_offer_the_nearest(meshplan: Command, arguments: list[str], words: str) -> None:
    done = meshplan(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def install(error: BaseException) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("meshplan.catalogs.database.repository.Catalog.open", fail)

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([Problem(path="a.b", message="wrong")]), 2),
        (CatalogError("no such thing"), 4),
        (SolverError("it broke"), 5),
        (EmitError("cannot write"), 6),
    ],
)
def test_every_error_has_its_exit_code(
    meshplan: Command, failing: Callable[[BaseException], None], error: MeshplanError, code: int
) -> None:
    failing(error)
    done = meshplan("catalog", "list")
    assert (done.code, done.out, done.err) == (code, "", f"error: {error}\n")


def test_an_unexpected_error_is_called_a_bug(meshplan: Command, failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError("division by zero"))
    done = meshplan("catalog", "list")
    assert done.code == 1
    assert "this is a bug of meshplan, not of your input: ZeroDivisionError: division by zero" in done.err
    assert "Traceback" not in done.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError("division by zero"))
    with pytest.raises(ZeroDivisionError):
        main.run(["--debug", "catalog", "list"])


def test_interruption_exits_130(meshplan: Command, failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    assert meshplan("catalog", "list").code == 130


def test_a_closed_pipe_is_no_error(meshplan: Command) -> None:
    code = "from meshplan.cli.main import run; run(['catalog', 'list', '--format', 'json'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert (child.wait(timeout=60), errors) == (0, "")
