"""Predicting a measured serving run: its kernels are priced once, then it is simulated under any constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.planner.serving.estimator.energy import average_power_w
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.measured.observations import ServedRun
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.problem import Site
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.search.deployment import serve
from meshplan.planner.serving.simulation.engine import KV_BLOCK_TOKENS
from meshplan.planner.serving.simulation.metrics import Metrics, steady_tokens_per_s, summarize
from meshplan.planner.serving.simulation.run import ServingRun

# Latency and percentile in the observation format → in simulated metrics.
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "latency": "e2e"}
PERCENTILES = {"": "mean", "_median": "p50", "_p90": "p90", "_p95": "p95", "_p99": "p99"}
# Metrics that constants are fitted to: those that a benchmark measures independently of each other, by arrival.
FITTED_METRICS: Mapping[Arrival, tuple[str, ...]] = {
    Arrival.CLOSED_LOOP: ("ttft_s", "tpot_s"),
    Arrival.POISSON: ("ttft_s", "tpot_s"),
    Arrival.GAMMA: ("ttft_s", "tpot_s"),
    Arrival.TRACE: ("ttft_s", "tpot_s"),
    Arrival.ALL_AT_ONCE: ("output_tokens_per_s",),
    Arrival.STATIC_BATCH: ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_s"),
}


class PreparedRun:
    """A measured run, ready to be simulated under many constants.

    Args:
        run: the observation.
    """

    def __init__(self, run: ServedRun) -> None:
        self.run = run

    @property
    def key(self) -> tuple[str, str]:
        """(constants' engine name, hardware generation)."""
        return self.run.recipe.constants_name, self.run.architecture

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """One worker of each pool."""
        run = self.run
        return tuple(
            pool_worker(self._site(ServingConstants()), pool, run.workload, run.config.speculation)
            for pool in run.config.pools
        )

    def served(self, constants: ServingConstants) -> ServingRun:
        """The run as clients would see it."""
        costs = [worker.step_cost(constants) for worker in self.workers]
        return serve(self._site(constants), self.run.config, self.run.workload, costs=costs)

    def _site(self, constants: ServingConstants) -> Site:
        run = self.run
        nodes = {pool.node_type for pool in run.config.pools}
        return Site(
            shape=run.shape,
            machines=dict.fromkeys(nodes, run.machine),
            recipe=run.recipe,
            constants=dict.fromkeys(nodes, constants),
        )

    def predicted(self, constants: ServingConstants) -> dict[str, float]:
        """Every metric of the run that a simulation predicts; empty if a request does not fit."""
        served = self.served(constants)
        metrics = summarize(served, num_devices=self.run.config.num_devices)
        if metrics.num_rejected:
            return {}
        window = self.run.steady_window
        if window is not None and (steady := steady_tokens_per_s(served, window)):
            metrics = replace(
                metrics,
                output_tokens_per_s=steady,
                output_tokens_per_s_per_device=steady / self.run.config.num_devices,
            )
        wanted = {**self.run.derived, **self.run.measured}
        found = {}
        for name in wanted:
            value = _value(name, self, metrics)
            if value is not None and value > 0.0:
                found[name] = value
        return found


Rate = Callable[[PreparedRun, Metrics], float | None]


def _value(name: str, prepared: PreparedRun, metrics: Metrics) -> float | None:
    if name in RATES:
        return RATES[name](prepared, metrics)
    stem, _, unit = name.rpartition("_")
    if unit != "s":
        return None
    latency, _, percentile = stem.partition("_")
    if latency not in LATENCIES or (suffix := f"_{percentile}" if percentile else "") not in PERCENTILES:
        return None
    return metrics.latencies[LATENCIES[latency]].value(PERCENTILES[suffix])


def _total_rate(prepared: PreparedRun, metrics: Metrics) -> float:
    workload = prepared.run.workload
    output = metrics.output_tokens_per_s / metrics.requests_per_s if metrics.requests_per_s else 0.0
    mean = (1.0 + workload.length_ratio) / 2.0
    return metrics.requests_per_s * (mean * workload.input_length + output)


def _power_share(prepared: PreparedRun, metrics: Metrics) -> float | None:
    """Average power over the limit: prefill's share of the time is the first token's share of a request's."""
    e2e, device = metrics.latencies["e2e"].mean, prepared.run.machine.device
    if device.tdp_w is None or e2e <= 0.0:
        return None
    watts = average_power_w(device, metrics.latencies["ttft"].mean / e2e if _is_static(prepared) else 0.0)
    return None if watts is None else watts / device.tdp_w


def _power_w(prepared: PreparedRun, metrics: Metrics) -> float | None:
    share, device = _power_share(prepared, metrics), prepared.run.machine.device
    return None if share is None or device.tdp_w is None else share * device.tdp_w * prepared.run.config.num_devices


def _energy_per_token(prepared: PreparedRun, metrics: Metrics) -> float | None:
    watts = _power_w(prepared, metrics)
    return None if watts is None or metrics.output_tokens_per_s <= 0.0 else watts / metrics.output_tokens_per_s


def _cache_blocks(prepared: PreparedRun, _: Metrics) -> float:
    run, pool = prepared.run, prepared.run.config.pools[0]
    context = run.workload.input_length + run.workload.output_length
    device = run.machine.device
    memory = worker_memory(run.shape, device, pool.layout, pool.limits, pool.quantization, context=context)
    return memory.kv_capacity_tokens / KV_BLOCK_TOKENS


def _is_static(prepared: PreparedRun) -> bool:
    return prepared.run.workload.arrival is Arrival.STATIC_BATCH and prepared.run.config.pools[0].role is Role.MIXED


RATES: Mapping[str, Rate] = {
    "output_tokens_per_s": lambda _, metrics: metrics.output_tokens_per_s,
    "output_tokens_per_s_per_device": lambda _, metrics: metrics.output_tokens_per_s_per_device,
    "total_tokens_per_s": _total_rate,
    "requests_per_s": lambda _, metrics: metrics.requests_per_s,
    "average_power_fraction_of_tdp": _power_share,
    "power_w": _power_w,
    "energy_per_output_token_j": _energy_per_token,
    "kv_blocks": _cache_blocks,
}
