"""What the whole suite shares: goldens and the option that rewrites them, command lines, suites that run on demand."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SPEC, Command, Outcome
from hypothesis import HealthCheck, settings
from machine_code import compiling
from sqlalchemy import Engine, event

# Hundreds of tests start processes, and each would compile meshplan anew where bytecode is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A developer's own kernel surfaces must not reach the tests.
os.environ["MESHPLAN_SURFACES"] = str(Path(__file__).parent / "no-surfaces")
GOLDEN = Path(__file__).parent / "golden"
# On a loaded machine examples come slowly, which says nothing about the code. The suite asks few questions of every
# property; `--hypothesis-profile=long` asks many.
settings.register_profile("suite", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("suite"), max_examples=1000)
settings.load_profile("suite")


@event.listens_for(Engine, "connect")
def _without_waiting_for_the_disk(connection: object, record: object) -> None:
    """A catalog of a test need not outlive a power cut; there are some ten thousand commits of 4 ms."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden from what the code says now")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: tests of browsers, servers and processes wait an eighth of the time."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a target framework unless ``-m launchers`` asks for them.

    Tests of a file that share something made once a file stay on one worker: each worker would make it again. What
    takes long in one piece (a wheel, all published runs) begins first: at the end the other workers would wait for it.
    """
    root = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent not in (root, root / "validation"))
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("xdist_group") is None:
            made = (one[-1].scope for one in item._fixtureinfo.name2fixturedefs.values() if one)
            if "module" in made:
                item.add_marker(pytest.mark.xdist_group(item.location[0]))
    if "launchers" in config.getoption("-m"):
        return
    on_demand = [item for item in items if "launchers" in item.keywords]
    if on_demand:
        config.hook.pytest_deselected(items=on_demand)
        items[:] = [item for item in items if item not in on_demand]


def pytest_configure(config: pytest.Config) -> None:
    """Where there are workers, compile the simulation beside their first tests: each of them would do it."""
    if getattr(config.option, "numprocesses", None) and (process := compiling()):
        config.add_cleanup(process.kill)


def pytest_collection_finish() -> None:
    """What was collected stays until the end: the garbage collector need not look at a million objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """``golden(name, text)``: text must equal the file tests/golden/``name``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden {name}: run pytest --update-goldens and read the difference"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed: pytest --update-goldens, then git diff"

    return check


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from meshplan.catalogs.database.repository import Catalog

    path = tmp_path_factory.mktemp("seeded") / "catalog.sqlite"
    Catalog.open(str(path)).engine.dispose()
    return path


@pytest.fixture
def database(seeded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "catalog.sqlite"
    shutil.copy(seeded, path)
    monkeypatch.setenv("MESHPLAN_DB", str(path))
    return path


@pytest.fixture(scope="session")
def stored(seeded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``stored(question, ...)``: a seeded database with the plans of these questions, tagged by position: 0, 1, …

    It is made once a session: copy it before a command may change it.
    """
    from meshplan.cli.main import run

    @functools.cache
    def of(*questions: str) -> Path:
        folder = tmp_path_factory.mktemp("stored")
        database = Path(shutil.copy(seeded, folder / "catalog.sqlite"))
        for number, question in enumerate(questions):
            (folder / "spec.yaml").write_text(question)
            with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as exit_:
                run([*map(str, ("plan", folder / "spec.yaml", "--db", database, "--tag", number))])
            assert not exit_.value.code
        return database

    return of


@pytest.fixture
def meshplan(database: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """``meshplan("plan", spec)``: run a command line in this process, on a copy of one seeded database."""
    from meshplan.cli.main import run

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run([*map(str, arguments)])
        out, err = capsys.readouterr()
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        assert "Traceback" not in err
        return Outcome(code=code or 0, out=out, err=err)

    return call


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path
