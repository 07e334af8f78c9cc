"""Answers to serving questions: spec → catalog → problem → search → plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.identity import cluster_identity
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Interval, Plan, plan_identity, shape_from_document
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import solution_document
from meshplan.planner.serving.advice import images_answer, sound_answer
from meshplan.planner.serving.certify import certify_deployment
from meshplan.planner.serving.drafts import drafts_by_load
from meshplan.planner.serving.no_plan.infeasible import explain_infeasible
from meshplan.planner.serving.pictures import pareto_page
from meshplan.planner.serving.plan import catalog_content, make_serving_plan, predicted, provenance, rejected_rows
from meshplan.planner.serving.problem.config import Role, ServingConfig, serving_config_from_document
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import ServingSpec, read_serving_spec
from meshplan.planner.serving.resolve import ResolvedServing, resolve_serving, serving_calibration
from meshplan.planner.serving.search.branch import TIE
from meshplan.planner.serving.search.scores import objective_change
from meshplan.planner.serving.search.search import estimate_pinned, search_serving
from meshplan.planner.serving.without_use import without_use
from meshplan.planner.validation.recorded import RecordedRun, Recording

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.shapes import ModelShape
    from meshplan.planner.serving.power.budget import PowerBudget


__all__ = [
    "SPEC",
    "certify",
    "estimate",
    "instead",
    "pareto_page",
    "plan",
    "power_budget",
    "predict",
    "recorded_run",
    "written_out",
]

SPEC = ServingSpec


def plan(question: Question, *, shape: ModelShape | None = None) -> Plan:
    """The best deployment within the SLO; see :func:`meshplan.planner.service.make_plan`.

    Args:
        question: the spec and the catalog.
        shape: the model, if it is known already; the spec's model is then not looked up.
    """
    resolved = _resolved(question.document, question.catalog, question.base, shape)
    settings: dict[str, Any] = {"seed": question.seed, "budget": question.budget, "on_progress": question.on_progress}
    stores: list[dict[str, Any]] = []
    if resolved.problem.kv_stores:
        # start-up: most questions have no tiers
        from meshplan.planner.serving.tiers.kv_choice import search_with_stores

        found = search_with_stores(resolved.problem, **settings)
        resolved = replace(resolved, problem=found.problem)
        solution, search, stores = found.solution, found.report, found.stores
    else:
        solution, search = search_serving(resolved.problem, **settings)
    report = {**solution_document(solution, question.seed), "num_candidates": search.num_candidates}
    report |= {"num_simulated": len(search.simulated), "is_complete": search.is_complete, "tie": TIE}
    identity = plan_identity(question.document, catalog_content(resolved))
    if solution.assignment is None:
        reasons = explain_infeasible(resolved.problem, search, seed=question.seed, budget=question.budget)
        return Plan(
            config={},
            predicted={},
            solution={**report, **reasons},
            provenance=provenance(resolved),
            rejected=tuple(rejected_rows(search)),
            **identity,
        )
    chosen = solution.assignment
    config = chosen.candidate.config
    cut = resolved.problem.with_share(config.pools[0].share)
    drafted = replace(cut, speculation=config.speculation, speculation_options=())
    made = make_serving_plan(
        replace(resolved, problem=drafted), chosen, search, solution=report, identity=identity, top=question.top
    )
    more: dict[str, Any] = {"kv_stores": stores} if stores else {}
    if resolved.problem.speculation_options:
        more["speculation"] = drafts_by_load(resolved.problem, chosen)
    if (images := images_answer(drafted, chosen.candidate.config)) is not None:
        more["images"] = images
    if (heard := sound_answer(drafted, chosen.candidate.config)) is not None:
        more["sound"] = heard
    if said := without_use(resolved.problem, config):
        made = replace(made, provenance={**made.provenance, "without_use": said})
    return replace(made, answer={**(made.answer or {}), **more}) if more else made


def certify(question: Question, made: Plan) -> Certificate:
    """The chosen deployment's workers replayed by the reference simulation."""
    if not made.config:
        return Certificate(method="reference simulation", covers="nothing: there is no plan", checks=())
    problem = _resolved(question.document, question.catalog, question.base).problem
    config = serving_config_from_document(made.config)
    rate = made.predicted["requests_per_s"].value
    return certify_deployment(problem, config, request_rate_per_s=rate, seed=question.seed)


def estimate(question: Question) -> Plan:
    """Simulate one pinned configuration, whether or not it meets the SLOs; other choices take their defaults.

    One way to share devices (``mig``, ``mps``) is pinned by being the only one, as one power limit is; of several none
    is taken.

    Raises:
        SpecError: malformed, or the pinned choices do not fit together or the device.
    """
    resolved = _resolved(question.document, question.catalog, question.base)
    shares = resolved.problem.share_options
    if len(shares) == 1:
        resolved = replace(resolved, problem=resolved.problem.with_share(shares[0]))
    try:
        simulated, search = estimate_pinned(resolved.problem, seed=question.seed)
    except ValueError as error:
        raise SpecError.at("fixed", str(error)) from error
    judged = simulated.judged
    report: dict[str, Any] = {"status": "feasible", "solver": "none: one configuration", "kept": judged.is_met}
    if not judged.is_met:
        report["binding_constraint"] = f"{judged.worst_miss.key}: {judged.worst_miss.text}"
    identity = plan_identity(question.document, catalog_content(resolved))
    return make_serving_plan(
        resolved, simulated, search, solution=report, identity=identity, top=1, beyond=question.beyond
    )


def instead(made: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog) -> tuple[Plan | None, str]:
    """The best plan of the same mode with other choices pinned, and one sentence on the difference."""
    mode = "aggregated" if len(made.config["pools"]) == 1 else "disaggregated"
    spec = {**made.spec, "fixed": {"mode": mode, **made.spec.get("fixed", {}), **choices}}
    shape = shape_from_document(made.provenance["model"])
    other = plan(Question(document=spec, catalog=catalog, top=1), shape=shape)
    if not other.config:
        return None, f"none meets every SLO: {other.solution['binding_constraint']}"
    mine, theirs = made.solution.get("objective"), other.solution["objective"]
    if mine is None:
        return other, "the plan was not searched for, so there is no objective to compare"
    objective = read_serving_spec(made.spec).objective
    change = abs(objective_change(objective, mine, theirs))
    how = "the same" if theirs == mine else f"{change:.1%} {'worse' if theirs > mine else 'better'}"
    return other, f"{objective.value} is {how}"


def predict(made: Plan, workload: Mapping[str, float], catalog: Catalog) -> Mapping[str, Interval]:
    """The plan's own workers under another load, simulated once with the requests of a first run.

    Unlike :func:`estimate` it neither holds the SLOs against longer runs nor gives advice.

    Args:
        made: each of its pools has a role of its own, so that a spec can pin it.
        workload: keys of the spec's workload that change.
        catalog: where names are looked up.

    Raises:
        SpecError: the load is none, or the plan's spec is not answered any more.
    """
    spec = {**made.spec, "workload": {**made.spec["workload"], **workload}, "fixed": _pins(made.config["pools"])}
    asked = _resolved(spec, catalog, Path(), shape_from_document(made.provenance["model"])).problem
    own = serving_config_from_document(made.config)
    problem = _as_chosen(asked, own)
    return predicted(problem, estimate_pinned(problem, own=own)[0])


def power_budget(
    made: Plan, budget: PowerBudget, catalog: Catalog, base: Path = Path(), *, seed: int = 0
) -> dict[str, Any]:
    """How many copies of a plan a power budget holds; see :func:`meshplan.planner.serving.power.budget.under_budget`.

    Raises:
        SpecError: the plan's load or boards say nothing of power over time, or no copy fits.
    """
    # start-up: no plan asks for it
    from meshplan.planner.serving.power.budget import under_budget

    own = serving_config_from_document(made.config)
    shape = shape_from_document(made.provenance["model"])
    problem = _as_chosen(_resolved(made.spec, catalog, base, shape).problem, own)
    found = under_budget(
        problem,
        own,
        budget,
        requests_per_s=made.predicted["requests_per_s"].value,
        num_hosts=len({host for host, _ in made.rank_table or ()}),
        seed=seed,
    )
    return {"plan_id": made.plan_id, **found}


def _as_chosen(problem: ServingProblem, config: ServingConfig) -> ServingProblem:
    """The question with a deployment's drafts, share of devices and second tier of KV cache, and nothing else to
    choose of them: no spec pins these.
    """
    tier = next((pool.kv_tier for pool in config.pools if pool.kv_tier is not None), problem.kv_tier)
    shared = problem.with_share(config.pools[0].share)
    return replace(shared, speculation=config.speculation, speculation_options=(), kv_tier=tier, kv_stores=())


def _pins(pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a spec pins to get these workers again."""
    workers = {
        pool["role"]: {
            **pool["layout"],
            "max_num_seqs": pool["limits"]["max_num_seqs"],
            "max_batched_tokens": pool["limits"]["max_batched_tokens"],
            "memory_fraction": pool["limits"]["memory_fraction"],
            "num_workers": pool["num_workers"],
            "stream_interval": pool["limits"].get("stream_interval", 1),
            **({"api_servers": number} if (number := pool["limits"].get("api_servers")) else {}),
        }
        for pool in pools
    }
    mixed = workers.pop(Role.MIXED.value, None)
    if mixed is not None:
        return {"mode": "aggregated", **mixed}
    return {"mode": "disaggregated", **workers}


def recorded_run(made: Plan, recording: Recording, catalog: Catalog) -> RecordedRun:
    """What was measured of a plan, as a run that constants are adapted to.

    Raises:
        UnsupportedError: it says nothing about constants.
        SpecError: the plan's spec is not answered any more.
    """
    # start-up: no plan asks for it
    from meshplan.planner.serving.measured.recorded import recorded_serving_run

    problem = _resolved(made.spec, catalog, Path(), shape_from_document(made.provenance["model"])).problem
    config = serving_config_from_document(made.config)
    node_type = config.pools[0].node_type
    return recorded_serving_run(
        recording,
        problem,
        config,
        start=serving_calibration(
            catalog, problem.recipe.constants_name, problem.machines[node_type].device.architecture
        ),
        cluster=cluster_identity(read_serving_spec(made.spec).cluster, node_type),
    )


def written_out(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with its defaults."""
    return read_serving_spec(spec).model_dump(mode="json", exclude_none=True)


def _resolved(
    document: Mapping[str, Any], catalog: Catalog, base: Path, shape: ModelShape | None = None
) -> ResolvedServing:
    spec = read_with_names(read_serving_spec, document, lambda: unknown_names(document, catalog))
    return resolve_serving(spec, catalog, base, shape=shape)
