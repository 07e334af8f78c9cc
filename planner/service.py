"""The straight line: spec → plan → explanation, launcher files. Command line, HTTP and notebooks call this.

Nothing here decides and nothing depends on the kind of question: each step asks the registry of kinds
(:mod:`meshplan.planner.core.kinds`) and calls into the kind's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshplan.catalogs.errors import EmitError, Problem, SpecError
from meshplan.planner.core.kinds import DEFAULT_TOP, KINDS, Question, kind_of, offered
from meshplan.planner.emit.artifact import EmitOptions, plan_artifact

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.core.solution import OnProgress
    from meshplan.planner.emit.artifact import EmittedPlan


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
    """Answer one question; the arguments are those of :class:`~meshplan.planner.core.kinds.Question`.

    Returns:
        The plan. Where none exists its solution has the status ``infeasible`` and says what would lift it.

    Raises:
        SpecError: the spec is malformed; every problem at once.
    """
    question = Question(
        document=document,
        catalog=catalog,
        base=base,
        seed=seed,
        top=top,
        time_limit_s=time_limit_s,
        on_progress=on_progress,
    )
    return cast("Plan", kind_of(document).offers("plan")(question))


def estimate_plan(document: Mapping[str, Any], catalog: Catalog, *, base: Path = Path()) -> Plan:
    """Price one fixed configuration: ``fixed`` pins the degrees, what it leaves out takes its plain default.

    Raises:
        SpecError: malformed, of a kind without configurations, or the pinned choices are not legal together.
    """
    kind = kind_of(document)
    estimate = kind.offers("estimate")
    if estimate is None:
        known = ", ".join(one.name for one in KINDS.values() if one.offers("estimate"))
        message = f"{kind.name} has no single configuration to price; kinds that have: {known}"
        raise SpecError([Problem(path="kind", message=message)])
    return cast("Plan", estimate(Question(document=document, catalog=catalog, base=base)))


def explain_instead(plan: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog) -> tuple[Plan | None, str]:
    """What the plan would be with other choices pinned, and one sentence on the difference.

    The model is the one that the plan was made for; the rest of the spec is looked up again.

    Returns:
        The other plan (None where none fits) and the reason.

    Raises:
        SpecError: unknown or impossible choices, or the plan has no choices to change.
    """
    return cast("tuple[Plan | None, str]", offered(plan, "instead", "choices to change")(plan, choices, catalog))


def plan_target(plan: Plan) -> str | None:
    """The emit target that the plan was made for; None where nothing can be launched."""
    launcher = KINDS[plan.kind].launcher()
    return None if launcher is None else launcher.target(plan)


def emit_plan(plan: Plan, target: str, catalog: Catalog, **options: Any) -> EmittedPlan:
    """Launcher files of a plan, in memory.

    The model is the one that the plan was made for, whatever the catalog says now.

    Args:
        plan: a plan that found a configuration.
        target: emit target.
        catalog: where the device's name and memory are looked up, for the checks in the scripts.
        options: fields of :class:`~meshplan.planner.emit.artifact.EmitOptions`.

    Raises:
        EmitError: unknown target, nothing to launch, or an option that the target does not take.
    """
    launcher = KINDS[plan.kind].launcher()
    if launcher is None:
        raise EmitError(f"plan {plan.plan_id} of the kind {plan.kind!r} has no configuration to launch")
    emitted = launcher.files(plan, target, catalog, EmitOptions(**options))
    return replace(emitted, artifacts=(*emitted.artifacts, plan_artifact(plan)))
