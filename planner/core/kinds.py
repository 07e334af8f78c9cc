"""The registry of kinds: what a spec may ask, and which modules answer, launch and show it.

A kind is one entry here and its own folder. Its *service* module has ``plan(question)``; further functions are
optional, and a kind without one says so in an error that names those that have it:

============================  ========================================================================================
``estimate(question)``        prices the one configuration that the spec pins
``explain(plan)``             why the plan is as it is; has ``to_document()``
``instead(plan, …)``          the best plan with other choices pinned
``certify(question, plan)``   answers the question again by a second, independent way; returns a
                              :class:`~meshplan.planner.core.certificate.Certificate`
``written_out(spec)``         the spec with its defaults, for comparisons
``replan(question, plan, …)``  the best plan without some nodes, and what it takes to get there
``predict(plan, workload, …)``  metric → interval of the plan's own configuration with other keys of the workload,
                              in the time that somebody waits who moves a slider
``power_budget(plan, budget, …)``  document: how many copies of a plan a
                              :class:`~meshplan.planner.serving.power.budget.PowerBudget` holds
``timeline``, ``mapping_view``, ``pareto_page``   pictures
``row_validator(…)``          of (all measured rows, catalog, folder of traces or None): the function that predicts
                              one row whose ``task`` is this kind; returns a ``ValidatedRow`` or raises
                              ``UnsupportedError``
``recorded_run(plan, …)``     of (plan, :class:`~meshplan.planner.validation.recorded.Recording`, catalog): what was
                              recorded of a plan as a run that constants are adapted to, or ``UnsupportedError``
``refine_recorded(runs, …)``  the constants of one cluster, adapted to all of its recorded runs
``SPEC``                      the pydantic model of the spec, for its JSON Schema
``check(document)``, ``SCHEMA``  of a kind whose questions are, or may be, instances with their numbers in them: reads
                              one or raises, and its JSON Schema
``is_instance(document)``     of a kind with both ``SPEC`` and instances: whether a document is an instance
============================  ========================================================================================

Its *launch* module (optional) has ``target(plan)``, ``files(plan, target, catalog, options)`` and, where more than the
plan decides whether there will be files, ``check(spec, catalog, options)``; its *report* module is the command line's
view of its plans (``meshplan.cli.reports.plan.Report``), its *summary* module (optional) has
``first_screen(plan, width=…)`` and ``ticket(plan)`` for plans whose report is longer than a screen. Modules are named,
not imported: ``--help`` must not pay for a solver.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError, closest_names, did_you_mean
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.reading.doors import SPEC, refuse_other

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.core.solution import OnProgress

DEFAULT_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A spec and what it is answered with.

    Args:
        document: the spec as plain data, with its ``kind``.
        catalog: what hardware, models and prices exist.
        base: folder against which paths in the spec are resolved.
        seed: where pseudo-random choices start from.
        top: candidates to keep in the plan's table.
        budget: time and memory for the whole answer; when they are spent, the best so far is returned with its gap.
        on_progress: called with incumbent and bound now and then.
        beyond: whether the answer also says what was not asked: other loads, other shapes.
    """

    document: Mapping[str, Any]
    catalog: Catalog
    base: Path = Path()
    seed: int = 0
    top: int = DEFAULT_TOP
    budget: Budget = field(default_factory=Budget)
    on_progress: OnProgress | None = None
    beyond: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of question.

    Args:
        name: as in ``kind:`` of a spec.
        service: module that answers it, see the table above.
        measured: modules with functions of the table that only measured runs ask for: start-up time.
        launch: module that makes launcher files of its plans; empty where nothing can be launched.
        document: module with ``PLAN``, the model of its plans as they may come from anybody.
        report: module of the command line that shows its plans.
        summary: module of the command line that sums them up; empty where the whole report is short.
    """

    name: str
    service: str
    measured: tuple[str, ...] = ()
    launch: str = ""
    document: str = "meshplan.planner.core.plan_document"
    report: str = "meshplan.cli.reports.stand_alone"
    summary: str = ""

    def offers(self, name: str) -> Any:
        """The service's function or class of that name; None where the kind has none."""
        for module in (self.service, *self.measured):
            if (found := getattr(importlib.import_module(module), name, None)) is not None:
                return found
        return None

    def spec_model(self, document: Mapping[str, Any]) -> Any:
        """The pydantic model that a question is held against; None for an instance, which ``check`` reads."""
        is_instance = self.offers("is_instance")
        return None if is_instance is not None and is_instance(document) else self.offers("SPEC")

    def plan_model(self) -> Any:
        """The pydantic model that a plan of this kind is held against when it is read."""
        return importlib.import_module(self.document).PLAN

    def launcher(self) -> Any:
        """The launch module; None where nothing can be launched."""
        return importlib.import_module(self.launch) if self.launch else None


_PLANNER = "meshplan.planner"
_REPORTS = "meshplan.cli.reports"
_KINDS = (
    Kind(
        name="training",
        service=f"{_PLANNER}.training.service",
        measured=(f"{_PLANNER}.training.measured.validate", f"{_PLANNER}.training.measured.recorded"),
        launch=f"{_PLANNER}.launch.training",
        document=f"{_PLANNER}.training.plan_document",
        report=f"{_REPORTS}.training.plan",
        summary=f"{_REPORTS}.screens.first_screen",
    ),
    Kind(
        name="serving",
        service=f"{_PLANNER}.serving.service",
        measured=(f"{_PLANNER}.serving.measured.validate", f"{_PLANNER}.serving.measured.recorded"),
        launch=f"{_PLANNER}.launch.serving",
        document=f"{_PLANNER}.serving.plan_document",
        report=f"{_REPORTS}.serving.plan",
        summary=f"{_REPORTS}.screens.first_screen",
    ),
    Kind(name="rank-mapping", service=f"{_PLANNER}.rank_mapping.service"),
    Kind(name="expert-placement", service=f"{_PLANNER}.expert_placement.service"),
    Kind(
        name="gpu-allocation",
        service=f"{_PLANNER}.gpu_allocation.service",
        launch=f"{_PLANNER}.launch.gpu_allocation",
        document=f"{_PLANNER}.gpu_allocation.plan_document",
        report=f"{_REPORTS}.gpu_allocation",
    ),
    Kind(
        name="diffusion",
        service=f"{_PLANNER}.diffusion.service",
        launch=f"{_PLANNER}.launch.diffusion",
        document=f"{_PLANNER}.diffusion.plan_document",
        report=f"{_REPORTS}.diffusion",
    ),
    Kind(
        name="edge",
        service=f"{_PLANNER}.edge.service",
        launch=f"{_PLANNER}.launch.edge",
        document=f"{_PLANNER}.edge.plan_document",
        report=f"{_REPORTS}.edge",
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


def kind_of(document: Mapping[str, Any]) -> Kind:
    """The kind that a spec names.

    Raises:
        SpecError: it names none, or an unknown one; or the document is a plan, say, and no spec.
    """
    refuse_other(document, SPEC, name="FILE")
    name = document.get("kind")
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    if name is None:
        raise SpecError.at("kind", f"is required: one of {', '.join(KINDS)}")
    hint = did_you_mean(closest_names(str(name), KINDS))
    raise SpecError.at("kind", f"must be one of {', '.join(KINDS)}, not {name!r}{hint}")


def certifier(kind: Kind) -> Any:
    """The kind's ``certify(question, plan)``.

    Raises:
        SpecError: its answers cannot be checked a second time.
    """
    function = kind.offers("certify")
    if function is None:
        known = ", ".join(one.name for one in KINDS.values() if one.offers("certify")) or "none"
        message = f"answers of {kind.name} cannot be checked a second time (--certify); kinds that can: {known}"
        raise SpecError.at("kind", message)
    return function


def offered(plan: Plan, ability: str, what: str) -> Any:
    """The function of the plan's kind that makes ``what`` of a plan with an answer.

    Raises:
        SpecError: the kind has no such thing, or the plan has no answer.
    """
    function = KINDS[plan.kind].offers(ability) if plan.kind in KINDS else None
    if function is not None and (plan.config or plan.answer):
        return function
    message = f"plan {plan.plan_id} ({plan.kind}, {plan.solution['status']}) has no {what}"
    if function is None:
        message += f"; plans of {' and '.join(name for name, kind in KINDS.items() if kind.offers(ability))} have"
    raise SpecError.at("", message, of="the question")
