"""The models that are no plain transformers beside those that are: errors with the model held out, by architecture.

    python tests/benchmarks/hybrids.py OBSERVATIONS --traces DIR [--only training|serving] [--keep FILE]

OBSERVATIONS is a folder of measured runs. A *plain* transformer has softmax attention, full or within a window, and
MLPs or experts in every layer. Every other layer kind makes a family of its own: recurrent layers by their kind,
sparse attention with an indexer, compressed attention. Latent attention was planned before these and is printed beside
them, in neither. Nothing but the architecture selects a row.

*Model held out.* Rows of one shape – whatever source, release, number format, device and name – are predicted by
constants that were solved for without all of them. A run with serving metrics from a source that no constant is fitted
to is judged likewise. Serving constants stay linearised where all rows led (by secants at the shipped ones), as in
every fold. Training sets are not adapted to a source's other runs: whoever brings a new model may have none.

*Readings.* Plain rows are those of the sources that ran other families; then every source by itself; rows whose source
does not suspect them to wait for the host; plain rows of the same servers (engine, device and how many) alone; plain
rows of all sources. *Models alike*: median of the models' medians, mean of their means.

The solutions take nine CPU-minutes; ``--keep`` keeps their errors in a file and reads them from there the next time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from serving_acceptance import fitted_sources

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.cli.observed import log, serving_runs, training_runs
from meshplan.planner.serving.measured.fit.parts import PARAMETERS
from meshplan.planner.serving.measured.fit.rows import NOISE, linearised
from meshplan.planner.serving.measured.fit.rows import Row as ServingRow
from meshplan.planner.serving.measured.fit.solution import solve
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import validated_run
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.training.measured.calibrate import LITERATURE
from meshplan.planner.training.measured.constants_fit import Row as TrainingRow
from meshplan.planner.training.measured.constants_fit import fit
from meshplan.planner.training.measured.constants_fit import linearised as linearised_steps
from meshplan.planner.training.measured.unseen import judged, sets_without
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.held_out import leave_one_out
from meshplan.planner.validation.machines import read_rows

PLAIN, LATENT = "plain", "latent attention"
JUDGED_ONLY = ("apex", "mlenergy")  # aggregated serving to which nothing is fitted
HOST_BOUND = "suspected host-bound"
# Metric → as it is printed. The gap between tokens stands for the time per token where a source prints that.
METRICS = {
    "tpot_s": "time per token",
    "itl_median_s": "time per token",
    "ttft_s": "first token",
    "output_tokens_per_s": "output tokens/s",
    "itl_p99_s": "gap, p99",
    "iteration_s": "step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The error of one metric of one run whose model was held out.

    Args:
        source: who published it.
        family: :data:`PLAIN`, or what its layers are.
        model: as its first row names the shape.
        server: what ran it: framework, device, and how many in serving.
        metric: as printed.
        error: predicted / measured − 1.
        waits: its source suspects that it waits for the host.
        id: of the row.
    """

    source: str
    family: str
    model: str
    server: str
    metric: str
    error: float
    waits: bool
    id: str


def main() -> None:
    """Print every reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("observations", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", choices=("training", "serving"))
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    items = kept_items(options.observations, options.traces, options.only, options.keep)
    for words, chosen in readings(items):
        print(f"\n{words}")
        for metric in dict.fromkeys(METRICS.values()):
            show([item for item in chosen if item.metric == metric], metric)


def kept_items(folder: Path, traces: Path, only: str | None, path: Path | None) -> list[Item]:
    """The errors, from the file if it is there; else of new solutions, which are then written to it."""
    if path is not None and path.exists():
        return [Item(**item) for item in json.loads(path.read_text())]
    catalog = Catalog.open("sqlite://")
    items = trained(folder, catalog) if only != "serving" else []
    items += served(folder, traces, catalog) if only != "training" else []
    if path is not None:
        path.write_text(json.dumps([asdict(item) for item in items]))
    return items


# --- architectures ----------------------------------------------------------------------------------------------------


def family(shape: ModelShape) -> str:
    """What a model has that a plain transformer has not."""
    blocks = shape.blocks
    if blocks is not None and blocks.recurrent is not None:
        return blocks.recurrent.kind
    if blocks is not None and blocks.indexer is not None:
        return "sparse attention"
    if any(form.compression > 1 for form, *_ in shape.attention_forms):
        return "compressed attention"
    return LATENT if shape.attention is AttentionKind.MULTI_HEAD_LATENT else PLAIN


def architecture(shape: ModelShape) -> ModelShape:
    """The shape without what names it, without the longest context and without layers that predict further tokens."""
    return replace(shape, slug="", name="", source="", max_sequence_length=None, num_nextn_predict_layers=0)


# --- errors with the model held out -----------------------------------------------------------------------------------


def trained(folder: Path, catalog: Catalog) -> list[Item]:
    """Steps of all training rows; rows that are not answered are named."""
    found = [row for name in fitted_sources("TRAINING") for row in read_rows(folder / f"training-{name}.jsonl")]
    runs = training_runs(found, catalog).runs
    name_unanswered(found, {run.id for run in runs}, catalog)
    rows = [TrainingRow(run) for run in runs if run.measured.get("iteration_s")]
    log(f"training: {len(rows)} runs")
    linear = linearised_steps(rows, fit(rows, LITERATURE))
    shapes, first = numbered([row.run.problem.shape for row in rows])
    number = {row.run.id: index for row, index in zip(rows, shapes, strict=True)}

    def label(row: TrainingRow) -> Hashable:
        return number[row.run.id]

    def item(row: TrainingRow, theta: Any) -> Item:
        shape, error = row.run.problem.shape, judged(row, theta).error
        return Item(
            source=row.source,
            family=family(shape),
            model=first[number[row.run.id]],
            server=f"{' on '.join(row.key)}",
            metric=METRICS["iteration_s"],
            error=error,
            waits=False,
            id=row.run.id,
        )

    without = sets_without(rows, linear, LITERATURE, label)
    return leave_one_out(rows, label, without, lambda row, sets: [item(row, sets.of(row)[0])])


def served(folder: Path, traces: Path, catalog: Catalog) -> list[Item]:
    """Latencies and rates of aggregated serving rows."""
    rows = {name: list(read_rows(folder / f"serving-{name}.jsonl")) for name in (*fitted_sources(), *JUDGED_ONLY)}
    suspected = {row["id"] for found in rows.values() for row in found if waits(row)}
    fitted = serving_runs([row for name in fitted_sources() for row in rows[name]], catalog, traces).runs
    alone = serving_runs([row for name in JUDGED_ONLY for row in rows[name]], catalog, traces).runs
    runs = [*fitted, *alone]
    shapes, first = numbered([run.run.shape for run in runs])
    number = {run.run.id: index for run, index in zip(runs, shapes, strict=True)}
    log(f"serving: {len(fitted)} runs that constants are fitted to, {len(alone)} others")
    of_fit = [row for row in (ServingRow(run, NOISE) for run in fitted) if row.metrics]
    shipped = {key: serving_calibration(catalog, *key) for key in {run.key for run in runs}}
    linear, owners = linearised(of_fit, lambda key: PARAMETERS.vector(shipped[key].constants), is_secant=True)
    prior = PARAMETERS.vector(ServingConstants())

    def label(run: PreparedRun) -> int:
        return number[run.run.id]

    def errors(run: PreparedRun, theta: Callable[[tuple[str, str]], Any]) -> Iterator[Item]:
        constants = PARAMETERS.replaced(ServingConstants(), theta(run.key))
        found = validated_run(run, replace(shipped[run.key], constants=constants, model_constants={}))
        for metric, words in METRICS.items():
            is_said_twice = metric == "itl_median_s" and "tpot_s" in run.run.measured
            if metric in run.run.measured and metric in found.error and not is_said_twice:
                yield Item(
                    source=run.run.group.partition("|")[0],
                    family=family(run.run.shape),
                    model=first[label(run)],
                    server=f"{' on '.join(run.key)}, {run.run.machine.device.slug} × {run.run.config.num_devices}",
                    metric=words,
                    error=found.error[metric],
                    waits=run.run.id in suspected,
                    id=run.run.id,
                )

    def without(left: int) -> Callable[[tuple[str, str]], Any]:
        log(f"without {first[left]}")
        return solve(linear, owners, prior, kept=lambda row: label(row.prepared) != left)

    return leave_one_out(runs, label, without, errors)


def numbered(shapes: Sequence[ModelShape]) -> tuple[list[int], list[str]]:
    """The number of each shape's architecture, and what its first row calls it."""
    kinds: dict[ModelShape, int] = {}
    names: list[str] = []
    numbers = []
    for shape in shapes:
        plain = architecture(shape)
        if plain not in kinds:
            kinds[plain] = len(names)
            names.append(shape.name)
        numbers.append(kinds[plain])
    return numbers, names


def waits(row: Mapping[str, Any]) -> bool:
    """Its source suspects that it waits for the host."""
    return any(HOST_BOUND in caveat for caveat in row.get("caveats", ()))


def name_unanswered(rows: Sequence[Mapping[str, Any]], answered: set[str], catalog: Catalog) -> None:
    """Print the rows that are refused, with the reason; excluded rows are predicted and not named."""
    for row in validate_rows([row for row in rows if row["id"] not in answered], catalog).rows:
        if row.status == "unsupported":
            print(f"not answered: {row.id}: {row.reason}")


# --- figures ----------------------------------------------------------------------------------------------------------


def readings(items: Sequence[Item]) -> Iterator[tuple[str, list[Item]]]:
    """What is compared, in words, and its items."""
    odd = [item for item in items if item.family not in (PLAIN, LATENT)]
    sources = sorted({item.source for item in odd})
    servers = {(item.source, item.server) for item in odd}
    beside = [item for item in items if item.source in sources]
    yield f"Plain rows of the same sources ({', '.join(sources)})", beside
    for source in sources:
        yield f"{source} alone", [item for item in items if item.source == source]
    if any(item.waits for item in beside):
        yield "Without rows that may wait for the host", [item for item in beside if not item.waits]
    on = [item for item in beside if (item.source, item.server) in servers]
    yield "On the same servers", on
    if any(item.waits for item in on):
        yield "On the same servers, without rows that may wait for the host", [item for item in on if not item.waits]
    yield "Plain rows of all sources", list(items)


def show(items: Sequence[Item], metric: str) -> None:
    """One line for each family, for all that are not plain, and for each of their models."""
    plain = [item for item in items if item.family == PLAIN]
    odd = [item for item in items if item.family not in (PLAIN, LATENT)]
    if not odd:
        return
    print(f"  {metric}")
    line("plain", plain, plain)
    line("not plain", odd, plain)
    for name in sorted({item.family for item in odd}):
        line(f"  {name}", [item for item in odd if item.family == name], plain)
    for name in sorted({item.model for item in odd}):
        line(f"    {name}", [item for item in odd if item.model == name], plain)
    line(LATENT, [item for item in items if item.family == LATENT], plain)


def line(words: str, items: Sequence[Item], plain: Sequence[Item]) -> None:
    """Count, models, median / mean (signed median), models alike, and the ratios to the plain ones of all four."""
    if not items:
        return
    own, ratios = figures(items), "none: no plain rows"
    if plain:
        ratios = " ".join(f"{one / two:5.2f}" for one, two in zip(own, figures(plain), strict=True))
    rows, models = len({item.id for item in items}), len({item.model for item in items})
    signed = np.median([item.error for item in items])
    print(
        f"    {words:<34} {rows:5d} rows {models:3d} models  {own[0]:6.1%} / {own[1]:6.1%} ({signed:+6.1%})  "
        f"models alike {own[2]:6.1%} / {own[3]:6.1%}  ratios {ratios}"
    )


def figures(items: Iterable[Item]) -> tuple[float, float, float, float]:
    """Median and mean over rows; median of the models' medians, mean of their means. Absolute errors."""
    by_model: dict[str, list[float]] = {}
    for item in items:
        by_model.setdefault(item.model, []).append(abs(item.error))
    each = [np.array(sizes) for sizes in by_model.values()]
    rows = np.concatenate(each)
    medians, means = [np.median(sizes) for sizes in each], [sizes.mean() for sizes in each]
    return float(np.median(rows)), float(rows.mean()), float(np.median(medians)), float(np.mean(means))


if __name__ == "__main__":
    main()
