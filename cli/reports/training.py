"""A training plan as a person reads it, within 80 columns: the choice, the runners-up, memory, time, and what lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.reports import mixed
from meshplan.cli.reports.configuration import (
    COSTS,
    TOP_COLUMNS,
    config_text,
    layers_text,
)
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import (
    cluster_text,
    effort_text,
    instead_of,
    model_on_cluster,
    paragraph,
    rejected_section,
)
from meshplan.cli.reports.quantities import (
    METRIC_TITLES,
    bar,
    gib,
    interval_text,
    metric_text,
    metric_title,
    percent,
    signed_percent,
)
from meshplan.cli.reports.whole_run.batches import batch_section
from meshplan.cli.reports.whole_run.far_apart import far_apart_section
from meshplan.cli.reports.whole_run.forecast import run_section
from meshplan.cli.reports.whole_run.lengths import lengths_section
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.solution import OPTIMAL_RELATIVE_GAP
from meshplan.planner.core.text import counted
from meshplan.planner.training.admission import shortage_text
from meshplan.planner.training.explanation import (
    Explanation,
    admitted,
    calibration,
    fit,
    may_split_layers,
    memory_basis,
    width_text,
)

_RANK_COLUMN = "first_stage"
_VISIBLY_WIDER = 0.01  # of a half-width: what rounding to a percent hides
_RATE = "tokens_per_s_per_device"
NOT_COMPONENTS = {"typical_bytes", "safe_bytes"}
_COMPONENT_TITLES = {"host": "on host", "optimizer": "optim.", "activations": "activ.", "gradients": "grads"}


def report(plan: Plan, *, width: int = TABLE_WIDTH) -> str:
    """The complete report; an infeasible plan names the binding constraint and the least change that helps."""
    sections = [headline(plan, width)]
    if plan.solution.get("status") == "infeasible" and not plan.config:
        sections += [no_plan_section(plan.solution, width), rejected_section(plan, width)]
    elif mixed.is_mixed(plan.config):
        sections += [
            mixed.stages_section(plan, width),
            mixed.alone_section(plan, width),
            predicted_section(plan, width),
            time_section(plan, width),
        ]
    else:
        sections += [
            far_apart_section(plan, width),
            mapping_section(plan, width),
            top_section(plan, width),
            predicted_section(plan, width),
            run_section(plan, width),
            lengths_section(plan, width),
            batch_section(plan, width),
            memory_section(plan, width),
            time_section(plan, width),
            alternatives_section(plan, width),
            rejected_section(plan, width),
        ]
    return "\n".join(section for section in sections if section)


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """Ask about another choice, write the launcher files, attach what was measured."""
    if mixed.is_mixed(plan.config):
        explained = [f"meshplan explain {plan.plan_id}{where}"]
        emit = f"meshplan emit {plan.plan_id}{where} --target flagscale --out plans"
        return explained if emitted else [*explained, emit]
    if plan.far_apart is not None:
        explained = [f"meshplan explain {plan.plan_id}{where}"]
        return explained if emitted else [*explained, f"meshplan emit {plan.plan_id}{where} --out plans"]
    if may_split_layers(plan):
        instead = instead_of(int(plan.config["tensor_parallel"]), len(plan.rank_table or ()))
    else:
        instead = "" if plan.config["activation_recompute"] == "full" else " --instead activation_recompute=full"
    commands = [f"meshplan explain {plan.plan_id}{where}{instead}"]
    if not emitted:
        commands.append(f"meshplan emit {plan.plan_id}{where} --out plans")
    return [*commands, f"meshplan plans record {plan.plan_id}{where} measured.json"]


# --- headline ------------------------------------------------------------------------------------------------------


def _tokens_text(written: Any) -> str:
    """A number of tokens as a spec has it: 4194304 in groups of three, ``4M`` as it is written."""
    return counted(written, "token") if isinstance(written, int) else f"{written} tokens"


def question_text(spec: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> str:
    """What was asked, in one line; with the plan's choices the length of an encoder–decoder's targets, too."""
    workload = spec.get("workload", {})
    batch = workload.get("global_batch_size")
    batch_text = counted(batch, "sequence") if batch is not None else _tokens_text(workload.get("global_batch_tokens"))
    target = f" with targets of {written}" if (written := (config or {}).get("decoder_sequence_length")) else ""
    return (
        f"{spec.get('model')} on {cluster_text(spec.get('cluster', {}))}: sequences of "
        f"{workload.get('sequence_length')}{target}, global batch {batch_text}, {workload.get('precision', 'bf16')}"
    )


def status_text(plan: Plan) -> str:
    """Status, proof and effort, in one sentence."""
    solution = plan.solution
    status, gap, count = solution["status"], solution.get("gap"), solution.get("num_candidates") or 0
    if "oom" in solution:
        return f"one configuration, priced: {fit_text(plan)}"
    if gap is None and status == "feasible":
        return "the best plan with these choices pinned"
    if status == "infeasible":
        return f"infeasible: none of {counted(count, 'candidate')} stays within the limits" if count else "infeasible"
    if status == "optimal":
        known = f"optimal under the model: {_margin(gap or 0.0)} among {counted(count, 'candidate')}{admitted(plan)}"
    else:
        known = f"feasible: at most {percent(gap or 0.0)} from the best possible, when the search stopped"
    return f"{known}; {effort_text(solution)}"


def _margin(gap: float) -> str:
    """What the gap of an optimal plan means: ties are decided by simplicity."""
    if gap <= OPTIMAL_RELATIVE_GAP:
        return "no better one"
    return f"none is more than {percent(gap)} better, which is less than the model can tell apart,"


def fit_text(plan: Plan) -> str:
    """Whether a pinned configuration fits, with the numbers."""
    if not plan.solution.get("oom"):
        return f"{fit(plan)} on the worst rank"
    safe, limit = plan.memory["worst"]["safe_bytes"], plan.memory["limit_bytes"]
    return f"it does not fit, {shortage_text(safe, limit)}"


def headline(plan: Plan, width: int) -> str:
    """The question, the status and the gap, and a warning where the plan's memory is not safe."""
    head = paragraph(question_text(plan.spec, plan.config), width) + paragraph(status_text(plan), width)
    if "admitted_by" in plan.solution and "oom" not in plan.solution:
        head += paragraph(f"Warning: with these pins {fit(plan)}.", width)
    return head


def mapping_section(plan: Plan, width: int) -> str:
    """Which nodes are used and what the mapping is worth; empty where all links are alike."""
    mapping = plan.mapping
    if mapping is None:
        return ""
    names = mapping["node_names"]
    left_out = [
        f"{what}: {', '.join(names[node] for node in mapping[f'{what}_nodes'])}"
        for what in ("spare", "excluded")
        if mapping[f"{what}_nodes"]
    ]
    worth = (
        f"rank mapping by {mapping['method']}: {mapping['gain']:.1%} less than rank order "
        f"({format_duration(mapping['identity_s'])} per step), random mappings "
        f"{format_duration(mapping['random_mean_s'])}, gap {percent(mapping['gap'])}"
    )
    return paragraph("; ".join([worth, *left_out]), width)


# --- the candidates ------------------------------------------------------------------------------------------------


def top_rows(plan: Plan) -> list[Row]:
    """The best candidates of a plan, the chosen one first: its choices and figures side by side."""
    if mixed.is_mixed(plan.config):
        return list(mixed.rows_of(plan))
    return [
        {
            "chosen": row["chosen"],
            **{key: value for key, value in row["config"].items() if key != "layers_per_chunk"},
            "iteration_s": row["iteration_s"],
            **_judged(plan, row),
            "safe_bytes": row["safe_bytes"],
        }
        for row in plan.alternatives
        if "chosen" in row
    ] or _only_row(plan)


def _only_row(plan: Plan) -> list[Row]:
    """A plan of one pinned configuration has no runners-up."""
    if not plan.config:
        return []
    return [
        {
            "chosen": plan.solution["status"] != "infeasible",
            **{key: value for key, value in plan.config.items() if key != "layers_per_chunk"},
            **{name: plan.predicted[name].value for name in ("iteration_s", _metric(plan)) if name in plan.predicted},
            "safe_bytes": plan.memory["worst"]["safe_bytes"],
        }
    ]


def _judged(plan: Plan, row: Mapping[str, Any]) -> Row:
    """What the plans are compared by beside their step: joules or money where these are minimised, else their rate."""
    if row.get("objective") is not None:
        return {_metric(plan): row["objective"]}
    return {_RATE: _token_rate(row) * _filled(plan)}


def _metric(plan: Plan) -> str:
    return COSTS.get(str(plan.spec.get("objective")), (_RATE, ""))[0]


def _filled(plan: Plan) -> float:
    """Trained tokens over tokens of sequences: below 1 where whole documents leave padding."""
    return 1.0 if plan.lengths is None else float(plan.lengths["documents"]["filled"])


def _token_rate(row: Mapping[str, Any]) -> float:
    config = row["config"]
    tokens = config["global_batch_size"] * config["sequence_length"]
    return float(tokens / row["iteration_s"] / config["world_size"])


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return model_on_cluster(spec)


def short_answer(document: Mapping[str, Any]) -> str:
    """Degrees and step time, for lists of plans."""
    if not document["config"]:
        return ""
    return f"{config_text(document['config'])}, {format_duration(document['predicted']['iteration_s']['value'])} a step"


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`."""
    return mixed.COLUMNS if mixed.is_mixed(plan.config) else TOP_COLUMNS


def top_section(plan: Plan, width: int) -> str:
    """The table of the best candidates, the chosen one ticked."""
    rows = top_rows(plan)
    title = f"The best {len(rows)} plans" if len(rows) > 1 else "The plan"
    return rendered_rows(rows, TOP_COLUMNS, Format.TABLE, title=title, width=width) + _splits_text(plan, width)


def _splits_text(plan: Plan, width: int) -> str:
    """The layers of each pipeline chunk, where they are all that tells two candidates of the table apart."""
    configs = [row["config"] for row in plan.alternatives if "chosen" in row]
    choices = [{key: value for key, value in config.items() if key != "layers_per_chunk"} for config in configs]
    twins = [place for place, choice in enumerate(choices) if choices.count(choice) > 1]
    if not twins:
        return ""
    splits = "; ".join(f"row {place + 1}: {layers_text(configs[place]['layers_per_chunk'])}" for place in twins)
    return paragraph(f"Layers of each pipeline chunk, {splits}.", width)


# --- what it will take ---------------------------------------------------------------------------------------------


def predicted_section(plan: Plan, width: int) -> str:
    """Every predicted metric with its interval."""
    order = {name: place for place, name in enumerate(METRIC_TITLES)}
    names = sorted(plan.predicted, key=lambda name: (order.get(name, len(order)), name))
    rows: list[Row] = []
    for name in names:
        interval = plan.predicted[name]
        ends = {"low": interval.low, "high": interval.high}
        rows.append(
            {
                "metric": metric_title(name),
                "expected": metric_text(name, interval.value),
                "between": interval_text(name, ends),
            }
        )
    columns = (
        Column(key="metric", title="Predicted", wrap=False),
        Column(key="expected", title="expected", right=True, wrap=False),
        Column(key="between", title="between"),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width) + calibration_text(plan, width)


def calibration_text(plan: Plan, width: int) -> str:
    """The measured runs from which the intervals come."""
    basis = calibration(plan)
    if not basis:
        return ""
    bound = memory_basis(plan)
    held = paragraph(f"Safe memory: {bound}.", width) if bound else ""
    unvalidated = plan.provenance.get("not_validated", ())
    doubts = "".join(paragraph(f"Not validated: {what}.", width) for what in unvalidated)
    return paragraph(f"Intervals: {basis}{_wider(plan)}.", width) + held + doubts


def _wider(plan: Plan) -> str:
    """How far the step's interval reaches where what is not validated widens it visibly."""
    step = plan.predicted["iteration_s"]
    spread = step.high / step.value - 1.0
    if spread < plan.provenance["calibration"]["time_error_p90"] + _VISIBLY_WIDER:
        return ""
    return f"; here {width_text(spread)}, for what is not validated"


def memory_section(plan: Plan, width: int) -> str:
    """Memory of a rank of every distinct stage, by component."""
    memory = plan.memory
    stages: Sequence[Row] = memory["stages"]
    limit = memory["limit_bytes"]
    worst = memory["worst"][_RANK_COLUMN]
    components = list(
        dict.fromkeys(
            key
            for stage in stages
            for key, value in stage.items()
            if key.endswith("_bytes") and key not in NOT_COMPONENTS and value
        )
    )

    def stage_text(stage: Row) -> str:
        alike = f" (×{stage['num_stages']})" if stage["num_stages"] > 1 else ""
        mark = " ◀" if stage[_RANK_COLUMN] == worst else ""
        return f"{stage[_RANK_COLUMN]}{alike}{mark}"

    columns = (
        Column(key=_RANK_COLUMN, title="stage", derive=stage_text, wrap=False),
        Column(key="num_layers", title="layers", right=True),
        *(Column(key=key, title=_component_title(key), right=True, text=gib, wrap=False) for key in components),
        Column(key="typical_bytes", title="typical", right=True, text=gib, wrap=False),
        Column(key="safe_bytes", title="safe", right=True, text=gib, wrap=False),
    )
    title = f"Memory of one rank in GiB; the limit for 'safe' is {gib(limit)} (◀ the worst stage)"
    text = rendered_rows(stages, columns, Format.TABLE, title=title, width=width)
    if any(stage["num_stages"] > 1 for stage in stages):
        text += paragraph("×: stages with equal layers; the first is shown, which holds the most micro-batches.", width)
    return text


def _component_title(key: str) -> str:
    name = key.removesuffix("_bytes")
    return _COMPONENT_TITLES.get(name, name.replace("_", " "))


def time_section(plan: Plan, width: int) -> str:
    """Where the step's time goes; parts below a tenth of a percent are summed."""
    least = 0.001
    shown = [row for row in plan.breakdown if row["share"] >= least]
    small = [row for row in plan.breakdown if row["share"] < least]
    rows: list[Row] = [*shown]
    if small:
        seconds, share = (sum(row[key] for row in small) for key in ("seconds", "share"))
        rows.append({"name": counted(len(small), "smaller part"), "seconds": seconds, "share": share, "evidence": ""})
    largest = max((row["share"] for row in rows), default=1.0)
    columns = (
        Column(key="name", title="Where the step's time goes"),
        Column(key="seconds", title="time", right=True, text=format_duration, wrap=False),
        Column(key="share", title="share", right=True, text=percent, wrap=False),
        Column(key="share", title="", derive=lambda row: bar(row["share"] / largest) or " ", wrap=False),
        Column(key="evidence", title="rests on", derive=_evidence, wrap=False),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def _evidence(row: Row) -> str:
    """The level of evidence, shortened; the JSON has the full text."""
    return str(row["evidence"]).split(" to ")[0]


# --- what lost -----------------------------------------------------------------------------------------------------


def alternative_rows(plan: Plan) -> list[Row]:
    """The well-known other choices of a plan."""
    return [row for row in plan.alternatives if "reason" in row]


def alternatives_section(plan: Plan, width: int) -> str:
    """Why each well-known alternative lost."""
    rows = alternative_rows(plan)
    if not rows:
        return ""
    columns = (
        Column(key="name", title="Why not …?"),
        Column(key="iteration_s", title="step", right=True, text=format_duration, wrap=False),
        Column(key="slower_by", title="", right=True, text=signed_percent, wrap=False),
        Column(key="dearer_by", title=cost_title(plan), right=True, text=signed_percent, optional=True, wrap=False),
        Column(key="reason", title="because", derive=reason_text),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


def cost_title(plan: Plan) -> str:
    """What is minimised, where it is neither time nor devices; empty otherwise."""
    return COSTS.get(str(plan.spec.get("objective")), (_RATE, ""))[1]


def reason_text(row: Row) -> str:
    """The reason without the change of the step time, which has its own column."""
    reason, change = str(row["reason"]), row.get("slower_by")
    if change is None:
        return reason
    return reason.removeprefix(f"{change:+.1%} step time").removeprefix(":").strip()


# --- why this plan ---------------------------------------------------------------------------------------------------


def explanation_report(plan: Plan, explanation: Explanation, *, width: int = TABLE_WIDTH) -> str:
    """The plan's choices, proof, runner-up, binding limits, rejected alternatives, and the evidence of its numbers."""
    sections = [paragraph(question_text(plan.spec, plan.config), width)]
    if not plan.config:
        return "\n".join([*sections, no_plan_section(plan.solution, width), rejected_section(plan, width)])
    lines = {
        "Chosen": config_text(plan.config),
        "Proof": explanation.proof,
        "Runner-up": explanation.runner_up,
        "Time": explanation.time,
        "Limits": "; ".join(explanation.limits),
        "Constants": explanation.calibration,
        "Assumed": "; ".join(explanation.assumed),
        "Evidence": ", ".join(f"{percent(share)} {level}" for level, share in explanation.evidence.items()),
    }
    label_width = max(map(len, lines)) + 2
    sections.append(
        "".join(
            paragraph(f"{label + ':':<{label_width}}{text}", width, indent=" " * label_width)
            for label, text in lines.items()
            if text
        )
    )
    sections += [alternatives_section(plan, width), rejected_section(plan, width)]
    cited = "".join(
        paragraph(f"  {what}: {source}", width, indent="    ") for what, source in explanation.sources.items()
    )
    sections.append(f"Sources\n{cited}" if cited else "")
    return "\n".join(section for section in sections if section)
