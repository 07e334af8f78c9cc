"""Why not something else? The well-known other choices, each at its best, and what they would cost.

Each alternative is the same question with one choice pinned: the search finds the best plan that has it, so the
comparison is with that choice at its best, not with the chosen plan bent. The table of well-known choices compares the
usual splits of the layers, and begins with the best that the search of the answer has priced. Where links differ it
searches under the chosen plan's mapping and under rates that no mapping beats, and maps those of the best few of both
whose mapping could be seen in the comparison. A choice that a user asks about is the question with it pinned, answered
as any (:func:`meshplan.planner.training.service.instead`).

One choice is the other way round: DeepEP carries tokens to experts faster than the all-to-all, but has to be installed.
It is no plan until somebody says that it is there; what it would gain is told of the chosen plan as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.network_model import BestLinks
from meshplan.planner.core.budget import Budget
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.problem.switches import ALL_TO_ALL, DEEPEP
from meshplan.planner.training.search.degrees import DegreeSearch, search_degrees
from meshplan.planner.training.search.joint import place_config
from meshplan.planner.training.search.mapping.placement import placed_problem, under_links
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import LIMITS, SearchReport
from meshplan.planner.training.search.seen import Seen
from meshplan.planner.training.search.space import Space

Choices = Mapping[str, int | str | bool]
# Parts of the step below this share of the chosen step are not worth naming as a reason.
NAMED_SHARE = 0.005
# Candidates of an alternative that get a rank mapping of their own, where links differ.
MAPPED_ALTERNATIVES = 4
# What DeepEP runs on: Hopper or newer, NVLink inside a node, RDMA between nodes (deepseek-ai/DeepEP, README.md,
# "Requirements").
DEEPEP_ARCHITECTURES, DEEPEP_LINK = frozenset({"hopper", "blackwell"}), "nvlink"
# Changes of the step are shown to a tenth of a per cent: no mapping is looked for that gains less than half of it.
SHOWN = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One other choice.

    Args:
        name: what it is called in the field.
        choices: what was pinned.
        priced: the best plan that has it; None where none fits.
        reason: why it lost, one sentence with numbers.
    """

    name: str
    choices: Choices
    priced: Priced | None
    reason: str


def well_known(problem: TrainingProblem) -> dict[str, Choices]:
    """The choices that people ask about, under their names; those that make no sense here are left out."""
    domain = problem.machine.domain_size
    choices: dict[str, Choices] = {
        "FSDP only (ZeRO-3)": {"zero_stage": 3, "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
        "no tensor parallelism": {"tensor_parallel": 1},
        "tensor parallelism over a whole node": {"tensor_parallel": domain},
        "no pipeline": {"pipeline_parallel": 1},
        "no context parallelism": {"context_parallel": 1},
        "full activation recompute": {"activation_recompute": "full"},
        "no ZeRO": {"zero_stage": 0},
    }
    if problem.shape.moe is not None:
        choices["no expert parallelism"] = {"expert_parallel": 1}
        choices["experts over a whole node"] = {"expert_parallel": domain}
    return choices


def alternatives(
    problem: TrainingProblem, chosen: Priced, *, search: DegreeSearch | None = None, budget: Budget | None = None
) -> list[Alternative]:
    """Every well-known choice that the chosen plan did not make and the user did not pin.

    Args:
        problem: the question, under the mapping of its answer where links differ.
        chosen: its answer.
        search: the search of the answer; None to make its space again.
        budget: what is left of it after the answer. Once it is spent no other choice is looked at, after Ctrl-C none
            either: the answer is there already.
    """
    found = []
    budget, search = budget or Budget(), search or DegreeSearch(problem)
    for name, choices in well_known(problem).items():
        if budget.stopped:
            break
        has_it = all(getattr(chosen.config, key) == value for key, value in choices.items())
        decided = {*problem.fixed, *(["pipeline_parallel"] if "layers_per_chunk" in problem.fixed else [])}
        pinned = any(key in decided for key in choices)
        if has_it or pinned:
            continue
        with budget.keeping(), suppress(SolverError):
            other = instead(problem, chosen, choices, name=name, search=search, budget=budget)
            if not budget.stopped:
                found.append(other)
    return found if budget.stopped else [*found, *with_deepep(problem, chosen)]


def with_deepep(problem: TrainingProblem, chosen: Priced) -> list[Alternative]:
    """The chosen plan with DeepEP, where it is a mixture of experts that sends its tokens round otherwise.

    Args:
        problem: the question, under the mapping of its answer where links differ.
        chosen: its answer.
    """
    machine = problem.machine
    if chosen.config.expert_dispatcher != ALL_TO_ALL or "expert_dispatcher" in problem.fixed:
        return []
    if machine.device.architecture not in DEEPEP_ARCHITECTURES or machine.scale_up_technology != DEEPEP_LINK:
        return []
    config = replace(chosen.config, expert_dispatcher=DEEPEP)
    if problem.shape.moe is None or problem.rules.broken(problem.shape, config):
        return []
    choices: Choices = {"expert_dispatcher": DEEPEP}
    other = price(problem.with_fixed({**problem.fixed, **choices}), config)
    if other.safe_bytes > problem.limits.memory_bytes:
        return []
    reason = f"{why_slower(chosen, other)}; the same plan where DeepEP is installed, with RDMA between nodes"
    return [Alternative(name="DeepEP for the all-to-all of experts", choices=choices, priced=other, reason=reason)]


def instead(
    problem: TrainingProblem,
    chosen: Priced | None,
    choices: Choices,
    *,
    search: DegreeSearch,
    name: str = "",
    budget: Budget | None = None,
) -> Alternative:
    """The best plan with ``choices`` pinned and the usual splits of the layers, compared with the chosen one.

    Args:
        problem: the question.
        chosen: its answer; None where there is none to compare with.
        choices: choice → value.
        name: what the choice is called; its values where empty.
        search: the search of the answer, part of whose space is looked through.
        budget: what the search may spend.
    """
    label = name or ", ".join(f"{key}={value}" for key, value in choices.items())
    pinned = problem.with_fixed({**problem.fixed, **choices})
    own = search.space.pinned(pinned, choices)
    pinned, config, report = _best_of(own, pinned, search.incumbents.seen.part(own.splits, choices), budget)
    if config is None:
        return Alternative(name=label, choices=choices, priced=None, reason=why_nothing_fits(pinned, report))
    other = price(pinned, config)
    reason = "" if chosen is None else why_slower(chosen, other)
    return Alternative(name=label, choices=choices, priced=other, reason=reason)


def _best_of(
    space: Space, pinned: TrainingProblem, seen: Seen, budget: Budget | None
) -> tuple[TrainingProblem, TrainingConfig | None, SearchReport]:
    """The best configuration of a part of the space, with the usual splits of the layers.

    Args:
        space: the part.
        pinned: the question with the choices of the part.
        seen: what the search of the answer has seen of it, under its links.
        budget: what the search may spend.

    Returns:
        The question under the mapping of that configuration, the configuration, and what the search saw.
    """
    network = pinned.machine.network
    if pinned.machine.network_model is None or network is None:
        _, search = search_degrees(pinned, keep=1, space=space, usual_splits=True, seen=seen, budget=budget)
        return pinned, search.best[0].config if search.best else None, search.report
    objective, found = Objective(pinned), _Mapped(pinned, network)
    for links in (pinned, under_links(pinned, BestLinks(network=network, domain_size=pinned.machine.domain_size))):
        own = space.under(links)
        _, search = search_degrees(links, keep=MAPPED_ALTERNATIVES, space=own, usual_splits=True, budget=budget)
        for config in dict.fromkeys(scored.config for scored in search.best):
            found.add(config, objective)
    return found.problem, found.config, search.report


class _Mapped:
    """The best configuration so far, under the mapping of the answer or one of its own.

    Args:
        problem: the question under the mapping of its answer.
        network: its links.
    """

    def __init__(self, problem: TrainingProblem, network: Network) -> None:
        # start-up: in most questions links are equal
        from meshplan.planner.training.search.bounds.crossing_bounds import LeastSteps

        self.asked, self.problem = problem, problem
        self.config: TrainingConfig | None = None
        self._least, self._steps = math.inf, LeastSteps(problem, network)

    def add(self, config: TrainingConfig, objective: Objective) -> None:
        """Price a configuration, and map it where a mapping of its own could be seen in the comparison."""
        self._take(self.asked, config, objective.of_config(config, price(self.asked, config).step_s))
        if objective.of_config(config, self._steps.of(config)) >= self._least * (1.0 - SHOWN):
            return
        placement = place_config(self.asked, config)
        if placement is not None:
            own = placed_problem(self.asked, placement.order)
            self._take(own, config, objective.of_config(config, price(own, config).step_s))

    def _take(self, problem: TrainingProblem, config: TrainingConfig, value: float) -> None:
        if value < self._least:
            self.problem, self.config, self._least = problem, config, value


def why_nothing_fits(problem: TrainingProblem, report: SearchReport) -> str:
    """One sentence: the limit that stopped the nearest candidate, and by how much."""
    if "device memory" in report.nearest_miss and len(report.nearest_miss) == 1:
        excess, _ = report.nearest_miss["device memory"]
        return f"does not fit: {format_bytes(excess)} too much on the worst rank ({limit_words(problem)})"
    if report.nearest_miss:
        limit = next(name for name in reversed(LIMITS) if name in report.nearest_miss)
        excess, _ = report.nearest_miss[limit]
        return f"beyond the limit on {limit} by {excess:,.4g}"
    if report.refused:
        message, _ = report.refused.most_common(1)[0]
        return f"not legal: {message}"
    return "not legal for this model, batch and cluster"


def limit_words(problem: TrainingProblem) -> str:
    """The memory limit as text."""
    return f"limit {format_bytes(problem.limits.memory_bytes)}"


def why_slower(chosen: Priced, other: Priced) -> str:
    """One sentence: the change of the step, and the parts of it that changed most."""
    change = other.step_s / chosen.step_s - 1.0
    names = dict.fromkeys([*chosen.breakdown_s, *other.breakdown_s])
    deltas = {name: other.breakdown_s.get(name, 0.0) - chosen.breakdown_s.get(name, 0.0) for name in names}
    floor = NAMED_SHARE * chosen.step_s
    longer = [name for name in sorted(deltas, key=lambda key: -deltas[key]) if deltas[name] > floor][:2]
    shorter = [name for name in sorted(deltas, key=lambda key: deltas[key]) if deltas[name] < -floor][:1]
    parts = [f"{name} {_signed(deltas[name])}" for name in (*longer, *shorter)]
    more = other.config.world_size - chosen.config.world_size
    devices = f" on {abs(more)} {'more' if more > 0 else 'fewer'} devices" if more else ""
    detail = f": {', '.join(parts)}" if parts else ""
    return f"{change:+.1%} step time{devices}{detail}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{format_duration(abs(seconds))}"
