"""The accuracy that serving plans are asked for, beside what is reached: one table from a folder of measured runs.

Usage: ``python tests/benchmarks/serving_acceptance.py OBSERVATIONS --traces DIR [--folds FILE] [--own-points]``. The
fit of all constants with everything held out takes about 10 CPU-minutes; ``--folds`` keeps its errors in a file and
reads them from there the next time. What needs other commands is named at the end. The figures asked for are fixed;
nothing here is fitted to them.

Sources that the constants are fitted to are the list ``FITTED_SERVING`` of the Makefile.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.observed import log, serving_runs
from meshplan.planner.serving.measured.calibrate import calibrate_serving
from meshplan.planner.serving.measured.own_points import predict_from_points
from meshplan.planner.serving.measured.power_fit import calibrate_power, measured_share, power_rows
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.held_out import HeldOut
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import ValidatedRow, rank_quality

ROOT = Path(__file__).parents[2]
JUDGED_ONLY = ("apex", "mlenergy", "mooncake-pd", "silicon-disaggregated")  # nothing is fitted to these
MOST_IN_FLIGHT = "up to 128 in flight"
POINTS_SAMPLE, POINTS_SEED = 90, 2
POWER = "power_w"
# Share of runs that a 90 % interval may hold by chance, 99 % of the time.
CHANCE_Z, WANTED = 2.576, 0.9

Line = tuple[str, str, str]  # what, asked, reached


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("observations", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--folds", type=Path)
    parser.add_argument("--own-points", action="store_true", help="adapt to one point of 90 curves, too (minutes)")
    options = parser.parse_args()
    catalog = Catalog.open("sqlite://")
    rows = {
        name: list(read_rows(options.observations / f"serving-{name}.jsonl"))
        for name in (*fitted_sources(), *JUDGED_ONLY)
    }
    fitted = [row for name in fitted_sources() for row in rows[name]]
    runs = serving_runs(fitted, catalog, options.traces).runs
    folds = kept_folds(runs, options.folds)
    result = validate_rows([row for found in rows.values() for row in found], catalog, traces=options.traces)
    watts = power_folds([row for found in rows.values() for row in found], catalog, options.traces)
    lines = [*held_out_lines(folds), *energy_lines(watts, result.rows), *shipped_lines(result.rows)]
    lines.append(("rows of the folder answered", ">= 98 %", percent(result.coverage)))
    releases = {row["id"]: row.get("framework", {}).get("version") for found in rows.values() for row in found}
    lines += order_lines(result.rows, releases)
    if options.own_points:
        lines += own_point_lines(runs, catalog)
    show(lines)
    show(coverage_lines(folds))
    print("\nexperts placed by recorded routing: python tests/benchmarks/serving_experts.py")
    print("speed: python tests/benchmarks/serving_simulation.py --million")


def fitted_sources(task: str = "SERVING") -> tuple[str, ...]:
    """The sources that constants are fitted to, by the Makefile; of ``TRAINING`` too."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(rf"^FITTED_{task} := (.*)$", makefile, re.MULTILINE)
    return tuple(found[1].split()) if found else ()


def kept_folds(runs: Sequence[PreparedRun], path: Path | None) -> Mapping[str, Sequence[HeldOut]]:
    """The errors on runs held out, from the file if it is there; else of a fit, which is then written to it."""
    if path is not None and path.exists():
        stored = json.loads(path.read_text())
        return {
            name: [HeldOut(**{**item, "key": tuple(item["key"])}) for item in items] for name, items in stored.items()
        }
    folds = calibrate_serving(runs, source="acceptance", log=log).folds
    if path is not None:
        path.write_text(json.dumps({name: [asdict(item) for item in items] for name, items in folds.items()}))
    return folds


def held_out_lines(folds: Mapping[str, Sequence[HeldOut]]) -> Iterator[Line]:
    """Aggregated runs, predicted by constants that have not seen their source, or their model on that device."""
    source, group = folds["source"], folds["group"]
    yield "time per token, source held out, median / mean", "<= 11 / 15 %", errors(source, "tpot_s")
    yield "time to first token, source held out", "<= 22 / 32 %", errors(source, "ttft_s")
    yield "time to first token, group held out", "<= 16 / 22 %", errors(group, "ttft_s")
    for metric, words, asked in (
        ("latency_p99_s", "end to end p99", "-"),
        ("ttft_s", "first token mean", "<= 18 %"),
        ("ttft_p99_s", "first token p99", "<= 30 %"),
    ):
        yield f"BLIS, source held out: {words}", asked, errors(source, metric, of="blis")
    yield "LLMServingSim's trace: time per token", "<= 6 %", errors(source, "tpot_s", of="llmservingsim")
    yield "LLMServingSim's trace: end to end p99", "<= 8 % (mean)", errors(source, "latency_p99_s", of="llmservingsim")


def power_folds(rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path) -> Sequence[HeldOut]:
    """Errors of watts, each by a curve that has not seen its model on that device."""
    measured = [run for run in serving_runs(rows, catalog, traces).runs if measured_share(run) is not None]
    found = power_rows(measured, lambda run: serving_calibration(catalog, *run.key).constants)
    return calibrate_power(found, source="acceptance").folds["group"]


def energy_lines(watts: Sequence[HeldOut], rows: Sequence[ValidatedRow]) -> Iterator[Line]:
    """ML.ENERGY: (model, device) held out of the curve of watts; no constant of an engine is fitted to these runs."""
    rate = {row.id: row.error["output_tokens_per_s"] for row in rows if "output_tokens_per_s" in row.error}
    power = [item for item in watts if item.metric == POWER and item.source == "mlenergy"]
    joules = [(1.0 + item.error) / (1.0 + rate[item.id]) - 1.0 for item in power if item.id in rate]
    served = [row for row in rows if row.status == "ok" and row.labels.get("source") == "mlenergy"]
    yield "ML.ENERGY: watts, (model, device) held out", "<= 6 %", errors(power, POWER)
    yield "... joules per token", "<= 10 %", spread(joules)
    yield "... output tokens/s", "<= 10 %", spread(of_rows(served, "output_tokens_per_s"))
    yield "... gap between tokens, median", "-", spread(of_rows(served, "itl_median_s"))
    yield "... gap between tokens, p99", "<= 20 %", spread(of_rows(served, "itl_p99_s"))


def shipped_lines(rows: Sequence[ValidatedRow]) -> Iterator[Line]:
    """Runs that nothing is fitted to, with the shipped constants."""
    judged = [row for row in rows if row.status == "ok"]
    apart = [row for row in judged if row.labels.get("load") == "disaggregated"]
    few = [row for row in apart if row.labels.get("disaggregated") == MOST_IN_FLIGHT]
    yield "disaggregated: time per token", "<= 10 / 12 %", spread(of_rows(apart, "tpot_s"))
    yield f"disaggregated: time to first token, {MOST_IN_FLIGHT}", "<= 15 %", spread(of_rows(few, "ttft_s"))
    signed = of_rows(few, "ttft_s")
    yield "... signed", "within 5 %", f"{100 * float(np.median(signed)):+.1f} %" if signed else "-"
    yield "blocks of KV cache, where a run prints them", "<= 3 %", spread(of_rows(judged, "kv_blocks"))


def order_lines(rows: Sequence[ValidatedRow], releases: Mapping[str, str | None]) -> Iterator[Line]:
    """Order of plans of one question, shipped constants: whatever release ran them, and of one release each.

    A spec names an engine, not a release (``engine: sglang``), and no prediction is told one within an entry of
    ``engines.yaml``: a pair over releases asks which of two programs is faster, a pair within one which of two plans.
    """
    judged = [row for row in rows if row.status == "ok"]
    apart = [replace(row, question=f"{row.question}, {releases.get(row.id)}") for row in judged]
    for words, found in (("", judged), (", each release its own question", apart)):
        order = rank_quality(found)
        if order is not None:
            reached = f"{percent(order.pair_order)} of {order.num_pairs}; {percent(order.mean_regret)}"
            asked = ">= 98; <= 0.5, <= 10 %"
            yield f"order of plans; regret mean, worst{words}", asked, f"{reached}, {percent(order.worst_regret)}"


def own_point_lines(runs: Sequence[PreparedRun], catalog: Catalog) -> Iterator[Line]:
    """What one measured point of a curve brings to its others."""
    silicon = [run for run in runs if run.run.group.startswith("silicon")]
    found = predict_from_points(
        silicon, lambda *key: serving_calibration(catalog, *key), seed=POINTS_SEED, sample=POINTS_SAMPLE
    )
    judged = [row for row in found.validation.rows if row.status == "ok"]
    for metric, asked in (("tpot_s", "<= 4 / 5.5 %"), ("ttft_s", "<= 9 / 16 %")):
        yield f"one own point: {metric}", asked, spread(of_rows(judged, metric))


def coverage_lines(folds: Mapping[str, Sequence[HeldOut]]) -> Iterator[Line]:
    """Share of measurements inside their 90 % interval with the source held out, and the band of chance by count."""
    families: Mapping[str, Callable[[HeldOut], bool]] = {
        "time to first token": lambda item: item.metric == "ttft_s",
        "time per token": lambda item: item.metric in ("tpot_s", "itl_median_s"),
        "latency of static batches": lambda item: item.metric == "latency_s",
        "output rate": lambda item: item.metric == "output_tokens_per_s",
    }
    for words, chosen in families.items():
        items = [item for item in folds["source"] if chosen(item)]
        yield f"inside 90 % interval, source held out: {words}, all", "85-95 %", inside(items)
        for key in sorted({item.key for item in items}):
            own = [item for item in items if item.key == key]
            half = CHANCE_Z * (WANTED * (1.0 - WANTED) / len(own)) ** 0.5
            band = f"{percent(max(WANTED - half, 0.0))} - {percent(min(WANTED + half, 1.0))}"
            yield f"... {words}, {' on '.join(key)}", band, inside(own)


# --- figures ----------------------------------------------------------------------------------------------------------


def errors(items: Iterable[HeldOut], metric: str, *, of: str = "") -> str:
    """Median / mean absolute error of a metric, of one source where named."""
    return spread([item.error for item in items if item.metric == metric and of in ("", item.source)])


def of_rows(rows: Iterable[ValidatedRow], metric: str) -> list[float]:
    """The errors of validated rows in a metric."""
    return [row.error[metric] for row in rows if metric in row.error]


def spread(found: Sequence[float]) -> str:
    """Median / mean of the absolute values, and how many."""
    sizes = np.abs(found)
    return f"{100 * np.median(sizes):.1f} / {100 * sizes.mean():.1f} % of {len(sizes)}" if len(sizes) else "-"


def inside(items: Sequence[HeldOut]) -> str:
    """Share inside, and how many from how many sources."""
    sources = len({item.source for item in items})
    return f"{percent(np.mean([bool(item.is_covered) for item in items]))} of {len(items)} ({sources} sources)"


def percent(share: float | np.floating) -> str:
    """One decimal.

    >>> percent(0.981)
    '98.1 %'
    """
    return f"{100 * float(share):.1f} %"


def show(lines: Iterable[Line]) -> None:
    """The lines in columns."""
    for what, asked, reached in lines:
        print(f"{what:<72}  {asked:<24}  {reached}")


if __name__ == "__main__":
    main()
