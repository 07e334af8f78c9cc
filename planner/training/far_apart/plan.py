"""From priced ways to the plan that is stored: the table, what is chosen and why, and the figures of the chosen way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_HOUR, format_duration, format_usd
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity
from meshplan.planner.core.solution import relative_gap
from meshplan.planner.training.far_apart.bounds import least_inner_step_s, least_mean_step_s
from meshplan.planner.training.far_apart.exchange import Exchange
from meshplan.planner.training.far_apart.published import PUBLISHED
from meshplan.planner.training.far_apart.sites import Site
from meshplan.planner.training.far_apart.ways import PricedWay, Setting
from meshplan.planner.training.problem.far_apart import DATA_PARALLEL
from meshplan.planner.training.problem.problem import TrainingObjective
from meshplan.planner.training.search.report import TIE_WIDTH

SYNCHRONOUS = "synchronous plan"
EXCHANGE_PART = "exchange between sites"
NOT_VALIDATED = "training over sites: no measured run of these exchanges is among the constants"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Everything that was compared.

    Args:
        setting: sites at work, and the ring that joins them.
        sites: all of them.
        together: the synchronous plan over all sites.
        alone: each site's best plan for the whole batch.
        ways: priced; empty where a site cannot take part.
    """

    setting: Setting
    sites: tuple[Site, ...]
    together: Plan
    alone: tuple[Plan, ...]
    ways: tuple[PricedWay, ...]

    @property
    def tokens_per_step(self) -> float:
        """Trained tokens of a step over all sites."""
        return self.setting.problem.workload.trained_tokens_per_step

    def step_s(self, way: PricedWay) -> float | None:
        """Mean step of a way; None where it cannot be."""
        exchange = usable(way)
        return None if exchange is None else exchange.mean_step_s(way.setting.inner_step_s, way.setting.ring)

    def broken(self, way: PricedWay) -> str:
        """Why a way is not taken: its states, or a limit over all sites; empty where nothing is in its way."""
        step = self.step_s(way)
        if step is None:
            return way.reason
        limits, devices = self.setting.problem.limits, way.setting.num_devices
        usd = (self.setting.problem.machine.usd_per_hour_per_device or 0.0) * devices
        if devices > limits.max_devices:
            return f"{devices} devices, more than max_devices {limits.max_devices}"
        if limits.max_usd_per_hour is not None and usd > limits.max_usd_per_hour:
            return f"{format_usd(usd)} an hour, more than max_usd_per_hour {format_usd(limits.max_usd_per_hour)}"
        if limits.max_step_s is not None and step > limits.max_step_s:
            return f"{format_duration(step)} a step, more than max_step_time {format_duration(limits.max_step_s)}"
        return ""

    def cost(self, step_s: float, devices: int, more_tokens: float) -> tuple[float, float]:
        """What is minimised: by the objective, then the time of tokens that reach the same loss.

        Money and energy by the device-seconds: both grow with them.
        """
        seconds = step_s * (1.0 + more_tokens)
        objective = self.setting.problem.objective
        if objective is TrainingObjective.NUM_DEVICES:
            return float(devices), seconds
        paid = objective in (TrainingObjective.USD_PER_RUN, TrainingObjective.ENERGY)
        return seconds * (devices if paid else 1), seconds

    @cached_property
    def chosen(self) -> PricedWay | None:
        """The way that is taken; None for the synchronous plan."""
        asked = self.setting.asked
        open_ways = [one for one in self.ways if not self.broken(one)]
        if asked.way is not None:
            pinned = [one for one in open_ways if one.way == asked.way]
            return min(pinned, key=self._way_cost) if pinned else None
        known = [one for one in open_ways if one.way in asked.more_tokens]
        best = min(known, key=self._way_cost, default=None)
        if best is None or not self.together.config:
            return best
        step, devices = self.together.predicted["iteration_s"].value, self.together.config["world_size"]
        return best if self._way_cost(best) < self.cost(step, devices, 0.0) else None

    def _way_cost(self, way: PricedWay) -> tuple[float, float]:
        step = self.step_s(way)
        if step is None:
            raise AssertionError("only ways that can be are compared")
        return self.cost(step, way.setting.num_devices, self.setting.asked.more_tokens.get(way.way, 0.0))

    @cached_property
    def least(self) -> tuple[float, PricedWay | None]:
        """No way that could be chosen, and no synchronous plan, reaches the same loss in steps shorter than that, s.

        Steps count (1 + more tokens) times. With it the way that it is of; None of the synchronous plan. A way that
        lacks memory, or that a limit over all sites forbids, counts: the sites were not planned for it.
        """
        limits, asked = self.setting.problem.limits, self.setting.asked
        found: list[tuple[float, PricedWay | None]] = []
        if asked.way is None or self.chosen is None:
            found.append((float(self.together.solution.get("bound") or float("inf")), None))
        inner = least_inner_step_s(self.setting, self.alone) if self.ways else 0.0
        for one in (one for one in self.ways if asked.may_choose(one.way)):
            step = least_mean_step_s(self.setting, one, inner)
            if step is not None and (limits.max_step_s is None or step <= limits.max_step_s):
                found.append((step * (1.0 + asked.more_tokens.get(one.way, 0.0)), one))
        return min(found, key=lambda pair: pair[0])

    def proof(self, step_s: float) -> dict[str, Any]:
        """Objective, bound, gap and status of the answer's step.

        Args:
            step_s: of the chosen way, or of the synchronous plan.
        """
        chosen = self.chosen
        more = 0.0 if chosen is None else self.setting.asked.more_tokens.get(chosen.way, 0.0)
        bound = min(self.least[0] / (1.0 + more), step_s)
        gap = relative_gap(step_s, bound)
        # Sites are planned for throughput: of money, energy or devices nothing is proven.
        is_proven = gap <= TIE_WIDTH and self.setting.problem.objective is TrainingObjective.THROUGHPUT
        return {"objective": step_s, "bound": bound, "gap": gap, "status": "optimal" if is_proven else "feasible"}

    @property
    def left_open(self) -> str:
        """Which way may be better than what is chosen, and why it is not known; empty where none may."""
        best = self.least[1]
        if best is None or best is self.chosen or not (reason := self.broken(best)):
            return ""
        return f"{best.name} may be better with plans of the sites that were not searched for it: {reason}"

    @property
    def why(self) -> str:
        """Why the chosen one is chosen, and what may be better."""
        return "; ".join(filter(None, (self._why, self.left_open)))

    @property
    def _why(self) -> str:
        asked, chosen = self.setting.asked, self.chosen
        if chosen is not None:
            if asked.way is not None:
                return f"far_apart.way asks for {asked.way}"
            return f"with {asked.more_tokens[chosen.way]:.1%} more tokens it is better than the synchronous plan"
        if not self.ways:
            return "a site cannot hold the model, or the batch has fewer sequences than there are sites"
        if asked.way is not None:
            return (
                f"far_apart.way {asked.way} cannot be: {next(self.broken(o) for o in self.ways if o.way == asked.way)}"
            )
        if not asked.more_tokens:
            return (
                "no other way is chosen, because their loss is not accounted for: say far_apart.more_tokens, your "
                "number for each way"
            )
        return "no way with a number in far_apart.more_tokens is better"


def usable(way: PricedWay) -> Exchange | None:
    """The exchange of a way that can be; None where something is in its way."""
    return None if way.reason else way.exchange


def table_document(compared: Compared) -> dict[str, Any]:
    """The section ``far_apart`` of a plan's JSON."""
    ring = compared.setting.ring
    chosen = compared.chosen
    return {
        "chosen": SYNCHRONOUS if chosen is None else chosen.name,
        "why": compared.why,
        "ring": {"num_sites": ring.num_sites, "bytes_per_s": ring.bytes_per_s, "latency_s": ring.latency_s},
        "sites": [
            {
                "name": one.site.name,
                "num_nodes": len(one.site.nodes),
                "sequences": one.sequences,
                "step_s": one.step_s,
                "safe_bytes": one.plan.memory["worst"]["safe_bytes"],
                "config": dict(one.plan.config),
            }
            for one in (compared.setting if chosen is None else chosen.setting).workers
        ],
        "ways": [
            _plan_row(compared, SYNCHRONOUS, compared.together),
            *_rows_alone(compared),
            *(_way_row(compared, one) for one in compared.ways),
        ],
    }


def _rows_alone(compared: Compared) -> list[dict[str, Any]]:
    """Each site's best plan for the whole batch; equal sites share a row."""
    names: dict[str, str] = {}
    plans: dict[str, Plan] = {}
    for site, one in zip(compared.sites, compared.alone, strict=True):
        names[one.plan_id] = f"{names[one.plan_id]}, {site.name}" if one.plan_id in names else site.name
        plans[one.plan_id] = one
    return [
        _plan_row(compared, "one site alone" if len(names) == 1 else f"{name} alone", plans[key])
        for key, name in names.items()
    ]


def _plan_row(compared: Compared, name: str, made: Plan) -> dict[str, Any]:
    step = made.predicted["iteration_s"].value if made.config else None
    tokens = None if step is None else compared.tokens_per_step / step
    return {
        "name": name,
        "way": None,
        "devices": made.config.get("world_size"),
        "step_s": step,
        "tokens_per_s": tokens,
        "effective_tokens_per_s": tokens,
        "reason": "" if made.config else str(made.solution.get("reason", "nothing fits")),
    }


def _way_row(compared: Compared, way: PricedWay) -> dict[str, Any]:
    setting, step = way.setting, compared.step_s(way)
    more = setting.asked.more_tokens.get(way.way)
    known = PUBLISHED[way.way]
    row: dict[str, Any] = {
        "name": way.name,
        "way": way.way,
        "devices": setting.num_devices,
        "step_s": step,
        "tokens_per_s": None if step is None else compared.tokens_per_step / step,
        "effective_tokens_per_s": None if step is None else _effective(compared.tokens_per_step / step, way, more),
        "reason": compared.broken(way),
        "more_tokens": more,
        "published_loss": known.loss,
        "source": known.source,
        "published_steps": [known.least_steps, known.most_steps],
    }
    exchange = way.exchange
    if exchange is None:
        return row
    inner, ring, states = setting.inner_step_s, setting.ring, way.states
    return row | {
        "bits": way.bits,
        "sync_steps": exchange.sync_steps,
        "fragments": len(exchange.fragment_bytes),
        "overlap_steps": exchange.overlap_steps,
        "payload_bytes": exchange.payload_bytes,
        "exposed_s": exchange.exposed_s(inner, ring),
        "compute_s": exchange.compute_s,
        "whole_share": exchange.whole_share,
        "mean_bytes_per_s": exchange.mean_bytes_per_s(inner, ring),
        "hiding_bytes_per_s": exchange.hiding_bytes_per_s(inner, ring),
        "state_bytes": states.device_bytes,
        "host_state_bytes": states.host_bytes,
        "outer_state": states.outer_state,
    }


def _effective(tokens_per_s: float, way: PricedWay, more: float | None) -> float | None:
    """Tokens/s that count towards the loss; None where nobody said what the way costs."""
    if way.way == DATA_PARALLEL:
        return tokens_per_s
    return None if more is None else tokens_per_s / (1.0 + more)


def with_table(compared: Compared, identity: PlanIdentity, clocks: Mapping[str, float]) -> Plan:
    """The synchronous plan with the table beside it; its bound is that of the ways too that could have been chosen."""
    made = compared.together
    solution = {**made.solution, **clocks}
    step = made.predicted.get("iteration_s")
    if step is not None and compared.least[1] is not None:
        is_time = compared.setting.problem.objective is TrainingObjective.THROUGHPUT
        solution |= compared.proof(step.value) if is_time else {"status": "feasible"}
    return replace(made, **identity, solution=solution, far_apart=table_document(compared))


def chosen_plan(compared: Compared, way: PricedWay, identity: PlanIdentity, clocks: Mapping[str, float]) -> Plan:
    """The plan of a way: choices, ranks and memory of its slowest site, figures of all sites together."""
    setting, exchange = way.setting, usable(way)
    if exchange is None:
        raise AssertionError("a chosen way can be")
    slowest = max(setting.workers, key=lambda one: one.step_s)
    base, step = slowest.plan, exchange.mean_step_s(setting.inner_step_s, setting.ring)
    solution = {
        **base.solution,
        **clocks,
        "solver": "ways over sites enumerated; each site's plan searched",
        **compared.proof(step),
    }
    provenance = dict(base.provenance)
    provenance["not_validated"] = [*provenance.get("not_validated", []), NOT_VALIDATED]
    return replace(
        base,
        **identity,
        predicted=_predicted(compared, way, exchange, base),
        memory={**base.memory, "limit_bytes": slowest.limit_bytes},
        solution=solution,
        breakdown=_breakdown(base, exchange.exposed_s(setting.inner_step_s, setting.ring), step),
        provenance=provenance,
        alternatives=(),
        rejected=(),
        far_apart=table_document(compared),
    )


def _predicted(compared: Compared, way: PricedWay, exchange: Exchange, base: Plan) -> dict[str, Interval]:
    """Metrics of all sites together; an exchange that nobody measured may take twice as long."""
    setting = way.setting
    inner = base.predicted["iteration_s"]
    exposed = exchange.exposed_s(setting.inner_step_s, setting.ring)
    step = Interval(value=inner.value + exposed, low=inner.low + exposed, high=inner.high + 2.0 * exposed)
    devices, problem = setting.num_devices, setting.problem
    tokens, own = compared.tokens_per_step, base.config["world_size"]
    # A figure of the slowest site with its own tokens, scaled to all tokens, devices and the mean step.
    share = problem.workload.global_batch_size / base.config["global_batch_size"] * own / devices
    slower = inner.value / step.value

    def per_second(amount: float) -> Interval:
        return Interval(value=amount / step.value, low=amount / step.high, high=amount / step.low)

    metrics = {
        "iteration_s": step,
        "tokens_per_s": per_second(tokens),
        "tokens_per_s_per_device": per_second(tokens / devices),
        "samples_per_s": per_second(problem.workload.global_batch_size),
    }
    for name in ("model_flops_per_s_per_device", "mfu", "hfu"):
        if name in base.predicted:
            metrics[name] = per_second(base.predicted[name].value * share * slower * step.value)
    metrics["peak_memory_bytes"] = base.predicted["peak_memory_bytes"]
    price = problem.machine.usd_per_hour_per_device
    if price is not None:
        metrics["usd_per_hour"] = Interval(value=price * devices, low=price * devices, high=price * devices)
    if problem.num_steps is not None:
        more = 1.0 + setting.asked.more_tokens.get(way.way, 0.0)
        run = [one * problem.num_steps * more for one in (step.value, step.low, step.high)]
        metrics["run_time_s"] = Interval(value=run[0], low=run[1], high=run[2])
        if price is not None:
            usd = [one * price * devices / SECONDS_PER_HOUR for one in run]
            metrics["usd_per_run"] = Interval(value=usd[0], low=usd[1], high=usd[2])
    return metrics


def _breakdown(base: Plan, exposed_s: float, step_s: float) -> tuple[Mapping[str, Any], ...]:
    """The slowest site's step, and what it waits for the others."""
    rows = [dict(row) for row in base.breakdown]
    if exposed_s > 0.0:
        rows.append({"name": EXCHANGE_PART, "seconds": exposed_s, "evidence": "assumed"})
    for row in rows:
        row["share"] = row["seconds"] / step_s
    return tuple(sorted(rows, key=lambda row: (-row["seconds"], row["name"])))
