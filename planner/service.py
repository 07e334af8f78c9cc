"""The straight line: spec → catalog → problem → solver → plan. Command line, HTTP and notebooks call this.

Nothing here prints, and nothing here decides: each step is one call into its own room.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError, Problem, SpecError, UnknownEntryError, closest_names, did_you_mean
from meshplan.planner.core.plan import Plan, plan_identity
from meshplan.planner.core.solution import OnProgress, solution_document

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.hardware import Device
    from meshplan.catalogs.models.shapes import ModelShape
    from meshplan.planner.emit.artifact import Artifact, EmittedPlan
    from meshplan.planner.rank_mapping.pictures import MappingView
    from meshplan.planner.training.pipeline.simulation import Simulated
    from meshplan.planner.training.problem.problem import TrainingConfig
    from meshplan.planner.training.resolve import Resolved
    from meshplan.planner.training.search.rank_placement import Placement

DEFAULT_TOP = 5
# Micro-batches of a timeline, over the number of stages: filling, one steady round, emptying.
TIMELINE_ROUNDS = 3
# kind of a stand-alone problem → (module of the problem, its class, module of the solver). One line a kind.
STAND_ALONE = {
    "rank-mapping": ("rank_mapping.problem", "RankMappingProblem", "rank_mapping.solve"),
    "expert-placement": ("expert_placement.problem.problem", "ExpertPlacementProblem", "expert_placement.search.solve"),
    "gpu-allocation": ("gpu_allocation.replicas.problem", "GpuAllocationProblem", "gpu_allocation.replicas.solve"),
}
KINDS = ("training", "serving", *STAND_ALONE)


def make_plan(
    document: Mapping[str, Any],
    catalog: Catalog,
    *,
    base: Path = Path(),
    seed: int = 0,
    top: int = DEFAULT_TOP,
    time_limit_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Answer one question.

    Args:
        document: the spec as plain data, with its ``kind``.
        catalog: what hardware, models and prices exist.
        base: folder against which paths in the spec are resolved.
        seed: where pseudo-random choices start from.
        top: candidates to keep in the plan's table.
        time_limit_s: seconds after which the best so far is returned with its gap; None for as long as it takes.
        on_progress: called with incumbent and bound now and then.

    Returns:
        The plan. Where none exists its solution has the status ``infeasible`` and says what would lift it.

    Raises:
        SpecError: the spec is malformed; every problem at once.
    """
    kind = require_kind(document)
    if kind == "training":
        return _plan_training(document, catalog, base, seed, top, time_limit_s, on_progress)
    if kind == "serving":
        from meshplan.planner.serving.service import plan_serving

        return plan_serving(
            document, catalog, base, seed=seed, top=top, time_limit_s=time_limit_s, on_progress=on_progress
        )
    if kind == "gpu-allocation":
        from meshplan.planner.gpu_allocation.spec import is_market_question

        if is_market_question(document):
            from meshplan.planner.gpu_allocation.service import plan_allocation

            return plan_allocation(document, catalog, base, seed=seed, on_progress=on_progress)
    return _plan_stand_alone(kind, document, base, seed, time_limit_s, on_progress)


def require_kind(document: Mapping[str, Any]) -> str:
    """The document's kind.

    Raises:
        SpecError: it has none, or an unknown one.
    """
    kind = document.get("kind")
    if isinstance(kind, str) and kind in KINDS:
        return kind
    hint = did_you_mean(closest_names(str(kind), KINDS)) if kind is not None else ""
    raise SpecError([Problem(path="kind", message=f"must be one of {', '.join(KINDS)}, not {kind!r}{hint}")])


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
    from meshplan.planner.training.problem.spec import read_training_spec
    from meshplan.planner.training.resolve import resolve_training, unknown_names

    if require_kind(document) != "training":
        raise SpecError([Problem(path="kind", message=f"must be training here, not {document['kind']}")])
    try:
        spec = read_training_spec(document)
    except SpecError as error:  # one run is enough to mend them all: the names are looked up even so
        raise SpecError([*error.problems, *unknown_names(document, catalog)]) from None
    return resolve_training(spec, catalog, base, shape=shape)


def _plan_training(
    document: Mapping[str, Any],
    catalog: Catalog,
    base: Path,
    seed: int,
    top: int,
    time_limit_s: float | None,
    on_progress: OnProgress | None,
) -> Plan:
    from meshplan.planner.training import plan as training_plan
    from meshplan.planner.training.alternatives import alternatives
    from meshplan.planner.training.estimator.priced import price
    from meshplan.planner.training.infeasible import explain_infeasible
    from meshplan.planner.training.search.degrees import KEEP
    from meshplan.planner.training.search.joint import search_plans
    from meshplan.planner.training.search.mapping_report import asked_order, placed

    resolved = resolve(document, catalog, base)
    problem = resolved.problem
    # Equals that differ in a label only are shown once, so more are kept than shown.
    keep = max(KEEP, 2 * top)
    order = asked_order(problem, resolved.mapping)
    found = search_plans(problem, seed=seed, keep=keep, order=order, time_limit_s=time_limit_s, on_progress=on_progress)
    solution, report_of = found.solution, found.search.report
    common: dict[str, Any] = {
        **_identity(document, resolved),
        "rejected": tuple(training_plan.rejected_rows(report_of)),
    }
    report = solution_document(solution, seed)
    report["num_candidates"] = report_of.considered
    if solution.assignment is None:
        return Plan(config={}, predicted={}, solution={**report, **explain_infeasible(problem, report_of)}, **common)
    common["placement"] = found.placement
    problem = placed(problem, found.placement)
    resolved = replace(resolved, problem=problem)
    chosen = price(problem, solution.assignment.config)
    rows = training_plan.runner_up_rows(found.best, top=top)
    left_s = None if time_limit_s is None else time_limit_s - solution.wall_s
    rows += training_plan.alternative_rows(chosen, alternatives(problem, chosen, time_limit_s=left_s))
    return training_plan.make_training_plan(resolved, chosen, solution=report, alternatives=tuple(rows), **common)


def estimate_plan(document: Mapping[str, Any], catalog: Catalog, *, base: Path = Path()) -> Plan:
    """Price one fixed configuration: ``fixed`` pins the degrees, what it leaves out takes its plain default.

    Raises:
        SpecError: malformed, or the pinned choices are not legal together (each broken rule is named).
    """
    from meshplan.planner.training import plan as training_plan
    from meshplan.planner.training.estimator.priced import price
    from meshplan.planner.training.pinned import fixed_config

    if require_kind(document) == "serving":
        from meshplan.planner.serving.service import estimate_serving

        return estimate_serving(document, catalog, base)
    resolved = resolve(document, catalog, base)
    common: dict[str, Any] = _identity(document, resolved)
    config = fixed_config(resolved.problem)
    resolved, common["placement"] = _placed_config(resolved, config)
    priced = price(resolved.problem, config)
    fits = priced.safe_bytes <= resolved.problem.limits.memory_bytes
    report = {"status": "feasible" if fits else "infeasible", "solver": "none: one configuration", "oom": not fits}
    return training_plan.make_training_plan(resolved, priced, solution=report, alternatives=(), rejected=(), **common)


def _placed_config(resolved: Resolved, config: TrainingConfig) -> tuple[Resolved, Placement | None]:
    """The mapping that the spec asks for, of one configuration."""
    from meshplan.planner.training.search.joint import place_config
    from meshplan.planner.training.search.mapping_report import asked_order, placed

    placement = place_config(resolved.problem, config, order=asked_order(resolved.problem, resolved.mapping))
    return replace(resolved, problem=placed(resolved.problem, placement)), placement


def explain_instead(plan: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog) -> tuple[Plan | None, str]:
    """What the plan would be with other choices pinned, and one sentence on the difference.

    The model is the one that the plan was made for; the rest of the spec is looked up again.

    Returns:
        The other plan (None where none fits) and the reason.

    Raises:
        SpecError: unknown or impossible choices, or the plan is not a training plan with a configuration.
    """
    from meshplan.planner.training import plan as training_plan
    from meshplan.planner.training.alternatives import instead
    from meshplan.planner.training.estimator.priced import price

    if plan.kind == "serving" and plan.config:
        from meshplan.planner.serving.service import instead_serving

        return instead_serving(plan, choices, catalog, training_plan.shape_from_document(plan.provenance["model"]))
    if plan.kind != "training" or not plan.config:
        message = f"plan {plan.plan_id} ({plan.kind}, {plan.solution['status']}) has no choices to change"
        raise SpecError([Problem(path="", message=message)], of="the question")
    shape = training_plan.shape_from_document(plan.provenance["model"])
    spec = {**plan.spec, "fixed": {**plan.spec.get("fixed", {}), **choices}}
    resolved = resolve(spec, catalog, shape=shape)
    config = training_plan.config_from_document(plan.config)
    common: dict[str, Any] = _identity(spec, resolved)
    resolved, _ = _placed_config(resolved, config)
    free = resolved.problem.with_fixed(plan.spec.get("fixed", {}))
    other = instead(free, price(free, config), choices)
    if other.priced is None:
        return None, other.reason
    resolved, common["placement"] = _placed_config(resolved, other.priced.config)
    made = training_plan.make_training_plan(
        resolved,
        other.priced,
        solution={"status": "feasible", "solver": "pinned choices"},
        alternatives=(),
        rejected=(),
        **common,
    )
    return made, other.reason


def plan_timeline(plan: Plan, catalog: Catalog) -> tuple[Simulated, str]:
    """A training plan's pipeline schedule in time, and a title that says what is shown.

    Of very many micro-batches only the first :data:`TIMELINE_ROUNDS` × pipeline_parallel are run: the steady state
    repeats, and more would not be seen.

    Raises:
        SpecError: the plan is not a training plan with a configuration.
    """
    from meshplan.planner.training import plan as training_plan
    from meshplan.planner.training.simulated import simulated_pipeline

    if plan.kind != "training" or not plan.config:
        message = f"plan {plan.plan_id} ({plan.kind}, {plan.solution['status']}) has no pipeline to draw"
        raise SpecError([Problem(path="", message=message)], of="the question")
    resolved = resolve(plan.spec, catalog, shape=training_plan.shape_from_document(plan.provenance["model"]))
    config = training_plan.config_from_document(plan.config)
    shown = min(config.num_microbatches, TIMELINE_ROUNDS * config.pipeline_parallel)
    run = simulated_pipeline(resolved.problem, replace(config, num_microbatches=shown))
    title = (
        f"{config.pipeline_schedule}, {config.pipeline_parallel} stages × {config.virtual_pipeline_stages} chunks, "
        f"{shown} of {config.num_microbatches} micro-batches"
    )
    return run, title


def plan_mapping_view(plan: Plan, catalog: Catalog, *, base: Path = Path()) -> MappingView:
    """Which rank sits where, on the links as the catalog and the spec have them now.

    Args:
        plan: of a training question with a mapping, or of a ``rank-mapping`` problem.
        catalog: where the names of the spec are looked up.
        base: folder of a stand-alone problem's array files.

    Raises:
        SpecError: the plan has no mapping.
    """
    from meshplan.planner.rank_mapping.view import stand_alone_view, training_view
    from meshplan.planner.training import plan as training_plan

    if plan.kind == "rank-mapping" and plan.answer:
        from meshplan.planner.rank_mapping.problem import RankMappingProblem

        return stand_alone_view(plan, RankMappingProblem.from_document(plan.spec, base))
    if plan.kind != "training" or not plan.config:
        message = f"plan {plan.plan_id} ({plan.kind}, {plan.solution['status']}) has no mapping to draw"
        raise SpecError([Problem(path="", message=message)], of="the question")
    resolved = resolve(plan.spec, catalog, shape=training_plan.shape_from_document(plan.provenance["model"]))
    return training_view(plan, resolved.problem.machine.network)


def emit_plan(
    plan: Plan,
    target: str,
    catalog: Catalog,
    *,
    framework: str | None = None,
    script: str = "",
    image: str = "",
    model_path: str = "",
) -> EmittedPlan:
    """Launcher files of a training or serving plan, in memory.

    The model is the one that the plan was made for, whatever the catalog says now.

    Args:
        plan: a training or serving plan that found a configuration.
        target: emit target.
        catalog: where the device's name and memory are looked up, for the checks in the scripts.
        framework: what an orchestrator launches (the framework that the plan was made for where None); a target
            that is itself a framework takes none.
        script: training script, for frameworks that bring none of their own.
        image: container image, for launchers that start containers.
        model_path: checkpoint to serve; empty for where the model is published.

    Raises:
        EmitError: unknown target, nothing to launch, or a framework that the target does not take.
    """
    if plan.kind == "serving":
        from meshplan.planner.launch.serving import serving_files

        emitted = serving_files(plan, target, catalog, image=image, model_path=model_path)
        return replace(emitted, artifacts=(*emitted.artifacts, plan_artifact(plan)))
    if plan.kind == "gpu-allocation":
        from meshplan.planner.launch.gpu_allocation import allocation_files

        emitted = allocation_files(plan, target, catalog, image=image, model_path=model_path)
        return replace(emitted, artifacts=(*emitted.artifacts, plan_artifact(plan)))
    from meshplan.planner.emit.artifact import TrainingRequest
    from meshplan.planner.launch.registry import emit, is_orchestrator
    from meshplan.planner.training.plan import shape_from_document

    if framework is None and is_orchestrator(target):
        framework = plan_target(plan)
    if "model" not in plan.provenance:
        raise EmitError(f"plan {plan.plan_id} of the kind {plan.kind!r} has no configuration to launch")
    shape = shape_from_document(plan.provenance["model"])
    device, devices_per_host = _hardware(plan.spec, catalog)
    request = TrainingRequest(
        plan=plan,
        shape=shape,
        device=device,
        devices_per_host=devices_per_host,
        hosts=tuple((plan.mapping or {}).get("hosts", ())),
        script=script,
        image=image,
    )
    emitted = emit(target, request, framework=framework)
    return replace(emitted, artifacts=(*emitted.artifacts, plan_artifact(plan)))


def support_matrix() -> tuple[Mapping[str, Any], ...]:
    """Which choices each emit target takes, found by emitting probes of two models that ship with meshplan."""
    from meshplan.catalogs.database.seeds import seed_model_shape
    from meshplan.planner.launch.support import support_rows

    # TorchTitan trains registered models only: the probes are two of them.
    return support_rows(seed_model_shape("llama-3.1-8b"), seed_model_shape("qwen3-30b-a3b"))


def plan_target(plan: Plan) -> str | None:
    """The emit target that the plan was made for; None for kinds that nothing launches."""
    if plan.kind == "serving":
        return str(plan.config["engine"]) if plan.config else None
    if plan.kind == "gpu-allocation" and plan.config:
        return str(plan.config["services"][0]["engine"])
    if plan.kind != "training":
        return None
    from meshplan.planner.training.problem.spec import ConstraintsSpec

    return ConstraintsSpec.model_validate(plan.spec.get("constraints", {})).target


def plan_artifact(plan: Plan) -> Artifact:
    """The plan itself as a file: what ``explain``, ``compare`` and ``emit`` take instead of a stored plan's id."""
    from meshplan.planner.emit.artifact import Artifact

    text = json.dumps(plan.to_document(clocks=False), indent=2, ensure_ascii=False, allow_nan=False)
    return Artifact(path=PurePosixPath("plan.json"), content=f"{text}\n")


def _hardware(spec: Mapping[str, Any], catalog: Catalog) -> tuple[Device | None, int]:
    """The accelerator of a training spec and how many a host has; None and 0 where the catalog does not say."""
    cluster = spec["cluster"]
    try:
        if cluster.get("nodes"):
            node = catalog.node_type(cluster["nodes"][0]["type"])
            return node.device, node.devices_per_host
        return catalog.device(cluster["devices"]["type"]), 0
    except UnknownEntryError:
        return None, 0


def _identity(document: Mapping[str, Any], resolved: Resolved) -> dict[str, Any]:
    from meshplan.planner.training.plan import catalog_content

    return plan_identity(document, catalog_content(resolved))


def _plan_stand_alone(
    kind: str,
    document: Mapping[str, Any],
    base: Path,
    seed: int,
    time_limit_s: float | None,
    on_progress: OnProgress | None,
) -> Plan:
    problem_module, class_name, solver_module = STAND_ALONE[kind]
    problem_class = getattr(import_module(f"meshplan.planner.{problem_module}"), class_name)
    solver = import_module(f"meshplan.planner.{solver_module}")
    problem = problem_class.from_document(document, base)
    solution = solver.solve(problem, seed=seed, time_limit_s=time_limit_s, on_progress=on_progress)
    return Plan(
        **plan_identity(document, {}),
        config={},
        predicted={},
        solution=solution_document(solution, seed),
        answer=solver.answer(problem, solution),
        provenance={"meshplan": version("meshplan")},
    )
