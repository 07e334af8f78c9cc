"""Why this plan? Read from a finished plan: the proof, the binding limits, the evidence behind the numbers.

Everything is read from the plan; nothing is estimated again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.constants.training import Basis
from meshplan.catalogs.units import format_bytes
from meshplan.planner.core.plan import Plan, shape_from_document
from meshplan.planner.core.text import counted
from meshplan.planner.training.problem.frameworks.table import framework_rules
from meshplan.planner.training.problem.spec import target_of

# A limit binds where the plan uses this share of it or more.
BINDING_SHARE = 0.9
_NAMED_PARTS = 3
LARGE_SPREAD = 0.5  # half-widths from here on read as factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan is as it is.

    Args:
        proof: how it is known that nothing is better.
        runner_up: how far the next best candidate is behind; empty where there is none.
        time: the largest parts of the step.
        limits: one sentence per limit, the binding ones first.
        calibration: what the estimator's constants rest on.
        assumed: assumptions where the spec is silent, and what no measured run has confirmed.
        evidence: level of evidence → share of the step's time that rests on it.
        sources: what → citation.
    """

    proof: str
    runner_up: str
    time: str
    limits: tuple[str, ...]
    calibration: str
    assumed: tuple[str, ...]
    evidence: Mapping[str, float]
    sources: Mapping[str, str]

    def to_document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "proof": self.proof,
            "runner_up": self.runner_up,
            "time": self.time,
            "limits": list(self.limits),
            "calibration": self.calibration,
            "assumed": list(self.assumed),
            "share_of_time_by_evidence": dict(self.evidence),
            "sources": dict(self.sources),
        }


def explain(plan: Plan) -> Explanation:
    """Read the reasons out of a training plan."""
    return Explanation(
        proof=proof(plan),
        runner_up=_runner_up(plan),
        time=_time(plan),
        limits=tuple(_limits(plan)),
        calibration=calibration(plan),
        assumed=tuple(assumptions(plan)),
        evidence=plan.provenance.get("share_of_time_by_evidence", {}),
        sources=plan.provenance.get("sources", {}),
    )


def proof(plan: Plan) -> str:
    """How good the answer is known to be."""
    solution = plan.solution
    status, gap, count = solution["status"], solution.get("gap"), solution.get("num_candidates")
    among = f" among {count:,} candidates" if count else ""
    if "oom" in solution:
        return f"one pinned configuration: {_excess(plan) if solution['oom'] else fit(plan)}"
    if status == "infeasible":
        return f"infeasible: no candidate stays within the limits{among}"
    if status == "optimal":
        return f"optimal under the model: gap {gap or 0.0:.2%}{among}{admitted(plan)}"
    if gap is None:
        return f"{status}: the choices were pinned, not searched"
    return f"feasible: at most {gap:.2%} from the best possible{among}; the search was cut short"


def admitted(plan: Plan) -> str:
    """Among what a search with pins found its answer where nothing with them is safe; empty where something is.

    Without the pins it takes only what the safe bound admits: such a plan may be faster than that "optimum".
    """
    if "admitted_by" not in plan.solution:
        return ""
    return " that fit by the typical figure of the memory (none with these pins is within its safe bound)"


def fit(plan: Plan) -> str:
    """How a plan stays within the devices' memory; a warning where it does by the typical figure alone."""
    worst, limit = plan.memory["worst"], plan.memory["limit_bytes"]
    if worst["safe_bytes"] <= limit:
        return f"it fits, {format_bytes(limit - worst['safe_bytes'])} of {format_bytes(limit)} to spare"
    alike = [one for one in plan.memory["stages"] if one.get("device_limit", limit) == limit]
    typical = max(stage["typical_bytes"] for stage in alike)
    is_wide = worst.get("gradients_bytes", 0.0) > worst.get("weights_bytes", 0.0)
    smaller = ", or keep gradients in 16 bits (fixed.gradient_precision: bf16)" if is_wide else ""
    return (
        f"it fits by the typical figure alone, {format_bytes(typical)} of {format_bytes(limit)}: the safe bound is "
        f"{format_bytes(worst['safe_bytes'] - limit)} over. Measured runs have needed as much; to be safe, recompute "
        f"more, shard more or take a smaller micro-batch{smaller}"
    )


def memory_basis(plan: Plan) -> str:
    """What the safe bound of the memory rests on; empty where that is not known."""
    return str(plan.provenance.get("calibration", {}).get("memory_basis", ""))


def calibration(plan: Plan) -> str:
    """What the constants and the intervals rest on, as a sentence without its full stop."""
    found = plan.provenance.get("calibration")
    if not found:
        return ""
    target = target_of(plan.spec)
    runs, fitted = found["num_runs"], f"{found['framework']}, {found['architecture']}"
    published = counted(runs, "published run")
    width = width_text(found["time_error_p90"])
    rests_on = f", expected from {found['time_error_basis']}" if found.get("time_error_basis") else ""
    held = f"{width} holds 90 % of the runs of a cluster that is not in the fit{rests_on}"
    unmeasured = f"no run of {target} on this generation of devices"
    match found.get("basis"):
        case Basis.CLUSTER:
            before = found.get("start_error_p90")
            gained = "" if before is None else f" of {width_text(before)} without them"
            return f"constants adapted to {counted(runs, 'own run')} ({fitted}); {width} is left{gained}"
        case Basis.FRAMEWORK:
            return f"constants fitted to {published} ({fitted}); {held}"
        case Basis.RELATED:
            return f"{unmeasured}: constants of {fitted} ({published}); {held}"
        case Basis.UNSEEN:
            seen = "no run of any framework on this generation of devices"
            return (
                f"{seen}: constants of all frameworks ({published}); {width} holds 90 % of the runs of such a "
                f"generation{rests_on}"
            )
        case Basis.KERNELS:
            return (
                f"no run of the fit has kernels of this kind (width of the products, attention): constants of {fitted} "
                f"({published}); {width} holds 90 % of the runs of such a kind{rests_on}"
            )
        case Basis.ANY:
            return f"{unmeasured}: constants of all frameworks ({published}); {held}"
    return f"constants of the literature, not calibrated on runs; {width} is assumed"


def may_choose(plan: Plan, choices: Mapping[str, Any]) -> bool:
    """Whether the plan's framework takes a choice for its model and weights, as far as that choice alone tells.

    Args:
        plan: the plan.
        choices: name of the configuration's field → value.
    """
    rules = framework_rules(target_of(plan.spec))
    weights = {"quantised_weights": plan.config.get("quantised_weights", False)}
    return rules is None or not rules.refuses({**weights, **choices}, shape_from_document(plan.provenance["model"]))


def width_text(spread: float) -> str:
    """A half-width as people read it: a percentage, or a factor where it is large.

    >>> width_text(0.12), width_text(1.04)
    ('±12 %', 'a factor of 2.0 either way')
    """
    return f"±{100.0 * spread:.0f} %" if spread < LARGE_SPREAD else f"a factor of {1.0 + spread:.1f} either way"


def assumptions(plan: Plan) -> Iterator[str]:
    """How operators run, how tokens were taken to reach the experts, and what the plan says it has not validated."""
    rules = framework_rules(target_of(plan.spec))
    yield from () if rules is None else rules.kernel_notes
    experts = (plan.provenance.get("model") or {}).get("moe")
    workload = plan.spec.get("workload", {})
    if experts:
        capacity, imbalance = plan.config.get("expert_capacity_factor"), workload.get("expert_imbalance")
        if capacity:
            source = "the spec says so" if workload.get("expert_capacity_factor") else "assumed: the spec gives none"
            yield f"tokens are dropped: every expert gets {capacity:g} times the mean, padded ({source})"
        elif imbalance:
            yield f"the busiest expert-parallel rank gets up to {imbalance:g} times the mean (the spec says so)"
        else:
            yield "balanced experts (assumed: the spec gives no expert_imbalance), no token dropped"
    for entry in plan.provenance.get("not_validated", ()):
        yield f"not validated: {entry}"


def _excess(plan: Plan) -> str:
    memory = plan.memory
    return (
        f"it needs up to {format_bytes(memory['worst']['safe_bytes'])} a device, "
        f"{format_bytes(memory['worst']['safe_bytes'] - memory['limit_bytes'])} more than there is"
    )


def _runner_up(plan: Plan) -> str:
    ranked = [row for row in plan.alternatives if "chosen" in row]
    if len(ranked) <= 1:
        return ""
    first, second = ranked[0], ranked[1]
    changed = [
        f"{key}={value}"
        for key, value in {**dict.fromkeys(first["config"], 0), **second["config"]}.items()
        if value != first["config"].get(key, 0) and key not in ("layers_per_chunk", "num_microbatches")
    ]
    behind = second["iteration_s"] / first["iteration_s"] - 1.0
    return f"the next best has {', '.join(changed)} and takes {behind:.2%} longer a step"


def _time(plan: Plan) -> str:
    return ", ".join(f"{row['name']} {row['share']:.1%}" for row in plan.breakdown[:_NAMED_PARTS])


def _limits(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if memory:
        safe, limit = memory["worst"]["safe_bytes"], memory["limit_bytes"]
        word = "binds" if safe >= BINDING_SHARE * limit else "has room"
        yield f"device memory {word}: {format_bytes(safe)} of {format_bytes(limit)} ({safe / limit:.0%})"
    for row in plan.rejected:
        name = str(row["reason"])
        if name.startswith("over the limit") and row["count"]:
            yield f"{row['count']:,} candidates were {name}"
    constraints = plan.spec.get("constraints", {})
    for key in ("max_devices", "max_usd_per_hour", "max_usd_per_run", "max_step_time", "max_run_time"):
        if constraints.get(key) is not None:
            yield f"{key}: {constraints[key]} asked, {_used(plan, key)} used"


def _used(plan: Plan, constraint: str) -> str:
    metric = {
        "max_usd_per_hour": "usd_per_hour",
        "max_usd_per_run": "usd_per_run",
        "max_step_time": "iteration_s",
        "max_run_time": "run_time_s",
    }.get(constraint)
    if metric is None:
        return str(plan.config.get("world_size"))
    return f"{plan.predicted[metric].value:,.2f}{' s' if metric.endswith('_s') else ''}"
