"""Predicting a measured serving run: its kernels are priced once, then it is simulated under any constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from meshplan.catalogs.constants.power import power_calibration
from meshplan.catalogs.constants.serving import OwnLoad, ServingConstants
from meshplan.planner.cluster.power import DeviceWork, peak_bytes_per_j, power_share
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.measured.observations import ServedRun
from meshplan.planner.serving.measured.power import run_utilization
from meshplan.planner.serving.problem.problem import Site
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.search.deployment import kv_link, serve
from meshplan.planner.serving.simulation.engine import KV_BLOCK_TOKENS
from meshplan.planner.serving.simulation.metrics import Metrics, steady_tokens_per_s, summarize
from meshplan.planner.serving.simulation.run import ServingRun

# Latency and percentile in the observation format → in simulated metrics.
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "latency": "e2e"}
PERCENTILES = {"": "mean", "_median": "p50", "_p90": "p90", "_p95": "p95", "_p99": "p99"}
TAIL_METRICS = tuple(f"{latency}_{tail}_s" for latency in LATENCIES for tail in ("p90", "p95", "p99"))
# Metrics that the power curve answers.
SHARE_OF_LIMIT, POWER, ENERGY_PER_TOKEN = "average_power_fraction_of_tdp", "power_w", "energy_per_output_token_j"
POWER_METRICS = (SHARE_OF_LIMIT, POWER, ENERGY_PER_TOKEN)
# Metrics that constants are fitted to: those that a benchmark measures independently of each other, by arrival; where
# the rate is that of a steady window the gap between tokens, which few prompts share, and the rate, which all do.
STEADY_METRICS = ("itl_median_s", "output_tokens_per_s")
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

    @property
    def own_load(self) -> OwnLoad:
        """What plans share with it."""
        return self.run.workload.own_load(self.run.shape.slug)

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """One worker of each pool."""
        run = self.run
        return tuple(pool_worker(self.site, pool, run.workload, run.config.speculation) for pool in run.config.pools)

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

    @property
    def site(self) -> Site:
        """Model, hardware and engine; its constants are the literature's."""
        return self._site(ServingConstants())

    def predicted(self, constants: ServingConstants) -> dict[str, float]:
        """Every metric of the run that a simulation predicts; empty if a request does not fit."""
        return self.metrics_of(self.served(constants).after(self.run.num_before))

    def metrics_of(self, served: ServingRun) -> dict[str, float]:
        """Every metric of the run that one simulation of it says; empty if a request does not fit."""
        metrics = predicted_metrics(self, served)
        if metrics.num_rejected:
            return {}
        wanted = {**self.run.derived, **self.run.measured}
        found = {}
        for name in wanted:
            value = self._power(name, served, metrics) if name in POWER_METRICS else _value(name, self, metrics)
            if value is not None and value > 0.0:
                found[name] = value
        return found

    def utilization(self, served: ServingRun) -> DeviceWork | None:
        """How busy a device is in one simulation of the run while its power is measured."""
        run = self.run
        return run_utilization(served, self.workers[0], run.steady_window, decodes_alone=run.power_of_decodes)

    def _power(self, name: str, served: ServingRun, metrics: Metrics) -> float | None:
        """One of the metrics of power; None for disaggregated runs and devices whose limit nobody states."""
        run, limit = self.run, self.run.machine.device.tdp_w
        use = None if run.config.is_disaggregated else self.utilization(served)
        if use is None or limit is None:
            return None
        share = float(power_share(power_calibration().constants, use, peak_bytes_per_j(run.machine.device)))
        watts = share * limit * run.config.num_devices
        per_token = watts / metrics.output_tokens_per_s if metrics.output_tokens_per_s > 0.0 else None
        return {SHARE_OF_LIMIT: share, POWER: watts, ENERGY_PER_TOKEN: per_token}[name]


def predicted_metrics(prepared: PreparedRun, served: ServingRun) -> Metrics:
    """Figures of a run; rates of the steady window where the source states one.

    Gaps between tokens are those of the whole run all the same, ramp and tail included: the one source of such windows
    pools the gaps of all answers (github.com/ml-energy/leaderboard, scripts/build_data.py,
    extract_client_itl_percentiles; read 2026-11-27).
    """
    devices, window = prepared.run.config.num_devices, prepared.run.steady_window
    metrics = summarize(served, num_devices=devices)
    steady = 0.0 if window is None else steady_tokens_per_s(served, window)
    if not steady:
        return metrics
    return replace(metrics, output_tokens_per_s=steady, output_tokens_per_s_per_device=steady / devices)


Rate = Callable[[PreparedRun, Metrics], float | None]


def _value(name: str, prepared: PreparedRun, metrics: Metrics) -> float | None:
    if name in RATES:
        return RATES[name](prepared, metrics)
    latency, percentile = latency_of(name)
    return metrics.latencies[latency].value(percentile) if latency else None


def latency_of(name: str) -> tuple[str, str]:
    """Latency and percentile of a metric, as simulations call them; empty where it is none.

    >>> latency_of("latency_p99_s"), latency_of("power_w")
    (('e2e', 'p99'), ('', ''))
    """
    stem, _, unit = name.rpartition("_")
    latency, _, percentile = stem.partition("_")
    suffix = f"_{percentile}" if percentile else ""
    if unit != "s" or latency not in LATENCIES or suffix not in PERCENTILES:
        return "", ""
    return LATENCIES[latency], PERCENTILES[suffix]


def _total_rate(prepared: PreparedRun, metrics: Metrics) -> float:
    workload = prepared.run.workload
    output = metrics.output_tokens_per_s / metrics.requests_per_s if metrics.requests_per_s else 0.0
    mean = (1.0 + workload.length_ratio) / 2.0
    return metrics.requests_per_s * (mean * workload.input_length + output)


def _cache_blocks(prepared: PreparedRun, _: Metrics) -> float:
    run, pool = prepared.run, prepared.run.config.pools[0]
    memory = pool_memory(prepared.site, pool, run.workload)
    return memory.kv_capacity_tokens / KV_BLOCK_TOKENS


def _transferred_bytes(prepared: PreparedRun, _: Metrics) -> float | None:
    """KV cache of one prompt, from a prefill to a decode worker; None where there are none."""
    run = prepared.run
    if not run.config.is_disaggregated:
        return None
    return kv_link(prepared.site, run.config).kv_bytes_per_token * run.workload.mean_lengths[0]


def _transfer_s(prepared: PreparedRun, metrics: Metrics) -> float | None:
    """One transfer that waits for no other."""
    sent = _transferred_bytes(prepared, metrics)
    if sent is None:
        return None
    link = kv_link(prepared.site, prepared.run.config)
    return link.latency_s + sent / link.bandwidth_bytes_per_s


RATES: Mapping[str, Rate] = {
    "output_tokens_per_s": lambda _, metrics: metrics.output_tokens_per_s,
    "output_tokens_per_s_per_device": lambda _, metrics: metrics.output_tokens_per_s_per_device,
    "total_tokens_per_s": _total_rate,
    "requests_per_s": lambda _, metrics: metrics.requests_per_s,
    "kv_blocks": _cache_blocks,
    "kv_transfer_bytes": _transferred_bytes,
    "kv_transfer_s": _transfer_s,
}
