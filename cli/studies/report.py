"""A study as people read it: one line a point, the best ones marked, and what to do next, within 80 columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import TICK, metric_text, metric_title, percent
from meshplan.planner.core.text import counted
from meshplan.planner.sweep.table import best_metric, column_of, is_candidate, pareto_metrics, unknown_metrics

if TYPE_CHECKING:
    from meshplan.planner.sweep.study import Progress

ON_FRONT = "◆"
# Points that are shown to people; programs get all.
MOST_SHOWN = 60
_HEADINGS = {
    "tokens_per_s": "tok/s",
    "output_tokens_per_s_per_device": "tok/s/dev",
    "output_tokens_per_s": "out tok/s",
    "requests_per_s": "req/s",
    "usd_per_million_tokens": "$/Mtok",
    "usd_per_hour": "$/h",
    "usd_per_run": "$/run",
    "num_devices": "dev.",
}
# Values up to so many characters stay on one line.
_SHORT = 16


def sweep_report(document: Mapping[str, Any], rows: Sequence[Row], *, width: int = TABLE_WIDTH) -> str:
    """The table of a study and the lines below it.

    Args:
        document: of the study.
        rows: one a point (:func:`meshplan.planner.sweep.table.study_rows`).
        width: in characters.
    """
    metric, front = best_metric(document, rows), pareto_metrics(document)
    shown = _most_telling(rows)
    text = [_table(document, shown, metric, width)]
    if len(shown) < len(rows):
        text.append(f"{len(shown)} of {len(rows)} points; all of them: --format csv\n")
    lines = []
    if metric is not None and any(row["best"] for row in rows):
        each = f", for each {' and '.join(document['group_by'])}" if document["group_by"] else ""
        lines.append(f"{TICK} best {metric_title(metric)}{each}")
    if any(row["pareto"] for row in rows):
        lines.append(f"{ON_FRONT} no point is better in {' and '.join(metric_title(name) for name in front)}")
    if lines:
        text.append(paragraph("; ".join(lines) + ".", width))
    if metric is None and (known := _known(rows)):
        by = f" by the objective {document['objective']}" if document["objective"] else ""
        text.append(paragraph(f"No point is marked as best{by}: name a metric with best:, such as {known}.", width))
    for name in unknown_metrics(document, rows):
        text.append(
            paragraph(f"no answer has the metric {name!r}, which the sweep names; there are: {_known(rows)}", width)
        )
    problems: dict[str, list[str]] = {}
    for row in shown:
        if row["problem"]:
            problems.setdefault(str(row["problem"]), []).append(str(row["point"]))
    text += [
        paragraph(f"{counted(len(each), 'point')} ({', '.join(each)}): {why}", width) for why, each in problems.items()
    ]
    return "".join(text)


def progress_line_text(progress: Progress, where: str, elapsed_s: float) -> str:
    """One line: elapsed time, how many points are answered, how many are being answered."""
    parts = [f"{elapsed_s:.0f} s", f"{progress.finished} of {counted(progress.total, 'point')}"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    parts.append(f"{progress.running} running on {where}")
    if progress.elsewhere:
        parts.append(f"{progress.elsewhere} by another sweep")
    return " · ".join(parts)


def _most_telling(rows: Sequence[Row]) -> list[Row]:
    """All rows; of too many, the best, the front, what failed, and the first others, in their order."""
    if len(rows) <= MOST_SHOWN:
        return list(rows)
    ranked = sorted(rows, key=lambda row: (not row["best"], not row["pareto"], row["status"] != "failed", row["point"]))
    return sorted(ranked[:MOST_SHOWN], key=lambda row: row["point"])


def _table(document: Mapping[str, Any], rows: Sequence[Row], metric: str | None, width: int) -> str:
    """The table; where it is too wide, without the gap, then with values over several lines, then without the front's
    metrics: programs get all of it.
    """
    columns = _columns(document, rows, metric)
    fields, front = {column_of(name) for name in document["fields"]}, {*pareto_metrics(document)} - {metric}
    narrower = [column for column in columns if column.key != "gap"]
    broken = [replace(column, wrap=True) if column.key in fields else column for column in narrower]
    fewest = [column for column in broken if column.key not in front]
    text = ""
    for each in (columns, narrower, broken, fewest):
        text = rendered_rows(rows, each, Format.TABLE, width=width)
        if max(map(len, text.splitlines()), default=0) <= width:
            break
    return text


def _columns(document: Mapping[str, Any], rows: Sequence[Row], metric: str | None) -> list[Column]:
    fields = [column_of(name) for name in document["fields"]]
    columns = [Column(key="point", title="", right=True, wrap=False)]
    for name, title in _titles(fields).items():
        text = _value_of(name)
        is_short = max(len(cell) for cell in (title, *map(text, rows))) <= _SHORT
        columns.append(Column(key=name, title=title.replace("_", " "), derive=text, wrap=not is_short))
    columns.append(Column(key="status", title="answer", derive=_status, wrap=False))
    for name in dict.fromkeys([*([metric] if metric else []), *pareto_metrics(document)]):
        if any(isinstance(row.get(name), int | float) for row in rows):
            columns.append(Column(key=name, title=_heading(name), right=True, wrap=False, derive=_metric_of(name)))
    columns.append(Column(key="gap", title="gap", right=True, wrap=False, text=percent, optional=True))
    columns.append(Column(key="best", title="", wrap=False, derive=_marks))
    columns.append(Column(key="plan_id", title="plan", wrap=False, optional=True))
    return columns


def _titles(fields: Sequence[str]) -> dict[str, str]:
    """Field → its last part, or as much of its end as tells it from the others.

    >>> _titles(["model", "prefill.workers", "decode.workers"])
    {'model': 'model', 'prefill.workers': 'prefill.workers', 'decode.workers': 'decode.workers'}
    """
    lasts = [field.rpartition(".")[2] for field in fields]
    return {
        field: last if lasts.count(last) == 1 and not last.isdigit() else field
        for field, last in zip(fields, lasts, strict=True)
    }


def _heading(metric: str) -> str:
    if metric in _HEADINGS:
        return _HEADINGS[metric]
    name = metric.removesuffix("_s").replace("_", " ")
    return name.upper() if metric in ("mfu", "hfu") else name


def _value_of(field: str) -> Any:
    def text(row: Row) -> str:
        value = row.get(field)
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return text


def _metric_of(name: str) -> Any:
    def text(row: Row) -> str:
        value = row.get(name)
        return metric_text(name, value) if isinstance(value, int | float) else ""

    return text


def _status(row: Row) -> str:
    return "misses SLO" if row["keeps_slo"] is False else str(row["status"])


def _marks(row: Row) -> str:
    return f"{TICK if row['best'] else ''}{ON_FRONT if row['pareto'] else ''}" or " "


def _known(rows: Sequence[Row]) -> str:
    numbers = (name for row in rows if is_candidate(row) for name, value in row.items() if isinstance(value, float))
    return ", ".join(dict.fromkeys(numbers))
