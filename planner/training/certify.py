"""A second opinion on a training plan: configurations put together by plain loops, priced one at a time.

The search forms arrays, bounds them and visits them in an order of its own. Here degrees are drawn from the question
itself, every rule is asked of one configuration, and each is priced alone; nothing of the search is used, only the
estimator, whose numbers are the question's terms. Checked are: the plan's step, priced again; the limits that it has to
keep; and that nothing which is legal and within the limits beats the plan's bound.

Where there are at most :data:`MOST_PRICED` configurations with evenly split layers all of them are looked at; otherwise
every configuration that differs from the plan in one or two choices, as far as they go, and a random sample of the
rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.certificate import Certificate, Check, none_better, same_value
from meshplan.planner.training.estimator.energy import energy_j
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.choices import plain_defaults
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem
from meshplan.planner.training.problem.schedules import schedules_of

# Configurations that are priced at most, about 2 ms each.
MOST_PRICED = 1500
# Share of them that is drawn at random where not all can be priced.
RANDOM_SHARE = 0.5
# Random draws for each one that is legal, at most.
MOST_DRAWS = 200
ZERO_STAGES = (0, 1, 2, 3)
METHOD = "plain loops over degrees, each configuration priced alone"

Choices = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the second way looked at.

    Args:
        best: the best objective of what is legal and within the limits; infinite where nothing is.
        count: configurations that were priced.
        covers: which they are, in words.
    """

    best: float
    count: int
    covers: str


def certify_plan(
    problem: TrainingProblem,
    config: TrainingConfig | None,
    stated: Mapping[str, float | None],
    *,
    seed: int,
    budget: Budget,
) -> Certificate:
    """Hold a plan against configurations that the search did not choose.

    Args:
        problem: the question, its links under the plan's mapping.
        config: the plan's choices; None where it says that nothing fits.
        stated: ``iteration_s`` and ``bound`` of the plan.
        seed: of the random sample.
        budget: what may be spent.
    """
    checks: list[Check] = []
    if config is not None:
        own = price(problem, config)
        checks.append(same_value("step of the plan, priced again (s)", float(stated["iteration_s"] or 0.0), own.step_s))
        fits = _within(problem, own) and not problem.rules.broken(problem.shape, config)
        checks.append(
            Check(
                what="the plan is legal and within the limits", stated="yes", found="yes" if fits else "no", agrees=fits
            )
        )
    rng = random.Random(seed)  # noqa: S311 - a sample, nothing secret
    seen = _look(problem, config, rng, budget)
    if config is None:
        found = "nothing" if seen.best == float("inf") else f"a plan with objective {seen.best:.6g}"
        checks.append(
            Check(what="nothing stays within the limits", stated="nothing", found=found, agrees=found == "nothing")
        )
    elif seen.best < float("inf") and stated["bound"] is not None:
        checks.append(none_better("no configuration beats the bound", stated["bound"], seen.best))
    return Certificate(method=METHOD, covers=seen.covers, checks=tuple(checks))


def _look(problem: TrainingProblem, config: TrainingConfig | None, rng: random.Random, budget: Budget) -> _Seen:
    """Price all configurations, or those near the plan and a sample."""
    everything = list(itertools.islice(_all(problem), MOST_PRICED + 1))
    if len(everything) <= MOST_PRICED:
        best, count = _best(problem, iter(everything), MOST_PRICED, budget)
        return _Seen(best=best, count=count, covers=f"all {count:,} legal configurations with evenly split layers")
    near = 0.0 if config is None else 1.0 - RANDOM_SHARE
    best, count = _best(problem, _near(problem, config), int(near * MOST_PRICED), budget)
    other, drawn = _best(problem, _random(problem, rng), MOST_PRICED - int(near * MOST_PRICED), budget)
    words = f"a sample of {drawn:,} legal configurations"
    if count:
        words = f"{count:,} legal configurations one or two choices away from the plan, and {words}"
    return _Seen(best=min(best, other), count=count + drawn, covers=words)


def _best(problem: TrainingProblem, configs: Iterator[TrainingConfig], most: int, budget: Budget) -> tuple[float, int]:
    """The best objective within the limits of the first ``most`` configurations, and how many there were."""
    best, count = float("inf"), 0
    for config in itertools.islice(configs, most):
        if budget.stopped:
            break
        count += 1
        priced = price(problem, config)
        if _within(problem, priced):
            best = min(best, _objective(problem, priced))
    return best, count


def _objective(problem: TrainingProblem, priced: Priced) -> float:
    """The question's objective, smaller is better, from its definition."""
    devices, step = priced.config.world_size, priced.step_s
    ratio = 1.0 if problem.run is None else problem.run.setting.ratio(devices)
    paid = devices + (0 if problem.run is None else problem.run.setting.spare_devices)
    if problem.objective is TrainingObjective.THROUGHPUT:
        return step / ratio
    if problem.objective is TrainingObjective.NUM_DEVICES:
        return devices + step / (1.0 + step)
    if problem.objective is TrainingObjective.ENERGY:
        return float(energy_j(problem.machine, priced.work, step, devices))
    usd_per_s = (problem.machine.usd_per_hour_per_device or 1.0) / SECONDS_PER_HOUR
    return step / ratio * paid * usd_per_s * (problem.num_steps or 1.0)


def _within(problem: TrainingProblem, priced: Priced) -> bool:
    """Whether a configuration keeps the question's limits."""
    limits, devices, step = problem.limits, priced.config.world_size, priced.step_s
    rate = problem.machine.usd_per_hour_per_device or 0.0
    run_s, paid = step * (problem.num_steps or 0.0), devices
    if problem.run is not None:
        run_s, paid = run_s / problem.run.setting.ratio(devices), devices + problem.run.setting.spare_devices
    run_usd = run_s * paid * rate / SECONDS_PER_HOUR
    kept = [
        priced.safe_bytes <= limits.memory_bytes,
        limits.min_devices <= devices <= limits.max_devices,
        limits.max_step_s is None or step <= limits.max_step_s,
        limits.max_run_s is None or problem.run is None or run_s <= limits.max_run_s,
        limits.max_usd_per_run is None or run_usd <= limits.max_usd_per_run,
        limits.max_usd_per_hour is None or devices * rate <= limits.max_usd_per_hour * (1.0 + 1e-9),
    ]
    if limits.host_memory_bytes is not None:
        ranks = min(problem.machine.devices_per_host, devices)
        states = max(one.components["weights"] + one.components["optimizer"] + one.host_bytes for one in priced.stages)
        kept.append(states * ranks <= limits.host_memory_bytes)
    return all(kept)


# --- configurations ------------------------------------------------------------------------------------------------


def _dividing(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _values(problem: TrainingProblem) -> dict[str, list[Any]]:
    """What every choice could be by itself, pins respected."""
    shape, workload, most = problem.shape, problem.workload, problem.limits.max_devices
    moe = shape.moe
    free: dict[str, list[Any]] = {
        "tensor_parallel": [t for t in _dividing(shape.num_attention_heads) if t <= most],
        "context_parallel": [c for c in _dividing(workload.sequence_length) if c <= most],
        "pipeline_parallel": list(range(1, min(shape.num_hidden_layers, most) + 1)),
        "data_parallel": [d for d in _dividing(workload.global_batch_size) if d <= most],
        "micro_batch_size": _dividing(workload.global_batch_size),
        "virtual_pipeline_stages": list(range(1, shape.num_hidden_layers + 1)),
        "expert_parallel": [1] if moe is None else _dividing(moe.num_experts),
        "expert_tensor_parallel": [1] if moe is None else _dividing(moe.expert_intermediate_size),
        "zero_stage": list(ZERO_STAGES),
        "data_parallel_shard": _dividing(workload.global_batch_size),
        "activation_recompute": [mode for mode in problem.rules.recompute_modes if mode != "block"],
    }
    return {name: [problem.fixed[name]] if name in problem.fixed else values for name, values in free.items()}


def _all(problem: TrainingProblem) -> Iterator[TrainingConfig]:
    """Every legal configuration with evenly split layers."""
    values = _values(problem)
    degrees = ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel")
    others = [name for name in values if name not in degrees]
    for sizes in itertools.product(*(values[name] for name in degrees)):
        if _product(sizes) > problem.limits.max_devices:
            continue
        chosen = dict(zip(degrees, sizes, strict=True))
        fitting = {name: [v for v in values[name] if _may_be(problem, chosen, name, v)] for name in others}
        for rest in itertools.product(*fitting.values()):
            config = _config(problem, {**chosen, **dict(zip(others, rest, strict=True))})
            if config is not None:
                yield config


def _may_be(problem: TrainingProblem, chosen: Mapping[str, int], name: str, value: Any) -> bool:
    """Whether a choice can have a value beside the degrees: saves the loops what :func:`_config` would refuse."""
    if name == "micro_batch_size":
        return problem.workload.global_batch_size // chosen["data_parallel"] % int(value) == 0
    if name == "data_parallel_shard":
        return chosen["data_parallel"] % int(value) == 0
    if name == "virtual_pipeline_stages":
        return value == 1 or (
            chosen["pipeline_parallel"] > 1 and chosen["pipeline_parallel"] * value <= problem.shape.num_hidden_layers
        )
    if name in ("expert_parallel", "expert_tensor_parallel"):
        ranks = chosen["tensor_parallel"] * chosen["context_parallel"] * chosen["data_parallel"]
        return ranks % int(value) == 0
    return True


def _random(problem: TrainingProblem, rng: random.Random) -> Iterator[TrainingConfig]:
    """Legal configurations at random, those that use many devices as often as those that use few."""
    values, misses = _values(problem), 0
    while misses < MOST_DRAWS * MOST_PRICED:
        chosen: Choices = {}
        left = problem.limits.max_devices
        for name in rng.sample(("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel"), 4):
            possible = [v for v in values[name] if v <= left]
            chosen[name] = rng.choice(possible) if possible else 0
            left = left // chosen[name] if chosen[name] else 0
        if left:
            for name in values.keys() - chosen.keys():
                possible = [v for v in values[name] if _may_be(problem, chosen, name, v)]
                chosen[name] = rng.choice(sorted(possible, key=str)) if possible else None
            config = None if None in chosen.values() else _config(problem, chosen)
            if config is not None:
                misses = 0
                yield config
                continue
        misses += 1


def _near(problem: TrainingProblem, config: TrainingConfig | None) -> Iterator[TrainingConfig]:
    """Legal configurations that differ from one in one choice, then in two."""
    if config is None:
        return
    values = _values(problem)
    now = {name: getattr(config, name) for name in values}
    for count in (1, 2):
        for names in itertools.combinations(values, count):
            for changed in itertools.product(*([v for v in values[name] if v != now[name]] for name in names)):
                other = _config(problem, {**now, **dict(zip(names, changed, strict=True))})
                if other is not None:
                    yield other


def _config(problem: TrainingProblem, chosen: Choices) -> TrainingConfig | None:
    """A configuration with evenly split layers and every other choice at its default; None where it is not legal."""
    shape, batch = problem.shape, problem.workload.global_batch_size
    p, v, t = chosen["pipeline_parallel"], chosen["virtual_pipeline_stages"], chosen["tensor_parallel"]
    ranks, d = t * chosen["context_parallel"] * chosen["data_parallel"], chosen["data_parallel"]
    asked = problem.fixed.get("pipeline_schedule")
    schedules = schedules_of(
        p, v, allowed=problem.rules.pipeline_schedules, pinned=None if asked is None else str(asked)
    )
    per_pass = chosen["micro_batch_size"] * d
    fits = [
        ranks * p <= problem.limits.max_devices,
        p * v <= shape.num_hidden_layers,
        batch % per_pass == 0,
        bool(schedules),
        d % chosen["data_parallel_shard"] == 0,
        ranks % (chosen["expert_parallel"] * chosen["expert_tensor_parallel"]) == 0,
        (chosen["zero_stage"] == 0) == (chosen["data_parallel_shard"] == 1) or d == 1,
    ]
    if not all(fits):
        return None
    layers = problem.fixed.get("layers_per_chunk", problem.rules.usual_layers(shape.num_hidden_layers, p * v))
    if layers is None or len(layers) != p * v or min(layers) < 1:
        return None
    complete = {
        **plain_defaults(),
        **{name: value for name, value in problem.fixed.items() if name != "pipeline_schedule"},
        **problem.settled,
        **chosen,
        "sequence_parallel": t > 1 and bool(problem.fixed.get("sequence_parallel", problem.rules.sequence_parallel)),
        "layers_per_chunk": tuple(layers),
        "pipeline_schedule": schedules[0],
        "num_microbatches": batch // per_pass,
        "recompute_num_layers": 0,
    }
    config = TrainingConfig(**complete)
    if problem.rules.broken(shape, config):
        return None
    return config


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
