"""Serving questions on the command line: printed, stored, launched, compared, and refused."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from command_line import Command

from meshplan.cli.reports.comparison import measured_columns
from meshplan.cli.reports.serving import advice
from meshplan.cli.reports.serving.certainty import calibration_text
from meshplan.cli.reports.serving.headline import question_text, status_text
from meshplan.cli.reports.serving.plan import top_columns, top_rows
from meshplan.cli.web.pages.views.serving import candidates
from meshplan.planner.core.plan import Plan
from meshplan.planner.serving.estimator import breakdown

VALIDATION = Path(__file__).parents[2] / "validation"
SPEC = """\
kind: serving
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {input_length: 1000, output_length: 100, request_rate_per_s: 10, num_requests: 200}
slo: {ttft_p99_s: 1.0, tpot_p95_s: 0.03}
"""


@pytest.fixture
def database(stored: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that keeps the question's plan as ``0``."""
    path = Path(shutil.copy(stored(SPEC), tmp_path / "catalog.sqlite"))
    monkeypatch.setenv("MESHPLAN_DB", str(path))
    return path


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "serving.yaml"
    path.write_text(SPEC)
    return path


def test_the_report_fits_a_terminal_and_names_the_slo(meshplan: Command) -> None:
    outcome = meshplan("plans", "show", "0")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    for word in ("✔", "SLO", "≤ 1.00 s", "What if …?", "KV cache", "rests on", "tok/s/user"):
        assert word in outcome.out


@pytest.mark.parametrize(
    ("gap", "says"),
    [(0.0, "no deployment is better;"), (1e-5, "more than 0.1% better;"), (0.02, "more than 2.0% better;")],
)
def test_no_plan_is_said_to_be_beaten_by_nothing(gap: float, says: str, meshplan: Command) -> None:
    made = Plan.from_document(json.loads(meshplan("plans", "show", "0", "--format", "json").out))
    assert says in status_text(replace(made, solution={**made.solution, "gap": gap}))


def test_the_rent_of_whole_nodes_is_told_from_the_rate_of_used_devices(meshplan: Command) -> None:
    """One device of eight serves: its dollars are those of the node, its tokens/s are its own."""
    text = " ".join(meshplan("plans", "show", "0").out.split())
    assert "7 of the cluster's devices stay free" in text
    assert "USD/h counts every device of a rented node, tok/s/dev the one that is used." in text


def test_a_power_limit_is_shown_with_what_its_interval_rests_on(meshplan: Command, spec: Path) -> None:
    free = " ".join(meshplan("plans", "show", "0").out.split())
    assert "Watts ×/÷" in free
    assert "power limit" not in free
    spec.write_text(SPEC + "objective: energy\npower_caps_w: [400]\n")
    shown = " ".join(meshplan("plan", spec, "--full").out.split())
    assert "every device held to 400 W" in shown
    assert "Under a power limit times err by ×/÷ 1.14" in shown


def test_stores_of_prefixes_are_shown_with_size_rate_and_break_even(meshplan: Command, spec: Path) -> None:
    load = "{input_length: 4000, output_length: 50, request_rate_per_s: 10, num_requests: 200, prefix_hit_rate: 0.9, "
    text = SPEC.replace("{input_length: 1000, output_length: 100, request_rate_per_s: 10, num_requests: 200}", load)
    spec.write_text(text.replace(load, load + "num_prefixes: 300}\nkv_tier: {choose: [host, nvme]}"))
    shown = " ".join(meshplan("plan", spec, "--full").out.split())
    assert "Prefixes beyond the devices: " in shown
    assert "its price is part of the nodes" in shown
    assert re.search(r"host memory: [\d.]+ GiB a device( \([^)]*\))? at [\d.]+ GB/s, pays above [\d.]+ [GM]B/s", shown)
    assert re.search(r"NVMe: [\d.]+ GiB a device at 6.3 GB/s", shown)
    assert "searched without a tier of prefixes and with each store" in shown
    # The bound is not the sampling's: sizes of tiers are formulas.
    assert "neither shown to hold" not in shown


def test_the_report_names_the_sources_behind_each_interval(meshplan: Command) -> None:
    shown = " ".join(meshplan("plans", "show", "0").out.split())
    (line,) = re.findall(r"Intervals on dgx-h100: .*? Constants fitted to [^.]*\.", shown)
    assert re.search(r"tpot ×/÷ \d\.\d\d \(\d+ sources? of vllm on hopper\)", line)
    assert "90 % of the runs of a source that was left out" in line


def test_neighbours_that_rest_on_the_same_sources_name_them_once() -> None:
    def shown(**basis: str) -> str:
        calibration = {
            "engine": "vllm",
            "architecture": "ada",
            "num_runs": 0,
            "error_p90": {"ttft": 0.5, "tpot": 0.2},
            "basis": basis,
        }
        plan = SimpleNamespace(
            config={"pools": [{"node_type": "ada"}]}, provenance={"calibration": {"ada": calibration}}
        )
        return " ".join(calibration_text(cast("Plan", plan), 80).split())

    same = shown(ttft="2 sources of vllm", tpot="2 sources of vllm")
    assert "ttft ×/÷ 1.65, tpot ×/÷ 1.22 (2 sources of vllm); no published run is of vllm on ada" in same
    apart = shown(ttft="1 source of vllm", tpot="2 sources of vllm")
    assert "ttft ×/÷ 1.65 (1 source of vllm), tpot ×/÷ 1.22 (2 sources of vllm)" in apart


def test_the_report_says_over_which_runs_the_slos_are_kept(meshplan: Command, spec: Path) -> None:
    """Where the question gives the number of requests, the plan's own run is the answer."""
    kept = "runs of 20,480 requests keep every SLO"
    assert kept not in " ".join(meshplan("plans", "show", "0").out.split())
    spec.write_text(SPEC.replace(", num_requests: 200", ""))
    for words in (("plan", spec), ("plans", "show", "latest")):
        assert kept in " ".join(meshplan(*words).out.split())


def test_rivals_are_read_against_the_slos_of_the_question(meshplan: Command) -> None:
    """TTFT's 99th percentile is the one that has an SLO, TPOT's is the 95th; plans stored before have the mean."""
    plan = Plan.from_document(meshplan("plans", "show", "0", "--format", "json").json)
    titles = [column.title for column in top_columns(plan)]
    assert {"TTFT p99", "TPOT p95"} <= set(titles)
    assert top_rows(plan)[0]["tpot_p95_s"] == plan.predicted["tpot_p95_s"].value
    assert {"first token, p99", "per token, p95"} <= set(candidates(plan)["columns"])
    older = [{key: value for key, value in row.items() if key != "slo_latencies"} for row in plan.alternatives]
    titles = [column.title for column in top_columns(replace(plan, alternatives=tuple(older)))]
    assert {"TTFT p99", "TPOT"} <= set(titles)


def test_json_has_the_plan_and_csv_its_rivals(meshplan: Command, spec: Path) -> None:
    document = meshplan("plan", spec, "--format", "json").json
    assert document["kind"] == "serving"
    assert {"ttft_p99_s", "tpot_p95_s"} <= document["predicted"].keys()
    assert {"status", "objective", "bound", "gap", "cpu_s", "num_simulated"} <= document["solution"].keys()
    assert len(document["rank_table"]) == document["config"]["num_devices"]
    listed = meshplan("plans", "show", "latest", "--format", "csv").out.splitlines()
    assert listed[0].startswith("chosen,label,num_devices")
    assert len(listed) == len(document["alternatives"]) + 1


def test_files_are_written_for_the_engine(meshplan: Command, tmp_path: Path) -> None:
    outcome = meshplan("emit", "0", "--out", tmp_path / "out")
    assert outcome.code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "launch.sh", "plan.json", "workers.txt"} <= names
    again = meshplan("emit", "0", "--out", tmp_path / "out")
    assert again.code == 6
    assert "--force" in again.err


def test_a_plan_is_explained_compared_and_drawn(meshplan: Command, tmp_path: Path) -> None:
    other = meshplan("explain", "0", "--instead", "tensor_parallel=2")
    assert other.code == 0
    assert "pools.mixed.layout.tensor_parallel" in other.out or "the same" in other.out
    page = tmp_path / "page.html"
    assert meshplan("explain", "0", "--pareto", page).code == 0
    text = page.read_text()
    pictures = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    assert len(pictures) == 2
    for picture in pictures:
        ET.fromstring(picture)
    assert "llama-3.1-8b on 1 × dgx-h100" in " ".join(meshplan("plans", "list", "--format", "csv").out.split())


def test_one_configuration_is_simulated_as_pinned(meshplan: Command, spec: Path) -> None:
    spec.write_text(SPEC + "fixed: {tensor_parallel: 2, num_workers: 1}\n")
    document = meshplan("estimate", spec, "--format", "json").json
    (pool,) = document["config"]["pools"]
    assert (pool["layout"]["tensor_parallel"], pool["num_workers"]) == (2, 1)
    assert document["solution"]["kept"] in (True, False)


def test_no_plan_is_an_answer(meshplan: Command, spec: Path) -> None:
    spec.write_text(SPEC.replace("tpot_p95_s: 0.03", "tpot_p95_s: 0.0005"))
    outcome = meshplan("plan", spec)
    assert outcome.code == 3
    assert "Binding constraint" in outcome.out
    assert "Least change" in outcome.out


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("arrival_s,input_length,output_length\n", "no request"),
        ("arrival_s,input_length,output_length\n-1,5,5\n", "arrival_s"),
        ("arrival_s,input_length,output_length\n0,5,0\n", "output_length"),
        ("arrival_s,input_length\n0,5\n", "output_length"),
    ],
)
def test_bad_traces_are_named(meshplan: Command, spec: Path, trace: str, said: str) -> None:
    (spec.parent / "t.csv").write_text(trace)
    spec.write_text(
        SPEC.replace(
            "{input_length: 1000, output_length: 100, request_rate_per_s: 10, num_requests: 200}", "{trace: t.csv}"
        )
    )
    outcome = meshplan("plan", spec)
    assert outcome.code == 2
    assert said in outcome.err


def test_a_trace_that_is_not_there_is_named(meshplan: Command, spec: Path) -> None:
    spec.write_text(
        "\n".join(line if "workload" not in line else "workload: {trace: nowhere.csv}" for line in SPEC.splitlines())
    )
    outcome = meshplan("plan", spec)
    assert outcome.code == 2
    assert "nowhere.csv" in outcome.err


def test_points_of_a_curve_are_given_and_the_rest_is_judged(meshplan: Command, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (VALIDATION / "serving-observations.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    made = []
    for count in (2, 4, 8):
        workload = {**row["workload"], "concurrency": count, "output_length": 64}
        made.append({**row, "id": f"c{count}", "workload": workload, "derived": {}})
    path = tmp_path / "curve.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in made))
    document = meshplan("validate", path, "--from-points", "1", "--jobs", "1", "--format", "json").json
    assert sorted(item["status"] for item in document["rows"]) == ["given", "ok", "ok"]
    assert document["num_curves"] == 1
    assert {item["metric"]: item["n"] for item in document["without_points"]}["tpot_s"] == 2
    assert "runs" in document["started_from"][0]
    table = meshplan("validate", path, "--from-points", "1", "--jobs", "1")
    assert "without the points" in table.out
    refused = meshplan("validate", path, "--from-points", "3", "--jobs", "1")
    assert refused.code == 2
    assert "more than 3 runs" in refused.err


def test_own_constants_are_named_and_layouts_held_out(meshplan: Command, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (VALIDATION / "serving-observations.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({**row, "workload": {**row["workload"], "concurrency": 2, "output_length": 64}}) + "\n")
    options = ("calibrate", path, "--dry-run", "--hold-out", "layout", "--format", "json")
    document = meshplan(*options, "--constants", "decode_factor, host_step_s").json
    assert {item["runs"] for item in document["layout"]} == {1}
    refused = meshplan(*options, "--constants", "decode_faktor")
    assert refused.code == 2
    assert "decode_faktor" in refused.err
    assert "decode_factor" in refused.err


def test_the_question_says_how_tokens_are_drawn() -> None:
    load = {"input_length": 5, "output_length": 7}
    drawn = question_text({"workload": {**load, "sampling": {"top_p": 0.9, "penalties": True}}})
    assert ", drawn with top-p 0.9 and penalties" in drawn
    assert "drawn" not in question_text({"workload": load})


def test_the_part_that_waits_for_clients_has_one_name() -> None:
    """The report of a stored plan does not import the estimator, whose breakdown names it."""
    assert advice.API_SERVER == breakdown.API_SERVER


def test_what_clients_send_is_in_no_interval() -> None:
    sent = {"predicted": {"value": 3.0, "low": 3.0, "high": 3.0}, "inside": False}
    found = {"predicted": {"value": 3.0, "low": 2.0, "high": 4.0}, "inside": True}
    inside = next(column for column in measured_columns() if column.key == "inside")
    assert inside.derive is not None
    assert [inside.derive(row) for row in (sent, found, {**found, "inside": False})] == ["–", "yes", "no"]


def test_conversations_are_planned_for_a_router_that_finds_them_and_say_what_caches_hold(
    meshplan: Command, tmp_path: Path
) -> None:
    """Described in a spec, they are told in the question, in the answer and in the launch files."""
    spec = tmp_path / "chat.yaml"
    spec.write_text(
        SPEC.replace(
            "input_length: 1000, output_length: 100, request_rate_per_s: 10, num_requests: 200",
            "input_lengths: {p50: 300, p90: 900, max: 2000}, output_length: 100, request_rate_per_s: 10, "
            "num_requests: 600, sessions: {turns: 4, gap_s: 10}",
        )
        + "fixed: {tensor_parallel: 1, num_workers: 2}\nconstraints: {target: vllm}\n"
    )
    done = meshplan("plan", str(spec), "--out", str(tmp_path / "serve"))
    assert done.code == 0, done.err
    words = " ".join(done.out.split())
    assert "460 (1 … 2,000) tokens in, 100 out, conversations of 4 turns 10.00 s apart, 10 requests/s" in words
    assert re.search(r"Caches hold \d+\.\d% of the prompts' tokens, at most \d+\.\d% could be\.", words)
    assert "--policy cache_aware" in (tmp_path / "serve" / "router.sh").read_text()
    assert "--max-model-len 9472" in (tmp_path / "serve" / "mixed_args.txt").read_text().replace("\n", " ")
