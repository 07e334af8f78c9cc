"""``meshplan plan`` and ``estimate``: what is printed, stored and written, and what is not when something is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import SPEC, Command

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.commands import plan as plan_command
from meshplan.planner.core.solution import OnProgress, Progress

CLOCKS = re.compile(r'"(wall_s|cpu_s)": [^,\n]+')


def stored(database: Path) -> list[str]:
    return [row.plan_id for row in PlanRows(Catalog.open(str(database)).engine).list()]


def test_a_plan_is_printed_stored_and_tagged(meshplan: Command, spec: Path, database: Path) -> None:
    outcome = meshplan("plan", spec, "--tag", "first", "--name", "a try")
    assert outcome.code == 0
    (plan_id,) = stored(database)
    assert f"plan {plan_id} is stored" in outcome.out
    assert "✔" in outcome.out
    assert outcome.err == ""
    assert plan_id in meshplan("plans", "show", "first").out or "✔" in meshplan("plans", "show", "first").out
    listed = json.loads(meshplan("plans", "list", "--format", "json").out)
    assert [(row["plan_id"], row["tag"], row["name"]) for row in listed] == [(plan_id, "first", "a try")]


@pytest.mark.parametrize(
    ("command", "option", "values", "fix"),
    [
        ("plan", "--gpus", ("8xH100", "8xA100"), "join them: --gpus 8xH100,8xA100"),
        ("plan", "--slo", ("ttft_p99=2s", "tpot_p95=50ms"), "join them: --slo ttft_p99=2s,tpot_p95=50ms"),
        ("init", "--gpus", ("8xH100", "8xA100"), "join them: --gpus 8xH100,8xA100"),
        ("init", "--model", ("llama-3.1-8b", "llama-3.1-70b"), "keep one"),
    ],
)
def test_of_two_values_none_is_lost_without_a_word(
    meshplan: Command, database: Path, command: str, option: str, values: tuple[str, str], fix: str
) -> None:
    options = {"--model": ["llama-3.1-8b"], "--gpus": ["8xH100"], "--rate": ["1"], option: values}
    outcome = meshplan(command, *(word for name, each in options.items() for value in each for word in (name, value)))
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err
    assert f"given more than once, and only the last would count; {fix}" in " ".join(outcome.err.split())


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_that_no_generator_takes_is_refused(meshplan: Command, spec: Path, seed: str) -> None:
    """With a simulated load -1 ended as a bug of meshplan; a service refuses both."""
    outcome = meshplan("plan", spec, "--seed", seed)
    assert (outcome.code, "--seed" in outcome.err) == (2, True)


def test_a_number_with_a_comma_is_written_out(meshplan: Command, spec: Path) -> None:
    for text, fix in (("4,000", "thousands have no comma: 4000"), ("2,5", "a decimal has a point: 2.5")):
        outcome = meshplan("plan", spec, "--set", f"workload.sequence_length='{text}'")
        assert outcome.code == 2
        assert f"; {fix}" in " ".join(outcome.err.split())


def test_settings_and_switches_may_be_given_again(meshplan: Command, spec: Path) -> None:
    overrides = ("--set", "objective=num_devices", "--set", "workload.sequence_length=2k")
    assert meshplan("plan", spec, *overrides, "--no-store", "--no-store").code == 0


def test_a_tag_that_cannot_be_is_refused_before_the_search(meshplan: Command, spec: Path, database: Path) -> None:
    """The search may take minutes, and its plan would not be stored."""
    outcome = meshplan("plan", spec, "--tag", "latest")
    assert (outcome.code, outcome.out, stored(database)) == (4, "", [])
    assert "'latest' cannot be a tag" in outcome.err


def test_the_printed_commands_work(meshplan: Command, spec: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.json").write_text('{"iteration_s": 3.0}')
    printed = meshplan("plan", spec, "--db", "here.sqlite").out
    commands = [line.split()[1:] for line in printed.splitlines() if line.startswith("  meshplan ")]
    assert len(commands) == 4
    assert [meshplan(*command).code for command in commands] == [0] * 4


def test_no_store_leaves_nothing(meshplan: Command, spec: Path, database: Path) -> None:
    assert "(not stored)" in meshplan("plan", spec, "--no-store").out
    assert stored(database) == []


def test_the_whole_report_is_the_one_of_the_stored_plan(meshplan: Command, spec: Path) -> None:
    printed = meshplan("plan", spec, "--full").out
    assert printed.startswith(meshplan("plans", "show", "latest").out.rstrip())


def test_json_is_all_that_stands_on_stdout(meshplan: Command, spec: Path, tmp_path: Path) -> None:
    outcome = meshplan("plan", spec, "--format", "json", "--out", tmp_path / "out")
    document = json.loads(outcome.out)
    assert document["solution"]["status"] == "optimal"
    assert {"plan_id", "kind", "spec_digest", "catalog_digest", "config", "predicted", "memory"} <= document.keys()


def test_the_same_question_prints_the_same_bytes_but_for_the_clocks(
    meshplan: Command, spec: Path, tmp_path: Path
) -> None:
    first = meshplan("plan", spec, "--format", "json", "--seed", "3").out
    second = meshplan("plan", spec, "--format", "json", "--seed", "3", "--db", tmp_path / "other.sqlite").out
    assert CLOCKS.sub("", first) == CLOCKS.sub("", second)
    assert len(CLOCKS.findall(first)) == 2


def test_top_says_how_many_are_shown(meshplan: Command, spec: Path) -> None:
    assert len(meshplan("plan", spec, "--top", "9", "--format", "csv").out.splitlines()) == 10


def test_an_estimate_shows_the_one_configuration(meshplan: Command, tmp_path: Path, database: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"{SPEC}fixed: {{tensor_parallel: 4, zero_stage: 1, activation_recompute: full}}\n")
    outcome = meshplan("estimate", path)
    assert outcome.code == 0
    assert "one configuration, priced: it fits" in outcome.out
    assert stored(database) == []
    path.write_text(f"{SPEC}fixed: {{tensor_parallel: 1, zero_stage: 0, micro_batch_size: 8}}\n")
    outcome = meshplan("estimate", path)
    assert outcome.code == 3
    assert "it does not fit" in outcome.out
    assert "Where the step's time goes" in outcome.out


# --- no plan -------------------------------------------------------------------------------------------------------

# Tensor and pipeline degrees are pinned because the words matter here, not the search.
TOO_LARGE = SPEC.replace("llama-3.2-1b", "llama-3.1-70b") + "fixed: {tensor_parallel: 8, pipeline_parallel: 1}\n"


def test_no_plan_is_an_answer_with_its_own_exit_code(meshplan: Command, tmp_path: Path, database: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(TOO_LARGE)
    outcome = meshplan("plan", path, "--out", tmp_path / "out")
    assert outcome.code == 3
    said = ("Binding constraint: device memory", "Nearest miss:", "Least changes, each", "Tried: fixed.tensor_parallel")
    for words in (*said, "not stored"):
        assert words in outcome.out
    assert stored(database) == []
    assert not (tmp_path / "out").exists()
    outcome = meshplan("plan", path, "--format", "json")
    assert outcome.code == 3
    solution = json.loads(outcome.out)["solution"]
    assert solution["status"] == "infeasible"
    assert solution["binding_constraint"]
    assert solution["nearest_miss"]
    assert solution["least_change"]


# --- bad input -----------------------------------------------------------------------------------------------------

BAD = {
    "unknown model": ("model: llama-3.2-1b", "model: lama-3.2-1b", ["model: unknown model", "'llama-3.2-1b'"]),
    "unknown node": ("type: dgx-h100", "type: dgx-h10", ["cluster.nodes[0].type", "'dgx-h100'"]),
    "no devices": ("count: 1", "count: 0", ["cluster.nodes[0].count", "at least 1"]),
    "negative batch": ("global_batch_size: 64", "global_batch_size: -64", ["workload.global_batch_size", "-64"]),
    "misspelt key": ("sequence_length", "sequence_lenght", ["workload.sequence_lenght", "did you mean"]),
    "missing kind": ("kind: training", "", ["kind: is required: one of training"]),
    "unknown kind": ("kind: training", "kind: trainning", ["did you mean 'training'"]),
    "bare memory": ("cluster: {", "cluster: {host_memory: 512, ", ["cluster.host_memory", "no unit"]),
    "bits for bytes": ("cluster: {", "cluster: {host_memory: 512 Gb, ", ["cluster.host_memory", "counts bits"]),
    "duplicate key": ("kind: training", "kind: training\nkind: training", ["'kind' appears twice"]),
    "impossible degree": ("kind:", "fixed: {tensor_parallel: 3}\nkind:", ["fixed.tensor_parallel", "does not divide"]),
    "too many devices": ("kind:", "fixed: {data_parallel: 16}\nkind:", ["fixed", "16 devices, the cluster has 8"]),
    "aliases": ("kind:", f"x: &x 1\ny: [{'*x, ' * 200_000}]\nkind:", ["more than 100 aliases"]),
    "missing config": ("llama-3.2-1b", "./missing/config.json", ["model:", "missing/config.json"]),
    "unknown target": ("kind:", "constraints: {target: megatorn}\nkind:", ["constraints.target", "'megatron'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_explained_and_leaves_nothing(
    case: str, meshplan: Command, tmp_path: Path, database: Path
) -> None:
    old, new, words = BAD[case]
    path = tmp_path / "bad.yaml"
    path.write_text(SPEC.replace(old, new))
    for command in (("plan", path, "--out", tmp_path / "out"), ("estimate", path)):
        outcome = meshplan(*command)
        assert outcome.code == 2
        assert outcome.out == ""
        assert all(word in outcome.err for word in words), outcome.err
    assert not (tmp_path / "out").exists()
    assert stored(database) == []


def test_every_problem_is_printed_at_once(meshplan: Command, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = SPEC.replace("count: 1", "count: 0").replace("64", "0").replace("4096", "-1")
    path.write_text(text + "constraints: {memory_headroom: 4}\nfixed: {zero_stage: 9}\n")
    outcome = meshplan("plan", path)
    assert outcome.code == 2
    assert "5 problems in the spec" in outcome.err
    for where in (
        "cluster.nodes[0].count",
        "workload.sequence_length",
        "workload.global_batch_size",
        "constraints.memory_headroom",
        "fixed.zero_stage",
    ):
        assert f"  - {where}: " in outcome.err


def test_a_config_that_is_no_transformer_is_refused(meshplan: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "resnet", "depths": [3, 4, 6, 3]}')
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("llama-3.2-1b", "./config.json"))
    outcome = meshplan("plan", path)
    assert outcome.code == 2
    assert "model: " in outcome.err


def test_a_database_that_cannot_be_opened_is_a_catalog_error(meshplan: Command, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "no.sqlite").write_text("this is no database")
    outcome = meshplan("plan", spec, "--db", tmp_path / "no.sqlite")
    assert outcome.code == 4
    assert outcome.out == ""


# --- files ---------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_are_not_replaced_without_being_asked(meshplan: Command, spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert meshplan("plan", spec, "--out", out).code == 0
    before = contents(out)
    assert {"README.md", "megatron_args.txt", "rank_table.json", "plan.json"} <= before.keys()
    outcome = meshplan("plan", spec, "--out", out)
    assert outcome.code == 6
    assert "--force" in outcome.err
    assert "✔" in outcome.out
    assert contents(out) == before
    assert meshplan("plan", spec, "--out", out, "--force").code == 0
    assert contents(out) == before


def test_an_output_folder_that_is_a_file_is_refused(meshplan: Command, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    outcome = meshplan("plan", spec, "--out", tmp_path / "out")
    assert outcome.code == 6
    assert (tmp_path / "out").read_text() == "mine"


KILLED = """
import os, sys
from meshplan.planner.emit import writer
before = getattr(writer, sys.argv[1])
calls = []
def killed(*arguments, **options):
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    return before(*arguments, **options)
setattr(writer, sys.argv[1], killed)
from meshplan.cli.main import run
run(sys.argv[3:])
"""


@pytest.mark.parametrize("function", ["write_artifacts", "write_folder"])
def test_a_killed_process_leaves_nothing_half_written(
    function: str, spec: Path, database: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [function, "1", "plan", str(spec), "--out", str(out)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=os.environ, capture_output=True, check=False)
    assert done.returncode == -9
    assert stored(database)
    assert "✔" in done.stdout.decode()
    assert not out.exists()


# --- long work -----------------------------------------------------------------------------------------------------


def interrupting(*, when: str) -> Any:
    """A progress line whose reader presses Ctrl-C."""

    @contextmanager
    def line() -> Iterator[OnProgress]:
        def show(progress: Progress) -> None:
            if when == "at once" or progress.incumbent is not None:
                raise KeyboardInterrupt

        yield show

    return line


def test_ctrl_c_keeps_the_best_so_far(meshplan: Command, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.cli.progress.progress_line", interrupting(when="incumbent"))
    outcome = meshplan("plan", spec, "--format", "json")
    assert outcome.code == 0
    solution = json.loads(outcome.out)["solution"]
    assert solution["status"] in ("feasible", "optimal")
    assert solution["bound"] <= solution["objective"]


def test_ctrl_c_before_there_is_anything_ends_quietly(
    meshplan: Command, spec: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshplan.planner.service.make_plan", interrupted)
    outcome = meshplan("plan", spec)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")
    assert stored(database) == []


def test_a_time_limit_is_a_positive_number(meshplan: Command, spec: Path) -> None:
    for limit in ("0", "-1", "nan", "inf", "soon"):
        assert meshplan("plan", spec, "--time-limit", limit).code == 2


# --- files that would be missing something -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("constraints: {target: deepspeed}", ["may have tensor_parallel", "--script FILE", "fixed.tensor_parallel=1"]),
        ("constraints: {target: accelerate}", ["tensor_parallel and context_parallel", "--script FILE"]),
        ("constraints: {target: any}", ["--script train.py"]),
        ("constraints: {target: torchtune}", ["start from a checkpoint", "workload.phase: sft"]),
        ("constraints: {target: megatron}\nphase: lora", ["adapters (phase lora)", "target axolotl or torchtune"]),
    ],
)
def test_what_the_files_would_lack_is_said_before_the_search(
    change: str, words: list[str], meshplan: Command, tmp_path: Path, database: Path
) -> None:
    path = tmp_path / "spec.yaml"
    change, _, phase = change.partition("\nphase: ")
    spec = SPEC.replace("kind:", f"{change}\nkind:", 1)
    if phase:
        spec = spec.replace("global_batch_size: 64", f"global_batch_size: 64, phase: {phase}, lora_rank: 16")
    path.write_text(spec)
    outcome = meshplan("plan", path, "--out", tmp_path / "out")
    assert (outcome.code, outcome.out) == (6, "")
    assert all(word in outcome.err for word in words), outcome.err
    assert stored(database) == []


@pytest.mark.parametrize(
    ("phase", "target", "launched"),
    [("lora, lora_rank: 16", "megatron", False), ("lora, lora_rank: 16", "", True), ("sft", "", True)],
)
def test_a_plan_that_its_framework_does_not_launch_says_so_and_names_one_that_does(
    phase: str, target: str, launched: bool, meshplan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    said = f"constraints: {{target: {target}}}\nkind:" if target else "kind:"
    path.write_text(
        SPEC.replace("global_batch_size: 64", f"global_batch_size: 64, phase: {phase}").replace("kind:", said, 1)
    )
    outcome = meshplan("plan", path)
    assert outcome.code == 0
    (command,) = [line for line in outcome.out.splitlines() if "meshplan emit" in line]
    assert ("--target deepspeed" in command) is not launched
    assert ("No launcher files: megatron cannot express adapters" in " ".join(outcome.out.split())) is not launched


@pytest.mark.parametrize(
    ("phase", "target", "model"),
    [
        ("lora, lora_rank: 16", "", "llama-3.1-8b"),
        ("qlora, lora_rank: 16", "", "llama-3.1-8b"),
        ("sft", "axolotl", "llama-3.1-8b"),
        ("sft", "megatron", "llama-3.1-8b"),
        ("sft", "megatron", "falcon-7b"),  # 71 heads
    ],
)
def test_the_other_choice_that_is_named_next_is_legal(
    phase: str, target: str, model: str, meshplan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    said = f"constraints: {{target: {target}}}\nkind:" if target else "kind:"
    spec = SPEC.replace("global_batch_size: 64", f"global_batch_size: 64, phase: {phase}")
    path.write_text(spec.replace("kind:", said, 1).replace("llama-3.1-8b", model))
    printed = meshplan("plan", path).out
    (command,) = [line for line in printed.splitlines() if "--instead" in line]
    assert meshplan(*command.split()[1:]).code == 0


@pytest.mark.parametrize(
    ("model", "engine", "is_named"),
    [("llama-3.1-8b", "vllm", True), ("llama-3.1-8b", "llama.cpp", False), ("falcon-7b", "vllm", False)],
)
def test_a_degree_that_an_engine_does_not_take_is_not_named_next(
    model: str, engine: str, is_named: bool, meshplan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"{{kind: serving, model: {model}, cluster: {{nodes: [{{type: dgx-h100, count: 1}}]}}, "
        f"workload: {{input_length: 500, output_length: 100, concurrency: 4}}, constraints: {{target: {engine}}}}}"
    )
    (command,) = [line for line in meshplan("plan", path).out.splitlines() if " explain " in line]
    assert ("--instead" in command) is is_named


def test_a_script_answers_it(meshplan: Command, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("kind:", "constraints: {target: any}\nkind:", 1))
    assert meshplan("plan", path, "--out", tmp_path / "out", "--script", "mine.py").code == 0
    assert "mine.py" in (tmp_path / "out" / "launch.sh").read_text()
    pinned = SPEC.replace("kind:", "constraints: {target: deepspeed}\nfixed: {tensor_parallel: 1}\nkind:", 1)
    path.write_text(pinned)
    assert meshplan("plan", path, "--out", tmp_path / "own").code == 0
    assert (tmp_path / "own" / "train.py").is_file()


@pytest.mark.parametrize(("least_s", "numba", "says"), [(0.0, None, True), (0.0, "here", False), (1e6, None, False)])
def test_a_long_simulation_names_what_makes_it_shorter(
    least_s: float, numba: str | None, says: bool, meshplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "LONG_S", least_s)
    monkeypatch.setattr(plan_command, "find_spec", lambda _name: numba)
    asked = ("--model", "llama-3.2-1b", "--gpus", "1xH100", "--lengths", "64/8", "--slo", "ttft_p99=2s", "--no-store")
    done = meshplan("plan", *asked, "--rate", "1")
    assert done.code == 0
    assert ("meshplan[fast]" in done.err) is says
    assert "meshplan[fast]" not in meshplan("plan", *asked[:6], "--no-store", "--concurrency", "2").err
