"""The first lines of a serving plan's report: what was asked, what is proven, and how it was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.models.encoder_decoder import WINDOW_S
from meshplan.catalogs.units import format_duration
from meshplan.cli.reports.parts import effort_text, machines_text
from meshplan.cli.reports.quantities import latency_name, percent, rate_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.solution import OPTIMAL_RELATIVE_GAP
from meshplan.planner.core.text import counted

# The smallest share that a percentage with one digit shows.
LEAST_PERCENT = 0.001


def question_text(spec: Mapping[str, Any]) -> str:
    """What was asked, in one line."""
    workload = spec.get("workload", {})
    requests = f"the requests of {workload['trace']}" if workload.get("trace") else _lengths_text(workload)
    if images := workload.get("images"):
        size = f"{images['width']} × {images['height']}"
        requests += f", {counted(images.get('per_request', 1), 'image')} of {size}"
    if (audio := workload.get("audio")) is not None:
        requests += f", {audio.get('seconds', WINDOW_S):g} s of sound"
    if (sampling := workload.get("sampling")) is not None:
        penalties = " and penalties" if sampling.get("penalties") else ""
        requests += f", drawn with top-p {sampling.get('top_p', 1.0):g}{penalties}"
    among = f" ({workload['num_prefixes']:,} prefixes)" if workload.get("num_prefixes") else ""
    if share := workload.get("prefix_hit_rate"):
        requests += f", {percent(share)} of a prompt in a prefix{among}"
    if tokens := workload.get("prefix_tokens"):
        requests += f", the first {tokens:,} of a prompt in a prefix{among}"
    if sessions := workload.get("sessions"):
        requests += f", conversations of {sessions['turns']} turns {format_duration(float(sessions['gap_s']))} apart"
    if stages := workload.get("stages"):
        rates = [float(stage["request_rate_per_s"]) for stage in stages]
        requests += f", {counted(len(stages), 'stage')} of {min(rates):g} to {rate_text(max(rates))}"
    if workload.get("request_rate_per_s"):
        requests += f", {rate_text(workload['request_rate_per_s'])}"
    elif workload.get("concurrency"):
        requests += f", {workload['concurrency']} in flight"
    limits = ", ".join(f"{latency_name(key)} ≤ {format_duration(limit)}" for key, limit in spec.get("slo", {}).items())
    asked = f"{spec.get('model')} on {machines_text(spec)}: {requests}"
    return f"{asked}; {limits}" if limits else asked


def _lengths_text(workload: Mapping[str, Any]) -> str:
    """What one request is."""
    # start-up: reports of training import this module too
    from meshplan.planner.serving.problem.requests import prompt_length

    prompts = workload.get("input_lengths")
    tokens = f"{prompt_length(workload)} tokens" if prompts is None else f"{_differing_text(prompts)} tokens"
    task = workload.get("task", "generate")
    if task == "generate":
        answers = workload.get("output_lengths")
        output = workload.get("output_length") if answers is None else _differing_text(answers)
        return f"{tokens} in, {output} out"
    return f"texts of {tokens} to embed" if task == "embed" else f"query and document of {tokens} to score"


def _differing_text(lengths: Mapping[str, Any]) -> str:
    """Lengths that differ: the mean, and between which they lie."""
    # start-up: reports of training import this module too
    from meshplan.planner.serving.problem.workload.spec import LengthsSpec

    drawn = LengthsSpec.model_validate(dict(lengths)).distribution
    return f"{drawn.mean:,.0f} ({drawn.shortest:,} … {drawn.longest:,})"


def status_text(plan: Plan) -> str:
    """Status, proof and effort."""
    solution = plan.solution
    if "kept" in solution:
        verdict = "every SLO is met"
        if not solution["kept"]:
            which = solution.get("binding_constraint")  # plans of older releases do not say
            verdict = f"an SLO is violated, {which}" if which else "an SLO is violated"
            if which and which.startswith("request_rate_per_s"):
                return f"one configuration, simulated: {which}{_first_requests_text(plan)}"
        return f"one configuration, simulated: {verdict}{_overload_text(plan)}"
    count, simulated = solution.get("num_candidates", 0), solution.get("num_simulated", 0)
    seen = f"{counted(count, 'deployment')} in closed form, {simulated:,} simulated"
    if solution["status"] == "infeasible":
        if not solution.get("is_complete", True):
            return f"no plan found: {seen}, none of these {_asked_text(plan)}; not all deployments were simulated"
        return f"infeasible: {seen}, none {_asked_text(plan)}"
    if solution["status"] == "optimal":
        known = f"optimal under the model and its sampling: {_margin(solution['gap'] or 0.0)}; {seen}"
    else:
        known = f"feasible: at most {percent(solution['gap'] or 0.0)} from the best bound left; {seen}"
        if _is_sampled(plan):
            known += "; nothing is left to search, but rates in between were neither shown to hold nor to fail"
    if (plan.answer or {}).get("speculation"):
        known += "; each without drafts and with every method and depth of the profile"
    if (plan.answer or {}).get("kv_stores"):
        known += "; searched without a tier of prefixes and with each store"
    if len(plan.spec["cluster"].get("nodes") or ()) > 1:
        known += "; of one kind of worker for each node type, prefill and decode on one node type each"
    return f"{known}; {effort_text(solution)}"


def _margin(gap: float) -> str:
    """What the gap of an optimal plan means; one that would be printed as 0.0 % is given as the least that is not."""
    if gap <= OPTIMAL_RELATIVE_GAP:
        return "no deployment is better"
    return f"no deployment is more than {percent(max(gap, LEAST_PERCENT))} better"


def _overload_text(plan: Plan) -> str:
    """What becomes of requests that come faster than a deployment finishes them."""
    sent, finished = plan.spec["workload"].get("request_rate_per_s"), plan.predicted["requests_per_s"].value
    if not sent or finished >= sent:
        return ""
    grows = f"; it finishes {finished:.3g} of {sent:g} requests/s, so its queue grows without end"
    return grows + _first_requests_text(plan)


def _first_requests_text(plan: Plan) -> str:
    """Whose latencies a plan shows whose queue grows; empty where it does not say."""
    count = (plan.answer or {}).get("sampling", {}).get("num_requests", 0)
    return f"; latencies are those of the first {counted(count, 'request')}" if count else ""


def _asked_text(plan: Plan) -> str:
    """What no deployment does: meet the SLOs, or keep pace with the rate where there are none."""
    has_rate = plan.spec["workload"].get("request_rate_per_s") is not None
    return "keeps pace with the rate" if has_rate and not plan.spec.get("slo") else "meets every SLO"


def _is_sampled(plan: Plan) -> bool:
    """Whether the gap is the sampling's alone: the search ended, and no tier was sized by a formula."""
    solution = plan.solution
    is_done = solution.get("is_complete", True) and not solution.get("stopped")
    return is_done and not (plan.answer or {}).get("kv_stores")
