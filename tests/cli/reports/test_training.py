"""What people read, within 80 columns; from frozen plans, so that a better estimator changes no golden here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from meshplan.cli.reports.configuration import TOP_COLUMNS, config_text
from meshplan.cli.reports.stand_alone import report as answer_report
from meshplan.cli.reports.training.plan import question_text
from meshplan.cli.reports.training.plan import report as training_report
from meshplan.planner.core.plan import Interval, Plan

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
FROZEN = {"70b": GOLDEN / "plan-70b.json", "moe": GOLDEN / "plan-moe.json"}


def frozen(name: str) -> Plan:
    return Plan.from_document(json.loads(FROZEN[name].read_text(encoding="utf-8")))


def narrow(text: str) -> bool:
    """Whether every line fits 80 columns, but for addresses, which stay in one piece."""
    return all(len(line) <= 80 for line in text.splitlines() if "://" not in line)


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("command", ["plans show", "explain"])
def test_a_plan_reads_as_it_did(name: str, command: str, meshplan: Command, golden: Any) -> None:
    outcome = meshplan(*command.split(), FROZEN[name])
    assert outcome.code == 0
    assert narrow(outcome.out)
    golden(f"cli/{command.replace(' ', '-')}-{name}.txt", outcome.out)


@pytest.mark.parametrize("form", ["markdown", "csv"])
def test_the_flat_forms_hold_the_table_of_the_best(form: str, meshplan: Command, golden: Any) -> None:
    golden(f"cli/plans-show-70b.{form}", meshplan("plans", "show", FROZEN["70b"], "--format", form).out)


def test_two_plans_side_by_side(meshplan: Command, golden: Any) -> None:
    outcome = meshplan("compare", FROZEN["70b"], FROZEN["moe"])
    assert narrow(outcome.out)
    golden("cli/compare.txt", outcome.out)


def test_json_and_yaml_hold_the_whole_plan(meshplan: Command) -> None:
    import yaml

    document = json.loads(FROZEN["70b"].read_text(encoding="utf-8"))
    assert json.loads(meshplan("plans", "show", FROZEN["70b"], "--format", "json").out) == document
    assert yaml.safe_load(meshplan("plans", "show", FROZEN["70b"], "--format", "yaml").out) == document


def test_two_rows_that_differ_in_their_layers_alone_are_told_apart() -> None:
    plan = frozen("70b")
    first = next(row for row in plan.alternatives if "chosen" in row)
    layers = list(first["config"]["layers_per_chunk"])
    layers[0], layers[-1] = layers[0] + 1, layers[-1] - 1
    twin = {**first, "chosen": False, "config": {**first["config"], "layers_per_chunk": layers}}
    text = training_report(replace(plan, alternatives=(first, twin)))
    assert narrow(text)
    assert f"row 2: {layers[0]}" in text
    assert "Layers of each" not in training_report(replace(plan, alternatives=(first,)))


def test_a_report_says_what_its_proof_does_not_speak_of() -> None:
    """A pin of these may beat what is called optimal; what is pinned or asked to be searched is left out."""
    dense, experts = frozen("70b"), frozen("moe")
    assert "cuda_graphs" in training_report(dense)
    assert "expert_dispatcher" not in training_report(dense)
    assert "expert_dispatcher" in training_report(experts)
    spec = {**dense.spec, "fixed": {"cuda_graphs": "full"}, "constraints": {"search_over": ["outer_zero_stage"]}}
    said = training_report(replace(dense, spec=spec)).partition("Not searched")[2]
    assert "gradient_precision" in said
    assert "cuda_graphs" not in said
    assert "outer_zero_stage" not in said
    estimated = replace(dense, solution={**dense.solution, "status": "estimated"})
    assert "Not searched" not in training_report(estimated)


@pytest.mark.parametrize(("target", "may_be_pinned"), [("megatron", True), ("torchtitan", False), ("axolotl", False)])
def test_a_report_names_no_pin_that_the_framework_refuses_whatever_else_is_chosen(
    target: str, may_be_pinned: bool
) -> None:
    dense = frozen("70b")
    text = training_report(replace(dense, spec={**dense.spec, "constraints": {"target": target}}))
    said = text.partition("Not searched")[2]
    assert ("cuda_graphs" in said) is may_be_pinned
    assert "gathered_num_layers" not in text  # FlagScale's and ours alone: no framework that is planned for has it


def test_a_batch_of_tokens_is_read_in_groups_of_three() -> None:
    spec = {"model": "m", "workload": {"sequence_length": 4096, "global_batch_tokens": 4194304}}
    assert "global batch 4,194,304 tokens" in question_text(spec)


def test_no_number_is_cut_however_large() -> None:
    plan = frozen("moe")

    def huge(row: Any) -> dict[str, Any]:
        if "chosen" not in row:
            return dict(row)
        config = {**row["config"], "world_size": 102_400, "data_parallel": 12_800, "activation_recompute": "selective"}
        return {**row, "config": config, "iteration_s": 1234.5}

    text = training_report(replace(plan, alternatives=tuple(map(huge, plan.alternatives))))
    assert narrow(text)
    assert "102400" in text
    assert "12800" in text
    assert "20.6 min" in text
    assert "selective" in text


def test_an_interval_that_is_wider_than_the_constants_says_so() -> None:
    plan = frozen("70b")
    step, width = plan.predicted["iteration_s"], plan.provenance["calibration"]["time_error_p90"]
    as_fitted = replace(step, low=step.value / (1.0 + width), high=step.value * (1.0 + width))
    assert "for what is not validated" not in training_report(with_step(plan, as_fitted))
    doubled = with_step(plan, replace(step, high=2.0 * step.value))
    told = " ".join(training_report(doubled).split())
    assert "; here a factor of 2.0 either way, for what is not validated." in told


def with_step(plan: Plan, step: Interval) -> Plan:
    return replace(plan, predicted={**plan.predicted, "iteration_s": step})


def test_an_infeasible_answer_says_what_binds_and_what_would_do() -> None:
    solution = {
        "status": "infeasible",
        "solver": "enumeration",
        "cpu_s": 0.1,
        "gap": None,
        "num_candidates": 12,
        "binding_constraint": "device memory: 78.4 GiB usable on each H100",
        "nearest_miss": {
            "limit": "device memory",
            "excess": 1e9,
            "excess_text": "953.7 MiB too much",
            "config": {"tensor_parallel": 8, "activation_recompute": "full"},
        },
        "least_change": [{"constraint": "max_devices", "change": "16 devices of this type instead of 8"}],
    }
    text = training_report(replace(frozen("70b"), config={}, predicted={}, solution=solution, alternatives=()))
    assert narrow(text)
    assert "Binding constraint: device memory: 78.4 GiB" in text
    assert "Nearest miss: device memory: 953.7 MiB too much with TP8 full recompute" in text
    assert "Least change: 16 devices of this type instead of 8 (max_devices)" in text


def test_the_answer_of_a_stand_alone_problem_shows_its_fields() -> None:
    plan = Plan(
        kind="gpu-allocation",
        spec={"kind": "gpu-allocation", "name": "toy"},
        spec_digest="s",
        catalog_digest="c",
        config={},
        predicted={},
        solution={"status": "feasible", "objective": 5.0, "bound": 4.0, "gap": 0.2, "solver": "search", "cpu_s": 0.5},
        answer={
            "counts": {"A10G": 1, "H100": 2},
            "placement": [[0, 1, 2], [2, 1, 0]],
            "prices": [0.5] * 60,
            "changes": [{"change": "one more L4"}],
        },
    )
    text = answer_report(plan)
    assert narrow(text)
    for words in (
        "gpu-allocation toy: feasible, objective 5, bound 4 (gap 20.0%)",
        "counts.H100",
        "table of 2 × 3",
        "list of 60",
        "one more L4",
    ):
        assert words in text


def test_what_lies_off_the_device_is_named() -> None:
    config = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "zero_stage": 3,
        "data_parallel": 8,
        "data_parallel_shard": 8,
        "activation_recompute": "full",
        "optimizer_offload": True,
        "parameter_offload": True,
        "activation_offload": True,
        "offload_to": "nvme",
    }
    assert config_text(config) == "DP8 ZeRO-3 optimizer and parameters on nvme activations on host full recompute"
    columns = {column.key: column for column in TOP_COLUMNS}
    derived = {key: columns[key].derive for key in ("activation_recompute", "zero_stage")}
    assert {key: derive(config) for key, derive in derived.items() if derive is not None} == {
        "activation_recompute": "full+host",
        "zero_stage": "3+nvme",
    }


def test_a_configuration_says_how_sequences_are_split_and_in_which_groups_states_are() -> None:
    config = {"context_parallel": 8, "data_parallel": 4, "data_parallel_shard": 2, "zero_stage": 3}
    assert config_text(config) == "CP8 DP4 ZeRO-3 in groups of 16"
    styled = {**config, "context_parallel_style": "ring-plain"}
    assert config_text(styled) == "CP8 ring-plain DP4 ZeRO-3 in groups of 16"


@pytest.mark.parametrize(
    ("objective", "title", "metric"),
    [("energy", "kWh/step", "energy_j_per_step"), ("usd_per_run", "run", "usd_per_run")],
)
def test_plans_are_compared_by_what_is_minimised(
    objective: str, title: str, metric: str, tmp_path: Path, meshplan: Command
) -> None:
    """The first row has the plan's own figure, and no other choice is better by more than the gap."""
    spec = tmp_path / "cheap.yaml"
    spec.write_text(
        "kind: training\nmodel: llama-3.2-1b\ncluster: {nodes: [{type: aws-p5-48xlarge, count: 1}]}\n"
        "workload: {sequence_length: 4096, global_batch_size: 16, num_training_tokens: 1000000000}\n"
        f"objective: {objective}\nconstraints: {{target: megatron}}\n"
    )
    plan = json.loads(meshplan("plan", spec, "--format", "json", "--no-store").out)
    table = [row["objective"] for row in plan["alternatives"] if "chosen" in row]
    assert table[0] == pytest.approx(plan["predicted"][metric]["value"], rel=1e-9)
    others = [row["dearer_by"] for row in plan["alternatives"] if "dearer_by" in row]
    assert others
    assert min(others) >= -plan["solution"]["gap"]
    shown = meshplan("plan", spec, "--no-store").out
    assert title in shown
    assert "Why not, " in shown
