"""Objectives as scores to minimise."""

from __future__ import annotations

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.serving.problem.problem import ServingObjective

MILLION = 1e6
INFINITE = float("inf")
# What a score counts, for people who wait.
UNITS = {
    ServingObjective.THROUGHPUT_PER_DEVICE: "device-seconds a token",
    ServingObjective.USD_PER_MILLION_TOKENS: "USD a million tokens",
    ServingObjective.NUM_DEVICES: "devices",
    ServingObjective.MAX_REQUEST_RATE: "s a request",
    ServingObjective.ENERGY: "J a token",
}


def score_at(
    objective: ServingObjective,
    *,
    num_devices: float,
    usd_per_hour: float | None,
    power_w: float | None,
    request_rate_per_s: float,
    tokens_per_s: float,
) -> float:
    """The objective of a deployment at a rate, as a number to minimise.

    ``throughput_per_device``: seconds of one device per output token, over the devices that the question counts
    (:attr:`~meshplan.planner.serving.problem.problem.ServingProblem.pays_idle_devices`); ``usd_per_million_tokens``:
    USD; ``num_devices``: devices; ``max_request_rate``: seconds per request; ``energy``: J per output token. Infinite
    where a price or a board power that it needs is unknown.
    """
    if tokens_per_s <= 0.0:
        return INFINITE
    match objective:
        case ServingObjective.THROUGHPUT_PER_DEVICE:
            return num_devices / tokens_per_s
        case ServingObjective.USD_PER_MILLION_TOKENS:
            return INFINITE if usd_per_hour is None else usd_per_million_tokens(usd_per_hour, tokens_per_s)
        case ServingObjective.NUM_DEVICES:
            return float(num_devices)
        case ServingObjective.MAX_REQUEST_RATE:
            return 1.0 / request_rate_per_s
        case ServingObjective.ENERGY:
            return INFINITE if power_w is None else power_w / tokens_per_s


def objective_change(objective: ServingObjective, score: float, other: float) -> float:
    """How the objective changes from one score to another, relative: of throughputs and rates the reverse of scores."""
    rises = objective in (ServingObjective.THROUGHPUT_PER_DEVICE, ServingObjective.MAX_REQUEST_RATE)
    return (score / other if rises else other / score) - 1.0


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million output tokens, USD."""
    return usd_per_hour / SECONDS_PER_HOUR / tokens_per_s * MILLION
