"""The documentation against the tree and the program: what it names exists, what it shows is what is printed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from command_line import Command

from meshplan import planner
from meshplan.cli.main import SUBCOMMANDS

ROOT = Path(__file__).parents[1]
# READMEs that are emitted files (goldens) or describe data of others are not documentation of this tree.
LEFT_OUT = ("tests/golden", "tests/data", ".venv", "build", "plans", "no-surfaces")
DOCS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md"))
    if not any(str(path.relative_to(ROOT)).startswith(part) for part in LEFT_OUT)
)
HISTORY = ROOT / "CHANGELOG.md"  # tells of files that are gone, too
GUIDES = [path for path in DOCS if path != HISTORY]
TOP = ("planner", "catalogs", "profiler", "cli", "tests", ".ci")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
REFERENCE = ROOT / "planner" / "SPEC.md"
TABLE = re.compile(r"(<!-- printed by: (?P<command>[^>]+?) -->\n)(?P<text>\|.*?)(?=<!-- end -->)", re.DOTALL)
PRINTED = re.compile(r"<!-- printed by: (?P<command>[^>]+?) -->\n```\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def spans(path: Path) -> list[str]:
    """The inline code of a document."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text()))


def named_paths(path: Path) -> list[str]:
    """What a document names that must be a file or folder of the tree: Python files, and paths from a top folder."""
    words = [word.lstrip("(").rstrip(".,;:()").split("::")[0] for span in spans(path) for word in span.split()]
    wanted = []
    for word in words:
        is_python = re.fullmatch(r"[\w./*-]+\.py", word) is not None
        is_below_top = re.fullmatch(rf"({'|'.join(map(re.escape, TOP))})/[\w./*{{}}-]*", word) is not None
        if is_python or is_below_top:
            wanted.append(word)
    return wanted


def is_there(word: str, folder: Path) -> bool:
    """Whether a document of ``folder`` may name a path: from the root, from the folder, or below it by its bare name.

    Capitals stand for any name. Tests are named as if they stood beside what they test.
    """
    pattern = re.sub(r"[A-Z]{2,}", "*", word).rstrip("/")
    tests = ROOT / "tests" / folder.relative_to(ROOT)
    below = () if folder == ROOT or "/" in pattern else (folder, tests)
    return any(any(base.glob(pattern)) for base in (ROOT, folder)) or any(any(base.rglob(pattern)) for base in below)


@pytest.mark.parametrize("path", GUIDES, ids=shown)
def test_every_file_that_is_named_exists(path: Path) -> None:
    assert [word for word in named_paths(path) if not is_there(word, path.parent)] == []


@pytest.mark.parametrize("path", DOCS, ids=shown)
def test_every_relative_link_resolves(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


# --- commands ---------------------------------------------------------------------------------------------------------


def command_lines(path: Path) -> list[str]:
    """Every ``meshplan …`` of a document, from inline code and from code blocks."""
    text = path.read_text()
    in_blocks = [line.strip().removeprefix("$ ") for block in FENCE.findall(text) for line in block.splitlines()]
    lines = [*spans(path), *in_blocks]
    return [line.replace("\\|", "|") for line in lines if line.startswith("meshplan ")]


def commands_of(line: str) -> list[tuple[str, list[str]]]:
    """(sub-command, rest) of a line; ``a|b`` in the second place stands for both."""
    ours = line.split(" #", maxsplit=1)[0].split(" -- ", maxsplit=1)[0]  # after -- stands another program's command
    words = [word for word in shlex.split(ours) if word != "…"][1:]
    if not words or words[0].startswith("-"):
        return []
    return [(name, words[1:]) for name in words[0].split("|")]


def problems_with(name: str, words: list[str]) -> list[str]:
    """What the program does not know: a sub-command, a member of a group, an option."""
    if name not in SUBCOMMANDS:
        return [f"no command {name}"]
    command: Any = typer.main.get_command(importlib.import_module(SUBCOMMANDS[name].module).app)
    leaves = [command]
    if hasattr(command, "commands"):
        members = words[0].split("|") if words and not words[0].startswith("-") else []
        unknown = [f"no command {name} {member}" for member in members if member not in command.commands]
        if unknown and hasattr(command, "default"):  # what is no member is the argument of this one
            members, unknown = [command.default], []
        if unknown:
            return unknown
        leaves = [command.commands[member] for member in members] or list(command.commands.values())
    known = {option for leaf in leaves for part in leaf.params for option in (*part.opts, *part.secondary_opts)}
    known |= {"--help", "-h"}
    given = [word.split("=")[0].strip("[]") for word in words if word.lstrip("[").startswith("-")]
    return [f"{name} has no option {option}" for option in given if option not in known]


@pytest.mark.parametrize("path", DOCS, ids=shown)
def test_every_command_line_is_one_that_the_program_takes(path: Path) -> None:
    found = [
        f"{line}: {problem}"
        for line in command_lines(path)
        for name, words in commands_of(line)
        for problem in problems_with(name, words)
    ]
    assert found == []


def test_every_command_is_in_the_readme() -> None:
    named = {name for line in command_lines(ROOT / "README.md") for name, _ in commands_of(line)}
    assert set(SUBCOMMANDS) - named == set()


def recipes() -> list[str]:
    """The command lines of the recipes, one after the other."""
    (block,) = re.findall(
        r"^## Six recipes\n\n```\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [line for line in block.splitlines() if not line.startswith("#")]


def test_every_recipe_finds_its_files_in_a_clone() -> None:
    """A file that a recipe reads is shipped, or a recipe before it has written it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    there = set(listed) if listed else {path.name for path in ROOT.iterdir()}
    missing = []
    for line in recipes():
        words = shlex.split(line.split(" -- ")[0])[2:]
        named = {word for word in words if re.fullmatch(r"[\w/.-]+\.(yaml|sh|json|csv)", word)}
        if line.startswith("meshplan init "):
            there |= named
        missing += [f"{line}: {name}" for name in sorted(named - there)]
    assert len(recipes()) == 7
    assert missing == []


def test_the_running_command_of_the_readme_is_improved(
    database: Path, meshplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = (line for line in recipes() if line.startswith("meshplan import "))
    words = shlex.split(line)[1:]
    at = words.index("--")
    document = meshplan(*words[:at], "--format", "json", *words[at:]).json
    (cost,) = (row for row in document["comparison"]["metrics"] if row["metric"] == "usd_per_million_tokens")
    current, proposed = (one["value"] for one in cost["predicted"])
    assert proposed < current


CHEAP = ("meshplan catalog list", "meshplan catalog schema", "meshplan catalog support")


def test_the_cheap_command_lines_run(meshplan: Command) -> None:
    lines = {line for path in GUIDES for line in command_lines(path) if line.startswith(CHEAP)}
    runnable = [line for line in lines if "|" not in line and "…" not in line]
    assert runnable
    for line in sorted(runnable):
        assert meshplan(*shlex.split(line)[1:]).code == 0, line


def test_every_format_and_exit_code_is_what_the_readme_says() -> None:
    from meshplan.catalogs import errors
    from meshplan.cli.render import Format

    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"--format {'|'.join(form.value for form in Format)}" in text
    said = re.search(r"Exit codes: (.*?)\. ", text)
    assert said is not None
    numbers = [int(number) for number in re.findall(r"\b([0-9]) [a-z]", said[1])]
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert sorted(numbers) == sorted(codes)


@pytest.mark.parametrize("path", GUIDES, ids=shown)
def test_every_module_and_script_that_is_run_exists(path: Path) -> None:
    text = path.read_text()
    modules = re.findall(r"python[0-9.]* -m ([\w.]+)", text)
    scripts = re.findall(r"python[0-9.]* ((?:tests|profiler|catalogs)/\S+\.py)", text)
    missing = [name for name in modules if not _is_module(name)]
    missing += [script for script in scripts if not (ROOT / script).is_file()]
    assert missing == []


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("path", GUIDES, ids=shown)
def test_every_make_target_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    code = "\n".join([*spans(path), *FENCE.findall(text)])
    assert [name for name in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE) if name not in targets] == []


# --- what is shown ----------------------------------------------------------------------------------------------------


def without_clocks(text: str) -> str:
    """The paragraph that ends with the processor time is wrapped by its length: spaces are joined there."""
    return re.sub(r"[0-9.]+ s of CPU", "T s of one core", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize(
    ("command", "text"),
    [(match["command"], match["text"]) for match in PRINTED.finditer((ROOT / "README.md").read_text())],
)
def test_the_readme_shows_what_is_printed(
    command: str, text: str, meshplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = meshplan(*command.split()[1:], "--no-store")
    assert outcome.code == 0
    pieces = [without_clocks(piece).strip() for piece in re.split(r"^…$", text, flags=re.MULTILINE)]
    printed, at = without_clocks(outcome.out), 0
    for piece in pieces:
        found = printed.find(piece, at)
        assert found >= 0, f"not printed any more, or not in this order:\n{piece}"
        at = found + len(piece)


def test_make_plan_asks_the_question_of_the_readme() -> None:
    done = subprocess.run(["make", "--dry-run", "plan"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "meshplan plan example.yaml --out plans" in done.stdout


def test_the_python_example_of_the_readme_runs(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "example.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own document
    assert (tmp_path / "plans" / "megatron_args.txt").is_file()
    assert planner.Plan.from_document(names["document"]).plan_id == names["plan"].plan_id
    assert "tensor_parallel" in capsys.readouterr().out


def test_every_name_of_the_library_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in planner.__all__ if f"`{name}`" not in text] == []


def test_every_folder_of_the_planner_is_in_the_readme() -> None:
    folders = {path.name for path in (ROOT / "planner").iterdir() if (path / "__init__.py").is_file()}
    text = (ROOT / "README.md").read_text()
    assert {name for name in folders if f"[{name}](planner/{name})" not in text} == set()


# --- claims of CONTRIBUTING -------------------------------------------------------------------------------------------


def test_a_device_a_node_type_and_a_model_are_one_entry_each(meshplan: Command, tmp_path: Path) -> None:
    """What ``catalogs/seed`` holds is what ``catalog import`` takes: a new accelerator is data alone."""
    names = ("h100-sxm-80gb", "dgx-h100", "llama-3.1-8b")
    text = yaml.safe_dump([meshplan("catalog", "export", name).json for name in names])
    for old, new in (("h100-sxm-80gb", "x1000"), ("dgx-h100", "pod-x1000"), ("llama-3.1-8b", "llama-x")):
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    for place, document in enumerate(yaml.safe_load(text)):
        file = tmp_path / f"entry{place}.yaml"
        file.write_text(yaml.safe_dump(document))
        assert meshplan("catalog", "import", file).code == 0
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "kind: training\nmodel: llama-x\ncluster: {nodes: [{type: pod-x1000, count: 1}]}\n"
        "workload: {sequence_length: 4096, global_batch_size: 64}\n"
    )
    planned = meshplan("plan", spec, "--no-store", "-f", "json")
    assert planned.code == 0
    assert planned.json["solution"]["status"] == "optimal"


def test_an_emit_target_is_one_line_and_one_module(
    monkeypatch: pytest.MonkeyPatch, meshplan: Command, spec: Path, tmp_path: Path
) -> None:
    from meshplan.planner.emit.training.megatron import job as megatron
    from meshplan.planner.launch import registry

    module = SimpleNamespace(job=megatron.job, features=megatron.features)
    monkeypatch.setitem(sys.modules, "toy_target", module)
    line = registry.Target(name="toy", module="toy_target", summary="toy")
    monkeypatch.setattr(registry, "TARGETS", (*registry.TARGETS, line))
    assert meshplan("plan", spec, "--tag", "mine").code == 0
    assert meshplan("emit", "mine", "--target", "toy", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "plan.json").is_file()


def test_a_command_is_one_line_and_one_module(monkeypatch: pytest.MonkeyPatch, meshplan: Command) -> None:
    from meshplan.cli import main

    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command()
    def greet() -> None:
        typer.echo("good day")

    monkeypatch.setitem(sys.modules, "toy_command", SimpleNamespace(app=app))
    monkeypatch.setitem(main.SUBCOMMANDS, "greet", main.Subcommand(module="toy_command", help="Say good day."))
    assert meshplan("greet").out == "good day\n"
    assert "Say good day." in meshplan("--help").out


def test_the_reference_of_spec_keys_is_what_the_models_say(meshplan: Command, pytestconfig: pytest.Config) -> None:
    page = REFERENCE.read_text()

    def printed(match: re.Match[str]) -> str:
        return match[1] + meshplan(*shlex.split(match["command"])[1:]).out

    fresh = TABLE.sub(printed, page)
    if pytestconfig.getoption("--update-goldens"):
        REFERENCE.write_text(fresh)
    assert len(TABLE.findall(page)) == 6
    assert REFERENCE.read_text() == fresh
