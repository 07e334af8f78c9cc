"""What each predicted number rests on, as a badge and the words behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.constants.power import power_calibration
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

MEASURED, CALIBRATED, DATASHEET, ASSUMED, LISTED, GIVEN, EXACT = (
    "measured",
    "calibrated",
    "datasheet",
    "assumed",
    "price list",
    "given",
    "exact",
)
# The catalog's levels in one word each.
LEVELS = {
    EvidenceLevel.MEASURED.value: MEASURED,
    EvidenceLevel.IMPORTED.value: MEASURED,
    EvidenceLevel.FITTED.value: CALIBRATED,
    EvidenceLevel.DATASHEET.value: DATASHEET,
    EvidenceLevel.ASSUMED.value: ASSUMED,
}
_ENERGY = ("power_w", "energy_j_per_token")
_LOAD = ("requests_per_s", "output_tokens_per_s", "output_tokens_per_s_per_device")

Badge = dict[str, str]


def level_of(evidence: str) -> str:
    """The badge of a level of evidence; what is no level of the catalog stands as it is."""
    return LEVELS.get(evidence, evidence)


def badge(level: str, words: str = "", source: str = "") -> Badge:
    """A badge: the level in a word, a sentence, and where to look."""
    return {"level": level, "words": words, "source": source}


def badge_of(plan: Plan, metric: str) -> Badge:
    """What a metric of a plan rests on."""
    if metric.startswith("usd_per_hour"):
        return _price(plan)
    if plan.kind == "training":
        return _of_training(plan, metric)
    if plan.kind == "serving":
        return _of_serving(plan, metric)
    if plan.kind == "diffusion":
        return _of_diffusion(plan, metric)
    if plan.kind == "edge":
        words = "Rates of machines and the cost of messages solved from published times; see the notes of the plan."
        return badge(CALIBRATED, words, "planner/edge/README.md")
    return badge(EXACT, "The objective of the answer, computed from the instance.")


def badge_of_part(plan: Plan, part: str, evidence: str) -> Badge:
    """What a part of the time rests on: the fit's runs, or the data sheets of devices and links."""
    level = level_of(evidence)
    if level == CALIBRATED:
        shown = badge_of(plan, "iteration_s" if plan.kind == "training" else "tpot_mean_s")
        return shown if shown["level"] == CALIBRATED else badge(level, evidence)
    what = "link" if "communication" in part or "messages" in part or "exchange" in part else "device"
    return badge(level, f"{evidence} of the {what}s".capitalize(), _sources(plan, what))


def _price(plan: Plan) -> Badge:
    if plan.spec.get("cluster", {}).get("usd_per_hour_per_node") is not None:
        return badge(GIVEN, "The price that the question gives.")
    cited = {what: source for what, source in plan.provenance.get("sources", {}).items() if what.startswith("price")}
    return badge(LISTED, "; ".join(cited), "; ".join(map(str, cited.values())))


def _of_diffusion(plan: Plan, metric: str) -> Badge:
    """Cost per item is a price times a predicted time: it rests on the constants, as the others do."""
    sources = plan.provenance.get("sources", {})
    cited = {what: source for what, source in sources.items() if what.startswith("constants")}
    also = "The price is of the price list." if metric.startswith("usd") else ""
    words = f"Constants fitted to measured runs: {'; '.join(cited)}. {also}".strip()
    return badge(CALIBRATED if cited else ASSUMED, words if cited else also, "; ".join(map(str, cited.values())))


def _of_training(plan: Plan, metric: str) -> Badge:
    known = plan.provenance.get("calibration") or {}
    if metric.endswith("_bytes"):
        return badge(
            CALIBRATED if known.get("memory_basis") else ASSUMED,
            f"Measured peaks: {known['memory_basis']}." if known.get("memory_basis") else "No measured peak is known.",
            str(known.get("source", "")),
        )
    if metric == "energy_j_per_step":
        words = "Average power by how busy matrix units and memory are, fitted to serving runs, for the time of a step."
        return badge(CALIBRATED, words, power_calibration().source)
    if known.get("num_runs"):
        words = (
            f"Constants fitted to {counted(known['num_runs'], 'published run')} "
            f"({known['framework']}, {known['architecture']}); the interval holds 90 % of runs left out of the fit."
        )
        return badge(CALIBRATED, words, str(known.get("source", "")))
    return badge(
        _weakest(plan.provenance.get("share_of_time_by_evidence", {})), "No measured run of this kind is known."
    )


def _of_serving(plan: Plan, metric: str) -> Badge:
    workload = plan.spec.get("workload", {})
    if metric in _LOAD and workload.get("request_rate_per_s") is not None:
        return badge(GIVEN, "The rate is what clients send, as the question says.")
    if metric in _ENERGY:
        power = plan.provenance.get("power") or {}
        runs = power.get("num_runs", 0)
        words = f"Fitted to {counted(runs, 'published run')} with measured power."
        return badge(CALIBRATED if runs else ASSUMED, words if runs else "", str(power.get("source", "")))
    if metric == "usd_per_million_tokens":
        price = _price(plan)
        return badge(price["level"], f"{price['words']}, over the tokens of an hour", price["source"])
    used = {pool["node_type"] for pool in plan.config.get("pools", ())}
    fits = [fit for name, fit in plan.provenance.get("calibration", {}).items() if name in used]
    runs = sum(fit.get("num_runs", 0) for fit in fits)
    if runs:
        what = ", ".join(dict.fromkeys(f"{fit['engine']}, {fit['architecture']}" for fit in fits))
        words = f"Constants fitted to {counted(runs, 'published run')} ({what})."
        return badge(CALIBRATED, words, "; ".join(dict.fromkeys(str(fit.get("source", "")) for fit in fits)))
    return badge(ASSUMED, "No constants are fitted for this engine on these devices.")


def _weakest(shares: Mapping[str, Any]) -> str:
    """The weakest level that any of the time rests on."""
    order = [level.value for level in EvidenceLevel]
    found = [name for name in order if shares.get(name)]
    return LEVELS[found[-1]] if found else ASSUMED


def _sources(plan: Plan, what: str) -> str:
    sources = plan.provenance.get("sources", {})
    return "; ".join(str(source) for name, source in sources.items() if str(name).startswith(what))
