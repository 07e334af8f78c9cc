"""The straight line: spec → plan → explanation, launcher files. The command line and notebooks call this.

:mod:`meshplan.planner` offers these functions to users of the library.

Nothing here decides and nothing depends on the kind of question: each step asks the registry of kinds
(:mod:`meshplan.planner.core.kinds`) and calls into the kind's own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.core.budget import DEFAULT_MEMORY_BYTES, Budget, Spent, resident_bytes, spent
from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import DEFAULT_TOP, KINDS, Kind, Question, certifier, kind_of, offered
from meshplan.planner.core.reading.documents import read_spec_file
from meshplan.planner.core.reading.spec_reader import plain_numbers
from meshplan.planner.emit.artifact import EmitOptions, plan_artifact

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.core.solution import OnProgress
    from meshplan.planner.emit.artifact import EmittedPlan
    from meshplan.planner.training.explanation import Explanation


def load_catalog(url: str | None = None) -> Catalog:
    """Open the catalog, and create it on first use.

    Args:
        url: a file or an SQLAlchemy URL; None for ``$MESHPLAN_DB``, else a file in the user's data directory.

    Raises:
        CatalogError: it cannot be opened.
    """
    return Catalog.open(url)


def make_plan(
    spec: Mapping[str, Any] | str | Path,
    catalog: Catalog,
    *,
    base: Path | None = None,
    seed: int = 0,
    top: int = DEFAULT_TOP,
    time_limit_s: float | None = None,
    memory_limit_bytes: float | None = DEFAULT_MEMORY_BYTES,
    on_progress: OnProgress | None = None,
    certify: bool = False,
    since_start: bool = False,
) -> Plan:
    """Answer one question.

    Args:
        spec: the question as a mapping with its ``kind``, or the path of its YAML or JSON file.
        catalog: what hardware, models and prices exist.
        base: folder against which paths in the spec are resolved; None for the spec file's own.
        seed: where pseudo-random choices start from.
        top: candidates to keep in the plan's table.
        time_limit_s: seconds after which the best so far is returned with its gap; None for as long as it takes.
        memory_limit_bytes: memory that the answer takes from which on the same happens; None for no limit.
        on_progress: called with incumbent and bound now and then.
        certify: answer the question again by a second, independent way, and put what it says into the plan's
            ``certificate``. Ctrl-C during this keeps the plan.
        since_start: limits and clocks count from the start of the process, whose only work this is, and not from now.

    Returns:
        The plan. Where none exists its solution has the status ``infeasible`` and names the
        binding constraint and the least change that helps.

    Raises:
        SpecError: the spec is malformed; every problem at once. Or its kind has no second way.
    """
    spent_before, held_bytes = (Spent(), 0) if since_start else (spent(), resident_bytes())
    document, folder = read_spec_file(spec, base)
    kind = kind_of(document)
    question = Question(
        document=_plain(kind, document),
        catalog=catalog,
        base=folder,
        seed=seed,
        top=top,
        budget=Budget(
            time_limit_s, memory_limit_bytes, held_bytes=held_bytes, elapsed_s=spent().wall_s - spent_before.wall_s
        ),
        on_progress=on_progress,
    )
    second_way = certifier(kind) if certify else None
    with question.budget.listening():
        made = cast("Plan", kind.offers("plan")(question))
        made = made if second_way is None else _certified(made, question, second_way)
    after = spent()
    clocks = {"wall_s": after.wall_s - spent_before.wall_s, "cpu_s": after.cpu_s - spent_before.cpu_s}
    return replace(made, solution={**made.solution, **clocks})


def _plain(kind: Kind, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document with numbers as numbers, however they are written."""
    model = kind.spec_model(document)
    return document if model is None else plain_numbers(model, document)


def _certified(made: Plan, question: Question, second_way: Callable[[Question, Plan], Certificate]) -> Plan:
    certificate = Certificate(method="none", covers="interrupted", checks=())
    with question.budget.keeping():
        certificate = second_way(question, made)
    return replace(made, certificate=certificate.to_document())


def estimate_plan(
    spec: Mapping[str, Any] | str | Path, catalog: Catalog, *, base: Path | None = None, beyond: bool = True
) -> Plan:
    """Price one fixed configuration: ``fixed`` pins the degrees, what it leaves out takes its plain default.

    The arguments are those of :func:`make_plan`, and ``beyond``: whether the answer also says what was not asked, such
    as a serving deployment under other loads. The predictions are the same without.

    Raises:
        SpecError: malformed, of a kind without configurations, or the pinned choices are not legal together.
    """
    document, folder = read_spec_file(spec, base)
    kind = kind_of(document)
    estimate = kind.offers("estimate")
    if estimate is None:
        known = ", ".join(one.name for one in KINDS.values() if one.offers("estimate"))
        message = f"{kind.name} has no single configuration to price; kinds that have: {known}"
        raise SpecError.at("kind", message)
    question = Question(document=_plain(kind, document), catalog=catalog, base=folder, beyond=beyond)
    return cast("Plan", estimate(question))


def check_files(
    spec: Mapping[str, Any] | str | Path, catalog: Catalog, *, base: Path | None = None, **options: Any
) -> None:
    """Stop where the plan of a spec would not become files, before it is searched for.

    Args:
        spec: as in :func:`make_plan`.
        catalog: how many devices a node has.
        base: as in :func:`make_plan`.
        options: fields of :class:`~meshplan.planner.emit.artifact.EmitOptions`.

    Raises:
        SpecError: the spec is malformed.
        EmitError: an option is missing, or the target does not do what the spec asks for.
    """
    document, _ = read_spec_file(spec, base)
    kind = kind_of(document)
    launcher = kind.launcher()
    if hasattr(launcher, "check"):
        launcher.check(_plain(kind, document), catalog, EmitOptions(**options))


def explain(plan: Plan) -> Explanation:
    """Why the plan is as it is: proof, runner-up, limits, what its numbers rest on; ``to_document()`` gives plain JSON.

    Raises:
        SpecError: no explanation is written for plans of this kind.
    """
    return cast("Explanation", offered(plan, "explain", "explanation")(plan))


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


def emit_elastic(plans: Sequence[Plan], target: str, catalog: Catalog, runbook: str, **options: Any) -> EmittedPlan:
    """Launcher files of one job on a changing number of nodes, in memory.

    Args:
        plans: one for each of neighbouring numbers of hosts, on all of their devices.
        target: emit target, which torchrun starts.
        catalog: as in :func:`emit_plan`.
        runbook: what an operator does when, as text.
        options: as in :func:`emit_plan`.

    Raises:
        EmitError: as :func:`emit_plan`; or one number of hosts alone (unless the target can go on without some of its
            replicas), or a target that brings its own launcher.
    """
    # emitters are imported where files are written: start-up time
    from meshplan.planner.launch.elastic import OnNodes, elastic_files, operators_page
    from meshplan.planner.launch.training import beside_agents

    found = [
        OnNodes(nodes=len({host for host, _ in plan.rank_table or ()}), plan=plan, emitted=emitted)
        for plan, emitted in ((plan, emit_plan(plan, target, catalog, **options)) for plan in plans)
    ]
    most = found[-1]
    groups, words = beside_agents(most.plan, target, catalog, EmitOptions(**options))
    if groups and len(found) == 1:
        return replace(most.emitted, artifacts=(operators_page(words), *groups))
    return replace(most.emitted, artifacts=(*elastic_files(found, runbook + words), *groups))


def write_files(emitted: EmittedPlan, folder: str | Path, *, force: bool = False) -> tuple[Path, ...]:
    """Write launcher files below a folder: all of them or none.

    Args:
        emitted: what :func:`emit_plan` made.
        folder: created when missing.
        force: replace files that exist.

    Raises:
        EmitError: a file exists and ``force`` is false, or the disk refuses. Nothing has changed then.
    """
    # start-up: most plans are read before files are written
    from meshplan.planner.emit.writer import write_artifacts

    return write_artifacts(emitted.artifacts, Path(folder), force=force)
