"""A study as rows: the varied fields of each point beside the headline of its answer, and which points are best.

*Best*: of the points with a plan that keeps its SLO, the one whose metric is best, or all that are equally good; for
each combination of the ``group_by`` fields. *Pareto front*: the points that no other one equals or betters in every
metric and betters in one.
A metric is better when it is larger if it is a rate, a utilization or the share of a run that trains, and when it is
smaller otherwise (times, dollars, watts, joules, bytes, devices).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshplan.catalogs.database.studies.points import Point, PointState

# Objective of a spec → metric by which points of several specs are compared.
OF_OBJECTIVE = {
    "throughput": "tokens_per_s",
    "usd_per_run": "usd_per_run",
    "throughput_per_device": "output_tokens_per_s_per_device",
    "usd_per_million_tokens": "usd_per_million_tokens",
    "max_request_rate": "requests_per_s",
    "num_devices": "num_devices",
    "latency": "latency_s",
    "usd_per_item": "usd_per_item",
    "cost": "usd_per_hour",
}
# Kind without objectives → what its plans have least of.
OF_KIND = {"edge": "time_per_token_s"}
OF_ENERGY = {"training": "energy_j_per_step", "serving": "energy_j_per_token", "diffusion": "energy_per_item_j"}
# Kind → metrics of its Pareto front: what is got for what it takes.
PARETO = {
    "training": ("tokens_per_s", "num_devices"),
    "serving": ("output_tokens_per_s_per_device", "tpot_mean_s"),
    "diffusion": ("energy_per_item_j", "latency_s"),
}
_LARGER_IS_BETTER = ("mfu", "hfu", "effective_training_time_ratio")
# Columns of a row that no varied field may hide.
RESERVED = ("point", "status", "keeps_slo", "gap", "plan_id", "best", "pareto", "problem", "num_devices", "cpu_s")

Row = dict[str, Any]


def larger_is_better(metric: str) -> bool:
    """Whether more of a metric is better.

    >>> larger_is_better("tokens_per_s_per_device"), larger_is_better("mfu"), larger_is_better("energy_j_per_step")
    (True, True, False)
    """
    return metric in _LARGER_IS_BETTER or "_per_s_" in f"{metric}_"


def study_rows(study: Mapping[str, Any], points: Mapping[str, Point]) -> list[Row]:
    """One row a point, in the order of the sweep.

    Args:
        study: its document, as :mod:`meshplan.planner.sweep.study` stores it.
        points: digest → point, as far as there are any.
    """
    rows = []
    for number, asked in enumerate(study["points"], start=1):
        found = points.get(asked["digest"])
        values = {column_of(name): value for name, value in asked["values"].items()}
        rows.append({"point": number, **values, **_answer_cells(found)})
    better = best_metric(study, rows)
    _mark_best(rows, better, [column_of(name) for name in study["group_by"]])
    _mark_pareto(rows, pareto_metrics(study))
    return rows


def column_of(field: str) -> str:
    """The column of a varied field."""
    return f"spec.{field}" if field in RESERVED else field


def _answer_cells(found: Point | None) -> Row:
    state = PointState.WAITING if found is None else found.state
    cells: Row = {"status": state.value, "keeps_slo": None, "best": False, "pareto": False}
    if found is None or found.answer is None:
        problem = None if found is None else found.problem
        return {**cells, "problem": None if problem is None else f"{problem['title']}: {problem['detail']}"}
    answer = found.answer
    cells |= {"status": answer["status"], "keeps_slo": answer.get("kept"), "problem": answer.get("binding_constraint")}
    cells |= {name: answer[name] for name in ("gap", "num_devices", "cpu_s", "certificate") if name in answer}
    return {**cells, "plan_id": found.plan_id, **answer["predicted"]}


def is_candidate(row: Mapping[str, Any]) -> bool:
    """A point with a plan that keeps what was asked of it."""
    return row["status"] in ("optimal", "feasible") and row["keeps_slo"] is not False


def best_metric(study: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The metric that decides: the sweep's own, or that of the spec's objective; None for kinds without metrics."""
    if study["best"] is not None:
        return str(study["best"])
    kind, objective = study["kind"], study["objective"]
    metric = OF_ENERGY.get(kind) if objective == "energy" else OF_OBJECTIVE.get(objective, OF_KIND.get(kind))
    return metric if any(metric in row for row in rows) else None


def pareto_metrics(study: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics of the front: the sweep's own, or those of the kind."""
    return tuple(study["pareto"] or PARETO.get(study["kind"], ()))


def unknown_metrics(study: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics that the sweep names and no answer has, once there are answers."""
    named = [*([study["best"]] if study["best"] else []), *(study["pareto"] or [])]
    answered = [row for row in rows if is_candidate(row)]
    return [name for name in named if answered and not any(_is_number(row.get(name)) for row in answered)]


def _mark_best(rows: list[Row], metric: str | None, groups: Sequence[str]) -> None:
    best: dict[str, list[Row]] = {}
    for row in rows:
        if metric is None or not is_candidate(row) or not _is_number(row.get(metric)):
            continue
        group = json.dumps([row.get(name) for name in groups], sort_keys=True, default=str)
        lead = best.get(group)
        if lead is None or _cost(row, metric) < _cost(lead[0], metric):
            best[group] = [row]
        elif _cost(row, metric) == _cost(lead[0], metric):
            lead.append(row)
    for row in itertools.chain(*best.values()):
        row["best"] = True


def _mark_pareto(rows: list[Row], metrics: Sequence[str]) -> None:
    """Marks the front: in the order of the first metric, and then by dominance among what was kept."""
    able = [row for row in rows if is_candidate(row) and all(_is_number(row.get(name)) for name in metrics)]
    costs = [tuple(_cost(row, name) for name in metrics) for row in able]
    front: list[tuple[float, ...]] = []
    for place in sorted(range(len(able)), key=lambda place: costs[place]) if metrics else ():
        mine = costs[place]
        # What dominates comes first in this order; equals stand side by side.
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in front):
            front.append(mine)
            able[place]["pareto"] = True


def _cost(row: Row, metric: str) -> float:
    value = float(row[metric])
    return -value if larger_is_better(metric) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
