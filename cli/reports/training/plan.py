"""A training plan as a person reads it, within 80 columns: the choice, the runners-up, memory, time, and what lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import TABLE_WIDTH
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import (
    effort_text,
    machines_text,
    model_on_cluster,
    other_degree,
    paragraph,
    rejected_section,
)
from meshplan.cli.reports.quantities import percent
from meshplan.cli.reports.training import mixed
from meshplan.cli.reports.training.candidates import (
    alternative_rows,
    alternatives_section,
    top_columns,
    top_rows,
    top_section,
)
from meshplan.cli.reports.training.figures import memory_section, predicted_section, time_section
from meshplan.cli.reports.whole_run.batches import batch_section
from meshplan.cli.reports.whole_run.far_apart import far_apart_section
from meshplan.cli.reports.whole_run.forecast import run_section
from meshplan.cli.reports.whole_run.lengths import lengths_section
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.solution import OPTIMAL_RELATIVE_GAP
from meshplan.planner.core.text import counted
from meshplan.planner.training.admission import shortage_text
from meshplan.planner.training.explanation import Explanation, admitted, fit, may_choose
from meshplan.planner.training.problem.choices import PINNABLE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.table import framework_rules

# What a kind's report module has, of which the tables are in a file of their own.
__all__ = [
    "alternative_rows",
    "describe",
    "explanation_report",
    "fit_text",
    "headline",
    "mapping_section",
    "next_commands",
    "question_text",
    "report",
    "short_answer",
    "status_text",
    "top_columns",
    "top_rows",
]

_PROVEN_OVER_A_SPACE = ("optimal", "feasible")


def unsearched_section(plan: Plan, width: int) -> str:
    """What a proof does not speak of: choices that stayed as the question or the framework has them."""
    if plan.solution.get("status") not in _PROVEN_OVER_A_SPACE:
        return ""
    pinned, asked = plan.spec.get("fixed", {}), plan.spec.get("constraints", {}).get("search_over", ())
    has_experts = plan.config.get("expert_parallel", 1) > 1
    rules = framework_rules(plan.spec.get("constraints", {}).get("target", ANY_FRAMEWORK.name)) or ANY_FRAMEWORK
    free = [
        one
        for one in PINNABLE
        if (one.per == "question" or one.is_on_request)
        and one.name not in pinned
        and (has_experts or not one.about_experts)
        and rules.takes_other(one, plan.config.get(one.name, one.default))
    ]
    kept = [one.name for one in free if not one.is_on_request]
    more = [one.name for one in free if one.is_on_request and one.name not in asked]
    text = f"Not searched, though pins (fixed) of them may do better: {', '.join(kept)}." if kept else ""
    if more:
        text += f" Searched on request (constraints.search_over): {', '.join(more)}."
    return paragraph(text.strip(), width) if text else ""


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
            unsearched_section(plan, width),
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
    degree = other_degree(int(plan.config["tensor_parallel"]), len(plan.rank_table or ()))
    if degree is None or may_choose(plan, {"tensor_parallel": degree}):
        instead = "" if degree is None else f" --instead tensor_parallel={degree}"
    else:
        instead = "" if plan.config["activation_recompute"] == "full" else " --instead activation_recompute=full"
    commands = [f"meshplan explain {plan.plan_id}{where}{instead}"]
    if not emitted:
        commands.append(f"meshplan emit {plan.plan_id}{where} --out plans")
    return [*commands, f"meshplan plans record {plan.plan_id}{where} measured.json"]


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
        f"{spec.get('model')} on {machines_text(spec)}: sequences of "
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
    if mapping["random_mean_s"] == mapping["identity_s"] == mapping["objective_s"]:
        worth = "ranks in the order of the nodes: links between them are alike"
    return paragraph("; ".join([worth, *left_out]), width)


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return model_on_cluster(spec)


def short_answer(document: Mapping[str, Any]) -> str:
    """Degrees and step time, for lists of plans."""
    if not document["config"]:
        return ""
    return f"{config_text(document['config'])}, {format_duration(document['predicted']['iteration_s']['value'])} a step"


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
