"""What the command line offers: every command, its options, what its help costs, suggestions, completion."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Command

from meshplan.cli.main import SUBCOMMANDS

# What --help must not wait for. (pydantic is not in the list: recent Typer imports it to convert arguments.)
HEAVY = ("numpy", "sqlalchemy", "alembic", "ortools", "pulp", "networkx", "pandas", "yaml", "rich.table")


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command line that does something, with its click command."""
    for name, subcommand in SUBCOMMANDS.items():
        command = typer.main.get_command(importlib.import_module(subcommand.module).app)
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", leaf) for inner, leaf in command.commands.items())
        else:
            yield name, command


COMMANDS = [name for name, _ in leaves()]


def described(parameter: Any) -> str:
    """A line of the surface: the words that call a parameter, its kind, default and help."""
    if parameter.param_type_name == "argument":
        words = parameter.metavar or parameter.name.upper()
    else:
        words = " / ".join([*parameter.opts, *parameter.secondary_opts])
    default = "" if parameter.default in (None, False, "") or callable(parameter.default) else f" = {parameter.default}"
    needed = " (required)" if parameter.required else ""
    several = " (several)" if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
    return f"  {words}{default}{needed}{several}: {parameter.help}"


def test_the_surface_changes_on_purpose_only(golden: Any) -> None:
    lines = []
    for name, command in leaves():
        lines += [f"meshplan {name}", f"  {' '.join((command.help or '').split())}"]
        lines += [described(parameter) for parameter in command.params if parameter.name != "help"]
        lines.append("")
    golden("cli/surface.txt", "\n".join(lines))


@pytest.mark.parametrize("command", ["", *SUBCOMMANDS, *COMMANDS])
def test_every_command_explains_itself(command: str, meshplan: Command) -> None:
    outcome = meshplan(*command.split(), "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: meshplan {command}".rstrip())
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_every_option_has_a_help_text() -> None:
    silent = [f"{name} {p.name}" for name, command in leaves() for p in command.params if not getattr(p, "help", "")]
    assert silent == []


def test_every_command_that_answers_takes_a_format() -> None:
    # What `init` prints is a file: the spec in YAML, with comments; the service answers over HTTP.
    silent = [name for name, command in leaves() if "form" not in {p.name for p in command.params}]
    assert silent == ["init", "serve", "work"]


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from meshplan.cli.main import run\n"
        "lines = [line.split() for line in sys.argv[1].split(';')]\n"
        "for line in lines:\n"
        "    try:\n"
        "        run([*line, '--help'])\n"
        "    except SystemExit as error:\n"
        "        assert not error.code, line\n"
        "    heavy = [name for name in sys.argv[2].split(';') if name in sys.modules]\n"
        "    assert not heavy, (line, heavy)\n"
    )
    commands = ";".join(["", *SUBCOMMANDS, *COMMANDS])
    done = subprocess.run(
        [sys.executable, "-c", program, commands, ";".join(HEAVY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("typed", "meant"), [("plam", "plan"), ("estimat", "estimate"), ("plans lst", "list")])
def test_mistyped_commands_get_a_suggestion(typed: str, meant: str, meshplan: Command) -> None:
    outcome = meshplan(*typed.split())
    assert outcome.code == 2
    assert re.search(rf"[Dd]id you mean.*'{meant}'", outcome.err)


def test_mistyped_options_get_a_suggestion(meshplan: Command, spec: Path) -> None:
    outcome = meshplan("plan", spec, "--time-limt", "3")
    assert outcome.code == 2
    assert "--time-limit" in outcome.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [("meshplan pl", {"plan", "plans"}), ("meshplan plans re", {"record"}), ("meshplan plan --tim", {"--time-limit"})],
)
def test_the_shell_completes_commands_and_options(words: str, expected: set[str]) -> None:
    environment = {
        **os.environ,
        "_MESHPLAN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    program = "from meshplan.cli.main import run; run([])"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert expected <= set(done.stdout.split()), done.stderr


def test_the_schema_is_what_editors_read(meshplan: Command) -> None:
    import jsonschema

    schema = json.loads(meshplan("catalog", "schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    memory = schema["$defs"]["ConstraintsSpec"]["properties"]["memory_headroom"]
    assert memory["anyOf"][0]["type"] == "string"
    assert "description" in memory


def test_every_kind_has_a_schema(meshplan: Command) -> None:
    """Instances that ship with the tests are accepted, unknown keys are not."""
    import jsonschema

    from meshplan.planner.core.kinds import KINDS
    from meshplan.planner.expert_placement.problem import reader
    from meshplan.planner.rank_mapping import problem

    schemas = {kind: json.loads(meshplan("catalog", "schema", "--kind", kind).out) for kind in KINDS}
    for kind, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["properties"]["kind"]["const"] == kind
    assert set(schemas["rank-mapping"]["properties"]) == set(problem.KNOWN_KEYS)
    assert set(schemas["expert-placement"]["properties"]) == set(reader.KNOWN_KEYS)
    judge = jsonschema.Draft202012Validator(schemas["rank-mapping"])
    folder = Path(__file__).parents[1] / "data" / "rank_mapping"
    for file in folder.glob("*.json"):
        instance = json.loads(file.read_text())
        judge.validate(instance)
        assert not judge.is_valid({**instance, "nodes": 3})


def test_the_support_matrix_names_the_parallel_degrees(meshplan: Command) -> None:
    rows = json.loads(meshplan("catalog", "support", "--format", "json").out)
    features = {row["feature"] for row in rows if row["target"] == "megatron"}
    assert {"tensor_parallel", "pipeline_parallel", "context_parallel", "zero_stage"} <= features
    assert max(map(len, meshplan("catalog", "support").out.splitlines())) <= 100
