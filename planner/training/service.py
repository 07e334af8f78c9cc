"""The straight line for training: spec → catalog → problem → search → plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, plan_identity, shape_from_document
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import solution_document
from meshplan.planner.training.admission import admission, admitted_by, by_typical_figure, pinned_report
from meshplan.planner.training.alternatives import alternatives, why_nothing_fits, why_slower
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.explanation import explain
from meshplan.planner.training.plan import (
    alternative_rows,
    catalog_content,
    config_from_document,
    make_training_plan,
    rejected_rows,
    runner_up_rows,
)
from meshplan.planner.training.problem.choices import PINNABLE
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.problem.spec import TrainingSpec, question_of_plan, read_training_spec
from meshplan.planner.training.resolve import Resolved, calibration_for, resolve_training
from meshplan.planner.training.search.degrees import KEEP
from meshplan.planner.training.search.joint import place_config, search_plans
from meshplan.planner.training.search.mapping.mapping_report import placed, requested_order
from meshplan.planner.training.search.mapping.placement import JointResult, Placement
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.shapes import ModelShape
    from meshplan.planner.rank_mapping.pictures import MappingView
    from meshplan.planner.training.pipeline.simulation import Simulated
    from meshplan.planner.training.replanning.replan import Replanned
    from meshplan.planner.validation.recorded import RecordedRun, Recording

__all__ = [
    "SPEC",
    "certify",
    "estimate",
    "explain",
    "instead",
    "mapping_view",
    "plan",
    "predict",
    "recorded_run",
    "replan",
    "resolve",
    "timeline",
    "written_out",
]

SPEC = TrainingSpec
# Micro-batches of a timeline, over the number of stages: filling, one steady round, emptying.
TIMELINE_ROUNDS = 3


def resolve(
    document: Mapping[str, Any], catalog: Catalog, base: Path = Path(), *, shape: ModelShape | None = None
) -> Resolved:
    """Read and look up a training spec.

    Args:
        document: the spec.
        catalog: where names are looked up.
        base: folder against which a model path is resolved.
        shape: the model where it is known already; the spec's model is not looked up then.

    Raises:
        SpecError: malformed, of another kind, or with unknown names.
    """
    if document.get("kind") != "training":
        raise SpecError.at("kind", f"must be training here, not {document.get('kind')}")
    spec = read_with_names(read_training_spec, document, lambda: unknown_names(document, catalog))
    if spec.workload.has_open_batch:
        message = "auto compares plans at several batches: ask meshplan plan"
        raise SpecError.at("workload.global_batch_size", message)
    return resolve_training(spec, catalog, base, shape=shape)


def plan(question: Question) -> Plan:
    """Search degrees and rank mapping; see :func:`meshplan.planner.service.make_plan`."""
    if question.document.get("far_apart") is not None:
        return far_apart().answer(question, plan)
    if is_mixed(question.document):
        return mixed().answer(question, plan)
    if has_open_batch(question.document):
        # start-up: most questions state their batch
        from meshplan.planner.training.replanning.chosen_batch import plan_with_batch

        return plan_with_batch(question, plan, lambda document: resolve(document, question.catalog, question.base))
    resolved = resolve(question.document, question.catalog, question.base)
    problem, found = _searched(question, resolved)
    best = found.solution.assignment
    if best is None:
        # start-up: most questions have a plan
        from meshplan.planner.training.infeasible import explain_infeasible

        search = found.search.report
        return Plan(
            config={},
            predicted={},
            solution={**_report(question, found), **explain_infeasible(problem, search)},
            rejected=tuple(rejected_rows(search, is_found=False)),
            **_identity(question.document, resolved),
        )
    resolved, made = _made(question, resolved, problem, found, best.config)
    return _under_availability(question, resolved, made)


def _made(
    question: Question, resolved: Resolved, problem: TrainingProblem, found: JointResult, config: TrainingConfig
) -> tuple[Resolved, Plan]:
    """The plan of a search that found one, and the question under the mapping of that plan.

    Args:
        question: what was asked.
        resolved: it with names looked up.
        problem: what the search answers: see :mod:`.admission`.
        found: its result.
        config: the configuration that it found.
    """
    is_generous = problem is not resolved.problem
    problem = placed(problem, found.placement)
    resolved = replace(resolved, problem=placed(resolved.problem, found.placement))
    chosen = price(resolved.problem, config)
    best = _with_safe_bounds(resolved.problem, found.best) if is_generous else found.best
    rows = runner_up_rows(best, problem.objective, top=question.top)
    judged = price(problem, config)
    if question.beyond:
        others = alternatives(problem, judged, search=found.search, budget=question.budget)
        rows += alternative_rows(judged, others, Objective(problem))
    report = _report(question, found) | admitted_by(admission(resolved.problem, chosen))
    made = make_training_plan(
        resolved,
        chosen,
        solution=report,
        identity=_identity(question.document, resolved),
        placement=found.placement,
        alternatives=tuple(rows),
        rejected=tuple(rejected_rows(found.search.report, is_found=True)),
    )
    return resolved, made


def _report(question: Question, found: JointResult) -> dict[str, Any]:
    """How good the answer is known to be, and what was looked at."""
    counted = {"num_candidates": found.search.report.considered, "tie_width": TIE_WIDTH}
    return {**solution_document(found.solution, question.seed), **counted}


def _under_availability(question: Question, resolved: Resolved, made: Plan) -> Plan:
    """The plan's run on the nodes of ``run.availability``; the plan itself where all nodes are there all the time."""
    name = (question.document.get("run") or {}).get("availability")
    if name is None:
        return made
    # start-up: in most questions all nodes are there all the time
    from meshplan.planner.goodput.availability.trace import read_availability

    traces = read_availability(question.base / name)

    def answer(spec: Mapping[str, Any]) -> Plan:
        return plan(replace(question, document=spec, on_progress=None, beyond=False))

    return by_nodes().under_availability(made, question.document, resolved, traces, answer)


def _searched(question: Question, resolved: Resolved) -> tuple[TrainingProblem, JointResult]:
    """The search's result, and the problem that it answers: see :mod:`.admission`."""

    def search(problem: TrainingProblem) -> JointResult:
        return search_plans(
            problem,
            seed=question.seed,
            keep=max(KEEP, 2 * question.top),  # equals that differ in a label only are shown once
            order=requested_order(problem, resolved.mapping),
            budget=question.budget,
            on_progress=question.on_progress,
        )

    problem = resolved.problem
    found = search(problem)
    if found.solution.assignment is not None or not problem.fixed:
        return problem, found
    generous = by_typical_figure(problem)
    again = search(generous)
    return (problem, found) if again.solution.assignment is None else (generous, again)


def _with_safe_bounds(problem: TrainingProblem, best: Iterable[ScoredConfig]) -> list[ScoredConfig]:
    """Candidates that were found by the typical figure, with their safe bounds."""
    return [replace(scored, safe_bytes=price(problem, scored.config).safe_bytes) for scored in best]


def estimate(question: Question) -> Plan:
    """Price the configuration that ``fixed`` pins.

    Raises:
        SpecError: malformed, or the pinned choices are not legal together (each broken rule is named).
    """
    if question.document.get("far_apart") is not None:
        raise _only_planned("compares ways to train, and an estimate is of one: ask meshplan plan, or drop far_apart")
    if is_mixed(question.document):
        return mixed().estimate(question)
    if by_nodes().steady(question.document) != question.document:
        message = "needs plans for other numbers of nodes: ask meshplan plan"
        raise SpecError.at("run.availability", message)
    # start-up: a plan is found without it
    from meshplan.planner.training.pinned import fixed_config

    resolved = resolve(question.document, question.catalog, question.base)
    identity = _identity(question.document, resolved)
    config = fixed_config(resolved.problem)
    resolved, placement = _placed_config(resolved, config)
    priced = price(resolved.problem, config)
    limit = resolved.problem.limits.memory_bytes
    report = pinned_report(admission(resolved.problem, priced), safe_bytes=priced.safe_bytes, limit_bytes=limit)
    return make_training_plan(resolved, priced, solution=report, identity=identity, placement=placement)


def predict(made: Plan, workload: Mapping[str, float], catalog: Catalog) -> Mapping[str, Interval]:
    """The plan's own configuration with another workload, such as another global batch.

    Args:
        made: whose choices are pinned.
        workload: keys of the spec's workload that change.
        catalog: where names are looked up.

    Raises:
        SpecError: the choices are not legal with it; each broken rule is named.
    """
    pins = {one.name: made.config[one.name] for one in PINNABLE if made.config.get(one.name) is not None}
    asked = question_of_plan(made.spec)
    # The batch may be stated in tokens, and one of the two ways to state it is enough.
    others = {"global_batch_size": "global_batch_tokens", "global_batch_tokens": "global_batch_size"}
    replaced = {others[name] for name in workload if name in others}
    load = {name: value for name, value in asked["workload"].items() if name not in replaced} | dict(workload)
    spec = {**by_nodes().steady(asked), "workload": load, "fixed": pins}
    return estimate(Question(document=spec, catalog=catalog)).predicted


def instead(made: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog) -> tuple[Plan | None, str]:
    """The best plan with other choices pinned, and why it is slower or faster."""
    if made.far_apart is not None:
        raise _only_planned("is compared by meshplan plan: add the choices to fixed there")
    spec = {**question_of_plan(made.spec), "fixed": {**made.spec.get("fixed", {}), **choices}}
    if is_mixed(spec):
        return mixed().instead(made, plan(Question(document=spec, catalog=catalog)))
    resolved = resolve(spec, catalog, shape=shape_from_document(made.provenance["model"]))
    config = config_from_document(made.config)
    own, _ = _placed_config(resolved, config)
    chosen = price(own.problem.with_fixed(made.spec.get("fixed", {})), config)
    question = Question(document=spec, catalog=catalog, seed=made.solution.get("seed", 0), top=1, beyond=False)
    problem, found = _searched(question, resolved)
    best = found.solution.assignment
    if best is None:
        return None, why_nothing_fits(problem, found.search.report)
    resolved, other = _made(question, resolved, problem, found, best.config)
    return other, why_slower(chosen, price(resolved.problem, best.config))


def certify(question: Question, made: Plan) -> Certificate:
    """Hold a plan against configurations that were put together and priced apart from the search."""
    if made.far_apart is not None and made.far_apart["chosen"] != made.far_apart["ways"][0]["name"]:
        raise _only_planned("is certified for the synchronous plan only: drop far_apart")
    # start-up: a plan is found without it
    from meshplan.planner.training.certify import certify_plan

    resolved = resolve(question.document, question.catalog, question.base)
    config = config_from_document(made.config) if made.config else None
    if config is not None:
        resolved, _ = _placed_config(resolved, config)
    step = made.predicted.get("iteration_s")
    stated = {"iteration_s": None if step is None else step.value, "bound": made.solution.get("bound")}
    return certify_plan(resolved.problem, config, stated, seed=question.seed, budget=question.budget)


def written_out(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a plan with its defaults."""
    return read_training_spec(question_of_plan(spec)).model_dump(mode="json", exclude_none=True)


def _question_of(made: Plan, catalog: Catalog, base: Path | None = None) -> Resolved:
    """The question that a plan answers, of the model that it carries and the catalog as it is now."""
    shape = shape_from_document(made.provenance["model"])
    return resolve(question_of_plan(made.spec), catalog, Path() if base is None else base, shape=shape)


def recorded_run(made: Plan, recording: Recording, catalog: Catalog) -> RecordedRun:
    """What was measured of a plan, as a run that constants are adapted to.

    Raises:
        UnsupportedError: it cannot have been this plan, or says nothing about constants.
        SpecError: the plan's spec is not answered any more.
    """
    # start-up: no plan asks for it
    from meshplan.planner.training.measured.recorded import recorded_training_run

    resolved = _question_of(made, catalog)
    config = config_from_document(made.config)
    resolved, _ = _placed_config(resolved, config)
    problem = resolved.problem
    return recorded_training_run(
        recording,
        made.predicted,
        problem,
        config,
        start=calibration_for(catalog, problem.rules.name, problem.machine.device.architecture),
        cluster=resolved.identity,
    )


def replan(
    question: Question, made: Plan, *, without: Sequence[int] = (), fewer: int = 1, more: int = 0
) -> tuple[Replanned, ...]:
    """The plan without some nodes or with more, and what it takes to get there.

    Args:
        question: how to search; its document is not read.
        made: the plan that runs.
        without: numbers of the nodes that are gone; none: one answer each for one to ``fewer`` nodes less.
        fewer: most nodes less.
        more: most nodes more; one answer each.

    Raises:
        SpecError: no node can be lost, and none is to come.
    """
    # start-up: a plan is found without it
    from meshplan.planner.training.replanning.replan import losses, replanned

    old = _question_of(made, question.catalog, question.base)

    def answer(spec: Mapping[str, Any]) -> Plan:
        return plan(replace(question, document=spec, beyond=False))

    gained = [replanned(made, old, (), answer, gained=count) for count in range(1, more + 1)]
    lost = losses(made, old, without, fewer)
    if not gained and not lost:
        raise SpecError.at("PLAN", "it runs on one node, and no other is left without it: --more 1 plans for a second")
    return (*gained, *(replanned(made, old, nodes, answer) for nodes in lost))


def timeline(made: Plan, catalog: Catalog) -> tuple[Simulated, str]:
    """The plan's pipeline schedule in time, and a title that says what is shown.

    Of very many micro-batches only the first :data:`TIMELINE_ROUNDS` × pipeline_parallel are run: the steady state
    repeats, and more would not be seen.
    """
    # start-up: a plan is found without it
    from meshplan.planner.training.simulated import simulated_pipeline

    resolved = _question_of(made, catalog)
    config = config_from_document(made.config)
    shown = min(config.num_microbatches, TIMELINE_ROUNDS * config.pipeline_parallel)
    run = simulated_pipeline(resolved.problem, replace(config, num_microbatches=shown))
    title = (
        f"{config.pipeline_schedule}, {config.pipeline_parallel} stages × {config.virtual_pipeline_stages} chunks, "
        f"{shown} of {config.num_microbatches} micro-batches"
    )
    return run, title


def mapping_view(made: Plan, catalog: Catalog, base: Path) -> MappingView:
    """Which rank sits where, on the links as the catalog and the spec have them now."""
    # start-up: a plan is found without it
    from meshplan.planner.rank_mapping.view import training_view

    resolved = _question_of(made, catalog, base)
    return training_view(made, resolved.problem.machine.network)


def _placed_config(resolved: Resolved, config: TrainingConfig) -> tuple[Resolved, Placement | None]:
    """The mapping that the spec asks for, of one configuration."""
    placement = place_config(resolved.problem, config, order=requested_order(resolved.problem, resolved.mapping))
    return replace(resolved, problem=placed(resolved.problem, placement)), placement


def is_mixed(document: Mapping[str, Any]) -> bool:
    """Whether a spec, which may be malformed, names several node types."""
    cluster = document.get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, Mapping) else None
    types = [node.get("type") for node in nodes if isinstance(node, Mapping)] if isinstance(nodes, list) else []
    return len({str(name) for name in types}) > 1 and all(types)


def has_open_batch(document: Mapping[str, Any]) -> bool:
    """Whether a spec, which may be malformed, leaves its batch open."""
    workload = document.get("workload")
    return isinstance(workload, Mapping) and workload.get("global_batch_size") == "auto"


def mixed() -> Any:
    """The module that answers questions with several node types."""
    # start-up: most questions have one
    from meshplan.planner.training.mixed import answer

    return answer


def by_nodes() -> Any:
    """The module that plans for nodes that come and go."""
    # start-up: in most questions all are there all the time
    from meshplan.planner.training.replanning import by_nodes as module

    return module


def far_apart() -> Any:
    """The module that compares ways over sites."""
    # start-up: most questions have one site
    from meshplan.planner.training.far_apart import answer

    return answer


def _only_planned(what: str) -> SpecError:
    return SpecError.at("far_apart", what)


def _identity(document: Mapping[str, Any], resolved: Resolved) -> PlanIdentity:
    return plan_identity(document, catalog_content(resolved))
