"""From a solved training problem to the plan that is stored, shown and launched."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.catalogs.constants.power import PowerCalibration, power_calibration
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain, shape_document
from meshplan.planner.training.admission import peak_interval
from meshplan.planner.training.alternatives import Alternative
from meshplan.planner.training.estimator.assembly import (
    ACTIVATION_OFFLOAD,
    ENDS,
    EXCHANGES,
    OPTIMIZER,
    PRODUCTS,
    WAITING,
)
from meshplan.planner.training.estimator.energy import energy_j
from meshplan.planner.training.estimator.operators.products import gemm_curve, peak_flops_per_s
from meshplan.planner.training.estimator.priced import Priced, StageBytes
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem
from meshplan.planner.training.problem.schedules import SCHEDULES
from meshplan.planner.training.problem.ways import way_of
from meshplan.planner.training.resolve import Resolved
from meshplan.planner.training.search.mapping.mapping_report import mapping_document, rank_table
from meshplan.planner.training.search.mapping.placement import Placement
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig, SearchReport
from meshplan.planner.training.unvalidated import unconfirmed, unmeasured_share

if TYPE_CHECKING:
    from meshplan.planner.goodput.forecast import Ending

# Added to the interval of a schedule, or of vocabulary parallelism, that no measured run has confirmed. Assumed: what
# is at stake, a few per cent to a fifth of a step, may be missed altogether.
UNMEASURED_SCHEDULE_ERROR = 0.15
# Values of one illegal choice that are listed by name; the others are counted.
LISTED_EXAMPLES = 6


def config_document(config: TrainingConfig) -> dict[str, Any]:
    """The choices as plain JSON."""
    return {**config.choices, "layers_per_chunk": list(config.layers_per_chunk), "world_size": config.world_size}


def config_from_document(document: Mapping[str, Any]) -> TrainingConfig:
    """Read back what :func:`config_document` wrote."""
    values = {key: value for key, value in document.items() if key != "world_size"}
    return TrainingConfig(**{**values, "layers_per_chunk": tuple(values["layers_per_chunk"])})


def half_width(problem: TrainingProblem, config: TrainingConfig) -> float:
    """Half-width of the interval of a plan's step time."""
    return problem.calibration.half_width(problem.kind_of_work, way_of(problem.workload, config))


def time_interval(
    problem: TrainingProblem, value: float, *, config: TrainingConfig, unmeasured_share: float = 0.0
) -> Interval:
    """A time or a rate with the calibration's held-out 90th percentile of error as a factor either way.

    A pipeline schedule without measured runs adds :data:`UNMEASURED_SCHEDULE_ERROR`, a part of the step that nobody
    measured (``unmeasured_share`` of it) adds itself: it may take twice as long.
    """
    spread = 1.0 + half_width(problem, config)
    if not SCHEDULES[config.pipeline_schedule].validated:
        spread += UNMEASURED_SCHEDULE_ERROR
    spread += unmeasured_share
    return Interval(value=value, low=value / spread, high=value * spread)


def predicted(resolved: Resolved, priced: Priced) -> dict[str, Interval]:
    """Every predicted metric of a plan, with its interval."""
    problem, config = resolved.problem, priced.config
    devices = config.world_size
    tokens_per_s = problem.workload.trained_tokens_per_step / priced.step_s
    model_rate = priced.model_flops / priced.step_s / devices
    peak = peak_flops_per_s(problem.machine.device, problem.workload.precision)
    times: dict[str, float] = {
        "iteration_s": priced.step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / devices,
        "samples_per_s": problem.workload.global_batch_size / priced.step_s,
        "model_flops_per_s_per_device": model_rate,
        "mfu": model_rate / peak,
        "hfu": model_rate * (1.0 + priced.recompute_flops_share) / peak,
    }
    steps, price = problem.num_steps, problem.machine.usd_per_hour_per_device
    if steps is not None and problem.run is None:
        times["run_time_s"] = priced.step_s * steps
        if price is not None:
            times["usd_per_run"] = priced.step_s * steps * price * devices / SECONDS_PER_HOUR
    unmeasured = unmeasured_share(problem, priced)
    metrics = {
        name: time_interval(problem, value, config=config, unmeasured_share=unmeasured) for name, value in times.items()
    }
    energy = energy_j_per_step(problem, priced, metrics["iteration_s"])
    if energy is not None:
        metrics["energy_j_per_step"] = energy
    end = _run_ending(problem, metrics["iteration_s"], devices)
    if end is not None and problem.run is not None:
        from meshplan.planner.goodput.report import run_metrics  # start-up, as in _run_ending

        metrics |= run_metrics(problem.run.setting, devices, end, price)
    metrics["peak_memory_bytes"] = peak_interval(priced.typical_bytes, priced.safe_bytes)
    if price is not None:
        metrics["usd_per_hour"] = Interval(value=price * devices, low=price * devices, high=price * devices)
    return metrics


def energy_j_per_step(
    problem: TrainingProblem, priced: Priced, step: Interval, calibration: PowerCalibration | None = None
) -> Interval | None:
    """Energy of all devices in a step (:mod:`~meshplan.planner.training.estimator.energy`), J; None where the board's
    limit is unknown.

    The relative errors of power and step are taken as independent. No board draws more than its limit.

    Args:
        problem: the question.
        priced: the plan.
        step: its time, s.
        calibration: of the power curve; None for the one that ships.
    """
    device, known = problem.machine.device, calibration or power_calibration()
    if device.tdp_w is None:
        return None
    devices = priced.config.world_size
    value = float(energy_j(problem.machine, priced.work, step.value, devices, known.constants))
    low, high = (
        math.exp(math.hypot(math.log(side), known.error_p90["power"]))
        for side in (step.value / step.low, step.high / step.value)
    )
    return Interval(value=value, low=value / low, high=min(value * high, devices * device.tdp_w * step.high))


def _run_ending(problem: TrainingProblem, step: Interval, devices: int) -> Ending | None:
    """When the run ends; None where only steps are asked about."""
    if problem.run is None or problem.num_steps is None:
        return None
    # start-up: many questions ask about steps alone
    from meshplan.planner.goodput.forecast import ending

    return ending(problem.run.setting, devices, step.value * problem.num_steps, spread=step.high / step.value)


def _run_section(resolved: Resolved, step: Interval, config: TrainingConfig) -> dict[str, Any] | None:
    """What the plan says of its run; None where only steps are asked about."""
    problem, devices = resolved.problem, config.world_size
    end = _run_ending(problem, step, devices)
    if end is None or problem.run is None or problem.num_steps is None:
        return None
    from meshplan.planner.goodput.report import run_document  # start-up, as in _run_ending

    apart = config.world_size // config.num_copies % problem.machine.devices_per_host == 0
    copies = config.num_copies if apart else 1
    training_s = step.value * problem.num_steps
    return run_document(problem.run.setting, devices, training_s, end, resolved.assumed, copies=copies)


def _lengths_section(problem: TrainingProblem, priced: Priced) -> dict[str, Any] | None:
    """What the plan says of its documents; None where all sequences are alike."""
    if problem.workload.documents is None:
        return None
    # start-up: most questions know no documents
    from meshplan.planner.training.lengths.study import lengths_document, study_lengths

    study = study_lengths(problem, priced)
    return None if study is None else lengths_document(study)


def memory_table(problem: TrainingProblem, priced: Priced) -> dict[str, Any]:
    """Bytes per rank: the worst stage and every distinct one, by component, typical and safe."""
    return {
        "device_memory_bytes": problem.machine.device.memory_bytes,
        "limit_bytes": problem.limits.memory_bytes,
        "worst": _stage_row(priced.worst_stage),
        "stages": [_stage_row(stage) for stage in priced.stages],
    }


def _stage_row(stage: StageBytes) -> dict[str, Any]:
    return {
        "first_stage": stage.first_stage,
        "num_stages": stage.num_stages,
        "num_layers": stage.num_layers,
        **{f"{name}_bytes": value for name, value in stage.components.items()},
        "typical_bytes": stage.typical_bytes,
        "safe_bytes": stage.safe_bytes,
        **({"host_bytes": stage.host_bytes} if stage.host_bytes else {}),
        **({"nvme_bytes": stage.nvme_bytes} if stage.nvme_bytes else {}),
    }


def evidence_of(problem: TrainingProblem, term: str, *, optimizer_offload: bool = False) -> EvidenceLevel:
    """How well the rate behind a part of the step is known."""
    if term in {ACTIVATION_OFFLOAD, WAITING} or (term == OPTIMIZER and optimizer_offload):
        return EvidenceLevel.ASSUMED
    if term in {*PRODUCTS, ENDS}:
        fitted = gemm_curve(problem.machine.device, problem.workload.precision).is_fitted
        return EvidenceLevel.FITTED if fitted else EvidenceLevel.DATASHEET
    if term in EXCHANGES:
        return problem.machine.link_level
    return EvidenceLevel.FITTED if problem.calibration.num_runs else EvidenceLevel.ASSUMED


def breakdown(problem: TrainingProblem, priced: Priced) -> tuple[dict[str, Any], ...]:
    """Where the step's time goes, largest first; parts that are zero are left out."""
    rows = sorted(priced.breakdown_s.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        {
            "name": name,
            "seconds": seconds,
            "share": seconds / priced.step_s,
            "evidence": evidence_of(problem, name, optimizer_offload=priced.config.optimizer_offload).value,
        }
        for name, seconds in rows
        if seconds > 0.0
    )


def provenance(resolved: Resolved, priced: Priced) -> dict[str, Any]:
    """What the numbers rest on, and the share of the time at each level of evidence."""
    problem = resolved.problem
    shares: dict[str, float] = {}
    for row in breakdown(problem, priced):
        shares[row["evidence"]] = shares.get(row["evidence"], 0.0) + row["share"]
    calibration = problem.calibration
    return {
        "share_of_time_by_evidence": shares,
        "calibration": {
            "framework": calibration.framework,
            "architecture": calibration.architecture,
            "num_runs": calibration.num_runs,
            "time_error_p90": half_width(problem, priced.config),
            "time_error_basis": calibration.error_basis.get(problem.kind_of_work, ""),
            "basis": calibration.basis,
            "memory_basis": calibration.memory_basis,
            "source": calibration.source,
            "date": calibration.date,
            **_start_width(problem),
        },
        **_not_validated(problem, priced),
        "sources": dict(resolved.sources),
        "model": shape_document(problem.shape),
    }


def _start_width(problem: TrainingProblem) -> dict[str, float]:
    """The half-width of the interval before own runs; empty where none are known."""
    start = problem.calibration.start_error_p90
    return {"start_error_p90": start[problem.kind_of_work]} if start else {}


def _not_validated(problem: TrainingProblem, priced: Priced) -> dict[str, list[str]]:
    """What the plan uses that no measured run has confirmed; empty where there is nothing."""
    entries = [entry.what for entry in unconfirmed(problem, priced)]
    return {"not_validated": entries} if entries else {}


# Objectives that are neither a step nor a number of devices: a row of the table says what each plan takes of them.
COSTS = frozenset({TrainingObjective.USD_PER_RUN, TrainingObjective.ENERGY})


def runner_up_rows(best: Iterable[ScoredConfig], objective: TrainingObjective, *, top: int) -> list[dict[str, Any]]:
    """The best candidates, the chosen one first; those within the model's own error of it are named ties.

    Candidates of equal time and memory appear once.
    """
    rows: list[dict[str, Any]] = []
    seen: set[tuple[float, int]] = set()
    first = math.inf
    for scored in best:
        key = (round(scored.step_s, 12), round(scored.safe_bytes))
        if key in seen:
            continue
        seen.add(key)
        is_tie = bool(rows) and abs(scored.objective / first - 1.0) <= TIE_WIDTH
        first = scored.objective if not rows else first
        rows.append(
            {
                "name": "chosen" if not rows else f"{'tie' if is_tie else 'rank'} {len(rows) + 1}",
                "config": config_document(scored.config),
                "iteration_s": scored.step_s,
                "safe_bytes": scored.safe_bytes,
                "chosen": not rows,
                **({"objective": scored.objective} if objective in COSTS else {}),
            }
        )
    return rows[:top]


def alternative_rows(chosen: Priced, found: Iterable[Alternative], objective: Objective) -> list[dict[str, Any]]:
    """The well-known other choices as plain JSON."""

    def dearer(other: Alternative) -> dict[str, float]:
        if objective.problem.objective not in COSTS or other.priced is None:
            return {}
        asked, least = (objective.of_config(one.config, one.step_s) for one in (other.priced, chosen))
        return {"objective": asked, "dearer_by": asked / least - 1.0}

    return [
        {
            "name": other.name,
            "choices": dict(other.choices),
            "config": None if other.priced is None else config_document(other.priced.config),
            "iteration_s": None if other.priced is None else other.priced.step_s,
            "safe_bytes": None if other.priced is None else other.priced.safe_bytes,
            "slower_by": None if other.priced is None else other.priced.step_s / chosen.step_s - 1.0,
            "reason": other.reason,
            **dearer(other),
        }
        for other in found
    ]


def rejected_rows(report: SearchReport, *, is_found: bool) -> list[dict[str, Any]]:
    """Reason → how many, with an example or the nearest miss; without a plan no bound is that of a better one."""
    rows: list[dict[str, Any]] = []
    for name, count in report.over_limit.items():
        excess, config = report.nearest_miss[name]
        rows.append(
            {
                "reason": f"over the limit: {name}",
                "count": count,
                "nearest_miss": excess,
                "example": config_document(config),
            }
        )
    for message, count in report.refused.most_common():
        rows.append({"reason": message, "count": count, "example": None})
    for message, values in report.illegal.items():
        if values:
            rows.append({"reason": message, "count": len(values), "example": ", ".join(values[:LISTED_EXAMPLES])})
    # Without a plan what is beyond the limits by its bound was held against them afterwards, and is counted there.
    unpriced = report.ruled_out - (0 if is_found else report.over_limit.total())
    if unpriced > 0:
        reason = "cannot beat the best found (bound)" if is_found else "beyond the limits by the bound"
        rows.append({"reason": reason, "count": unpriced, "example": None})
    return rows


def catalog_content(resolved: Resolved) -> dict[str, Any]:
    """Every catalog entry that an answer rests on, as plain JSON; its digest is the plan's ``catalog_digest``."""
    problem = resolved.problem
    return {
        "cluster": plain(resolved.cluster),
        "network": network_content(problem.machine),
        "model": shape_document(problem.shape),
        "price": plain(resolved.price),
        "calibration": problem.calibration.to_document(),
        "rules": {"name": problem.rules.name, "version": problem.rules.version},
    }


def network_content(machine: Machine) -> list[Any]:
    """The usual link and, where links differ, a digest of all of them."""
    usual: list[Any] = [machine.scale_out_bytes_per_s, machine.scale_out_latency_s]
    network = machine.network
    if network is None:
        return usual
    parts = [network.bytes_per_s, network.latency_s, np.array(network.usable)]
    for trunk in network.trunks:
        parts += [trunk.senders, trunk.receivers, np.array(trunk.bytes_per_s)]
    return [*usual, hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()]


def make_training_plan(
    resolved: Resolved,
    priced: Priced,
    *,
    solution: Mapping[str, Any],
    identity: PlanIdentity,
    placement: Placement | None,
    alternatives: tuple[Mapping[str, Any], ...] = (),
    rejected: tuple[Mapping[str, Any], ...] = (),
) -> Plan:
    """Put the parts of a training plan together.

    Args:
        resolved: the problem, priced under the placement, and its sources.
        priced: the chosen configuration.
        solution: the solver's report.
        identity: kind, spec and digests (:func:`~meshplan.planner.core.plan.plan_identity`).
        placement: of the ranks; None where all mappings are alike.
        alternatives: rows of other choices.
        rejected: rows of what was ruled out.
    """
    order = None if placement is None else placement.order
    metrics = predicted(resolved, priced)
    return Plan(
        config=config_document(priced.config),
        predicted=metrics,
        solution=solution,
        rank_table=rank_table(resolved.problem.machine, priced.config, order),
        mapping=None
        if placement is None
        else mapping_document(resolved.problem, priced.config, placement, resolved.hosts),
        memory=memory_table(resolved.problem, priced),
        breakdown=breakdown(resolved.problem, priced),
        provenance={"meshplan": own_version(), **provenance(resolved, priced)},
        alternatives=alternatives,
        rejected=rejected,
        run=_run_section(resolved, metrics["iteration_s"], priced.config),
        lengths=_lengths_section(resolved.problem, priced),
        **identity,
    )
