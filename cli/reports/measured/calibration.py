"""How a calibration looks: the error on held-out runs by set, and the constants as a seed file.

Of recorded runs (``calibrate --recorded``): how the intervals of their clusters have shrunk, and what was left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshplan.cli.render import Column, Format, show_document, show_rows
from meshplan.cli.reports.measured.validation import SIGNED
from meshplan.cli.reports.quantities import percent

if TYPE_CHECKING:
    from meshplan.planner.recorded import LeftOut, OwnSet
    from meshplan.planner.validation.held_out import Calibrated, HeldOut

STATISTICS = (
    Column(key="runs", title="runs", right=True),
    Column(key="median", title="median", right=True, text=percent),
    Column(key="mean", title="mean", right=True, text=percent),
    Column(key="p90", title="p90", right=True, text=percent),
    Column(key="signed", title="signed", right=True, text=SIGNED),
)
INSIDE = Column(
    key="inside", title="inside interval", right=True, text=lambda share: "" if share is None else percent(share)
)
TRAINING_ERRORS = (Column(key="set", title="Constants of"), *STATISTICS, INSIDE)
SERVING_ERRORS = (
    Column(key="set", title="Serving constants of"),
    Column(key="metric", title="Metric"),
    *STATISTICS,
    INSIDE,
)
MEMORY = (
    Column(key="set", title="Memory of"),
    Column(key="runs", title="runs", right=True),
    Column(key="typical_mape", title="typical, mean error", right=True, text=percent),
    Column(key="safe_mean", title="safe over measured, mean", right=True, text=percent),
    Column(key="safe_least", title="least", right=True, text=percent),
)
# What is left out together → words for it.
HELD_OUT = {
    "source": "whole source",
    "group": "model and device",
    "framework": "framework",
    "device": "device",
    "generation": "generation of devices",
    "kernels": "kind of kernels",
    "run": "each run",
    "layout": "each layout",
}
# At the top of an exported seed file.
HEADER = (
    "# {title} of the estimator, fitted per framework or engine and hardware generation: see\n"
    "# planner/{kind}/measured/calibrate.py.\n"
    "# Made by `meshplan calibrate OBSERVATIONS... --from-scratch --export FILE`; do not edit by hand.\n"
)
POWER_HEADER = (
    "# Power of serving devices by load, shares of the board's limit and picojoules a bit of memory: see\n"
    "# planner/serving/measured/power_fit.py.\n"
    "# Made by `meshplan calibrate OBSERVATIONS... --power --export FILE`; do not edit by hand.\n"
)


class Table(NamedTuple):
    """One table of errors; ``key`` is its name in documents."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSets:
    """Fitted sets of constants, ready to be stored and shown.

    Args:
        kind: of the runs.
        title: what the constants are called in messages.
        source: what they were fitted to.
        names: framework or engine of each set.
        documents: the sets as the catalog stores them.
        tables: errors on held-out runs; all but the first are shown only where they have rows.
    """

    kind: str
    title: str
    source: str
    names: Sequence[str]
    documents: Sequence[dict[str, Any]]
    tables: Sequence[Table]

    def show(self, form: Format) -> None:
        """Print the errors; documents have the constants, too."""
        if form in (Format.JSON, Format.YAML):
            tables = {table.key: table.rows for table in self.tables}
            show_document({**tables, "calibrations": self.documents}, form)
            return
        for number, table in enumerate(self.tables):
            if table.rows or number == 0:
                show_rows(table.rows, table.columns, form, title=table.title)

    def export(self, path: Path, *, force: bool) -> None:
        """Write the constants as a seed file of the catalog, those of serving to serving_FILE, of power to power_FILE.

        Raises:
            EmitError: the file cannot be written.
        """
        path = path if self.kind == "training" else path.with_name(f"{self.kind}_{path.name}")
        common = ("source", "date")
        rows = [{key: value for key, value in item.items() if key not in common} for item in self.documents]
        content = {"source": self.source, "date": self.documents[0]["date"], "calibrations": rows}
        from meshplan.catalogs.untrusted.quoting import yaml_text  # start-up: only --export writes YAML
        from meshplan.catalogs.writing import write_file  # start-up: as above

        header = POWER_HEADER if self.kind == "power" else HEADER.format(title=self.title.capitalize(), kind=self.kind)
        write_file(path, header + yaml_text(content, width=110), force=force)


def training_sets(result: Calibrated[Any], source: str) -> FittedSets:
    """Sets of training constants; the recipe, which the framework's documentation decides, is not stored."""
    documents = [item.to_document() for item in result.calibrations]
    return FittedSets(
        kind="training",
        title="constants",
        source=source,
        names=[item.framework for item in result.calibrations],
        documents=[{key: value for key, value in document.items() if key != "recipe"} for document in documents],
        tables=(
            Table("held_out", "|error| of the step time on held-out runs", TRAINING_ERRORS, _training_errors(result)),
            Table("memory", "\nPeak memory on held-out runs", MEMORY, _memory_errors(result)),
        ),
    )


def serving_sets(result: Calibrated[Any], source: str) -> FittedSets:
    """Sets of serving constants, with a table for everything that was left out in turn."""
    return FittedSets(
        kind="serving",
        title="serving constants",
        source=source,
        names=[item.engine for item in result.calibrations],
        documents=[item.to_document() for item in result.calibrations],
        tables=tuple(
            Table(
                name,
                f"{'' if number == 0 else chr(10)}|error| on serving runs, {HELD_OUT[name]} held out",
                SERVING_ERRORS,
                _serving_errors(items, headline=number == 0),
            )
            for number, (name, items) in enumerate(result.folds.items())
        ),
    )


def power_sets(result: Calibrated[Any], source: str) -> FittedSets:
    """The constants of the power curve, with a table for everything that was left out in turn."""
    serving = serving_sets(replace(result, calibrations=()), source)
    return replace(
        serving,
        kind="power",
        title="constants of the power curve",
        names=["power"] * len(result.calibrations),
        documents=[item.to_document() for item in result.calibrations],
    )


def _statistics(items: Iterable[HeldOut]) -> dict[str, Any]:
    import numpy as np

    members = list(items)
    errors = np.array([item.error for item in members])
    size = np.abs(errors)
    return {
        "runs": len(errors),
        "median": float(np.median(size)),
        "mean": float(np.mean(size)),
        "p90": float(np.quantile(size, 0.9)),
        "signed": float(np.median(errors)),
        "inside": _inside(members),
    }


def _by(items: Iterable[HeldOut], name: Callable[[HeldOut], str]) -> list[dict[str, Any]]:
    groups: dict[str, list[HeldOut]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return [{"set": group, **_statistics(members)} for group, members in sorted(groups.items())]


def _set_name(item: HeldOut) -> str:
    return f"{item.key[0]} on {item.key[1]}"


def _training_errors(result: Calibrated[Any]) -> list[dict[str, Any]]:
    """Over all runs by what was left out; for the headline also by basis, by kind of run, by source and by set."""
    rows = [
        {"set": f"all, {HELD_OUT[name]} held out", **_statistics(items)}
        for name, items in result.folds.items()
        if items
    ]
    items = result.held_out
    for label in (lambda item: f"basis {item.evidence}", _strategy, lambda item: f"source {item.source}", _set_name):
        rows += _by(items, label)
    return rows


def _strategy(item: HeldOut) -> str:
    return item.strategy


def _serving_errors(held_out: Iterable[HeldOut], *, headline: bool) -> list[dict[str, Any]]:
    """Over all runs, and for the headline by source, group and set of constants; one row per metric."""
    sets: dict[tuple[str, str], list[HeldOut]] = {}
    for item in held_out:
        source, _, model = item.group.partition("|")
        names = ["all"]
        if headline:
            names += [f"source {source}", f"source {source}: {model.replace('|', ', ')}", _set_name(item)]
        for name in names:
            sets.setdefault((name, item.metric), []).append(item)
    order = {"all": 0, "source": 1}
    keys = sorted(sets, key=lambda key: (order.get(key[0].split(" ", maxsplit=1)[0], 2), key))
    return [{"set": name, "metric": metric, **_statistics(sets[name, metric])} for name, metric in keys]


def _inside(items: Sequence[HeldOut]) -> float | None:
    """Share of measurements inside their interval; None where that is not judged."""
    judged = [item.is_covered for item in items if item.is_covered is not None]
    return sum(judged) / len(judged) if judged else None


def _memory_errors(result: Calibrated[Any]) -> list[dict[str, Any]]:
    import numpy as np

    return [
        {
            "set": name,
            "runs": len(fit.typical_error),
            "typical_mape": float(np.mean(np.abs(list(fit.typical_error.values())))),
            "safe_mean": float(np.mean(list(fit.safe_error.values()))),
            "safe_least": float(min(fit.safe_error.values())),
        }
        for name, fit in sorted(result.memory.items())
        if fit.typical_error
    ]


# --- recorded runs --------------------------------------------------------------------------------------------------


def _half_width(width: float | None) -> str:
    return "" if width is None else f"±{percent(width)}"


OWN_SETS = (
    Column(key="set", title="Constants of", wrap=False),
    Column(key="of", title="plans of"),
    Column(key="runs", title="own runs", right=True),
    Column(key="before", title="interval before", right=True, text=_half_width),
    Column(key="after", title="with own runs", right=True, text=_half_width),
)
LEFT_OUT = (Column(key="plan_id", title="Left out", wrap=False), Column(key="reason", title="because"))
UNDONE = (Column(key="set", title="Taken away", wrap=False),)


def show_own_sets(made: Sequence[OwnSet], left_out: Sequence[LeftOut], form: Format) -> None:
    """Print the sets and what no constant was adapted to."""
    widths = [row for own in made for row in _widths(own)]
    left = [{"plan_id": item.plan_id, "recording": item.number, "reason": item.reason} for item in left_out]
    unused = sorted({(run.recording.plan_id, name) for own in made for run in own.runs for name in run.unused})
    if form in (Format.JSON, Format.YAML):
        calibrations = [own.calibration.to_document() for own in made]
        more = [{"plan_id": plan_id, "metric": metric} for plan_id, metric in unused]
        show_document({"intervals": widths, "left_out": left, "unused": more, "calibrations": calibrations}, form)
        return
    show_rows(widths, OWN_SETS, form, title="Constants of clusters, adapted to recorded runs")
    if left:
        show_rows(left, LEFT_OUT, form, title="")
    if unused:
        counts = Counter(metric for _, metric in unused)
        rows = [{"metric": metric, "plans": count} for metric, count in counts.most_common()]
        columns = (Column(key="metric", title="Not used"), Column(key="plans", title="plans", right=True))
        show_rows(rows, columns, form, title="")


def show_undone(removed: Iterable[str], form: Format) -> None:
    """Print the sets that were taken away; the recordings are still there."""
    show_rows([{"set": subject} for subject in removed], UNDONE, form, title="")


def _widths(own: OwnSet) -> Iterator[dict[str, Any]]:
    """Before and after, by what intervals of the kind depend on."""
    before, after = own.calibration.start_error_p90, own.calibration.error_p90
    if own.kind == "serving":  # widths in the logarithm
        for metric, width in after.items():
            yield _row(own, metric, len(own.runs), math.expm1(before[metric]), math.expm1(width))
        return
    models, ways = own.calibration.model_error_p90, own.calibration.way_error_p90
    for kind, by_model in models.items():
        for model, width in by_model.items():
            count = sum(run.run.problem.shape.slug == model for run in own.runs)
            alike = min(ways.get(kind, {}).get(model, {}).values(), default=width)
            yield _row(own, model, count, before[kind], alike)
            if alike < width:  # plans with other parallelism, ZeRO, recompute, formats
                yield _row(own, f"{model}, unlike what ran", 0, before[kind], width)
        yield _row(own, f"other models, {kind}", 0, before[kind], after[kind])
    if not models:
        yield {"set": own.subject, "of": "any model: memory alone", "runs": len(own.runs)}


def _row(own: OwnSet, of: str, runs: int, before: float, after: float) -> dict[str, Any]:
    return {"set": own.subject, "of": of, "runs": runs, "before": before, "after": after}
