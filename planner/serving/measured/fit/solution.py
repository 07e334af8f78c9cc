"""The most probable serving constants: of published runs by the parts of the model, of own ones about the catalog's.

*Objective.* That of :mod:`meshplan.planner.validation.fitting` for ln y_im − ln f_im(θ), with Huber's loss and then
Cauchy's, which ignores runs that no constants explain (a front end that is its own bottleneck, a flag that the source
does not state); the weight of a run is 1/(runs of its concurrency curve), so that long curves do not outvote short
ones. Derivatives come from simulations with each constant perturbed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.serving import OwnLoad, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.fit.parts import (
    FITTED,
    FIXED_SPREAD,
    OWN_SPREAD,
    OWN_TOGETHER,
    PARAMETERS,
    SHARED,
    parts_of,
    spread_of,
)
from meshplan.planner.serving.measured.fit.rows import Row, linearised, thinned_curves
from meshplan.planner.validation.fitting import (
    Linear,
    Loss,
    Prior,
    gauss_newton,
    limited,
    most_probable,
    most_probable_parts,
)
from meshplan.planner.validation.held_out import Key

# What a server is off by for one model and its lengths says less of others. Of what the mean run of a curve is off by
# (280 curves of the public benchmark and the vendor, shipped constants), other lengths of the model share 0.5, other
# layouts 0.35 to 0.43 (time per token; time to first token 0.5 and 0.27 to 0.35), other models nothing. A run counts
# as so much more uncertain, in the logarithm, that it moves an iteration by 0.4 of what it says, and by a fifth of it
# for another model: a cluster of a user's own may be off as a whole, which runs of the sources that constants were
# fitted to cannot show.
OTHER_LENGTHS = {"ttft_s": 0.36, "tpot_s": 0.2, "latency_s": 0.2, "output_tokens_per_s": 0.2}
OTHER_MODEL = {"ttft_s": 0.63, "tpot_s": 0.3, "latency_s": 0.3, "output_tokens_per_s": 0.3}
LOSS, OWN_LOSS = Loss(huber=1.5, cauchy=1.0), Loss(huber=1.5)
MAX_MOVE = 1.0  # of a constant in one iteration, in the logarithm
REWEIGHTINGS = 24
OWN_ITERATIONS = 2
# What a published run says nothing of where the host works beside the device. It is seen only where it is the longer of
# the two, and whatever else an iteration lacks, a kernel priced too low, passes for it: from such runs the host of vLLM
# since 2025 came out so long that releases without hiding, left out, erred by 39.5 %. One's own may tell.
HIDDEN, HIDDEN_ROUNDS = ("host_step_s", "host_s_per_seq"), 3  # a fourth moves no host by 1e-4 of itself


def solve(
    linear: Linear, owners: Sequence[Row], prior: FloatArray, *, kept: Callable[[Row], bool] = lambda _: True
) -> Callable[[Key], FloatArray]:
    """The most probable parts, as a function from keys to θ.

    Args:
        linear: metrics of runs, from :func:`linearised`.
        owners: the run of each metric.
        prior: mean of μ.
        kept: rows that are not left out.
    """
    hidden = np.array([row.hides_host for row in owners])[:, None] & np.array([name in HIDDEN for name in FITTED])
    hosts = np.tile(prior, (len(owners), 1))
    for _ in range(HIDDEN_ROUNDS):
        solved = _solved(linear.given(hidden, hosts), owners, prior, kept)
        of_key = {key: solved(key) for key in {row.key for row in owners}}
        hosts = np.array([of_key[row.key] for row in owners])
    return solved


def _solved(
    linear: Linear, owners: Sequence[Row], prior: FloatArray, kept: Callable[[Row], bool]
) -> Callable[[Key], FloatArray]:
    chosen = [i for i, row in enumerate(owners) if kept(row)]
    keys = sorted({owners[i].key for i in chosen})
    parts = sorted({part for key in keys for part in parts_of(key)} | {SHARED})
    number = {key: i for i, key in enumerate(keys)}
    of_parts = Prior(
        mean=np.array([prior if part == SHARED else np.zeros_like(prior) for part in parts]),
        spread=np.array([spread_of(part) for part in parts]),
    )
    found = most_probable_parts(
        linear.only(chosen),
        of_parts,
        LOSS,
        set_of=np.array([number[owners[i].key] for i in chosen], dtype=np.int64),
        has=np.array([part in parts_of(key) for key in keys for part in parts]).reshape(len(keys), len(parts)),
        rounds=REWEIGHTINGS,
    )
    part_at = {part: found[i] for i, part in enumerate(parts)}

    def theta(key: Key) -> FloatArray:
        return np.asarray(sum((part_at[part] for part in parts_of(key) if part in part_at), np.zeros_like(prior)))

    return theta


def refined(
    rows: Sequence[Row],
    start: ServingConstants,
    free: Sequence[str] = tuple(FITTED),
    *,
    of: OwnLoad | None = None,
) -> ServingConstants:
    """Constants of one server adapted to its own runs, however few.

    Args:
        rows: runs of one engine on one generation, with the scatter of a single server.
        start: the catalog's, which is also the prior.
        free: constants that may move.
        of: for which plans; None for those of models that no run is of.
    """
    rows = seen_from(of, thinned_curves(rows))
    may_move = np.array([name in free for name in FITTED])
    prior = Prior(
        mean=PARAMETERS.vector(start),
        spread=np.where(may_move, OWN_SPREAD, FIXED_SPREAD),
        together=OWN_TOGETHER * may_move,
    )

    def step(theta: FloatArray) -> FloatArray:
        linear, _ = linearised(rows, lambda _: theta, is_secant=True)
        linear = replace(linear, weight=np.ones_like(linear.weight))
        found = most_probable(linear, prior, OWN_LOSS, rounds=REWEIGHTINGS, start=prior.mean)
        return limited(theta, found, MAX_MOVE)

    return PARAMETERS.replaced(start, gauss_newton(step, prior.mean, iterations=OWN_ITERATIONS))


def seen_from(of: OwnLoad | None, rows: Sequence[Row]) -> list[Row]:
    """The rows as they tell of plans of a load: with a server's scatter σ, and the deviation b of what is not of it.

    k runs that share a deviation must not tell more than one of them: each has √(σ² + k·b²), k being the runs of its
    lengths, or of its model where that is another.

    Args:
        of: the load; None for a model that no row is of.
        rows: own runs.
    """
    of_model, of_lengths = Counter(row.load.model for row in rows), Counter(row.load for row in rows)

    def noise(row: Row) -> FloatArray:
        if of is not None and row.load == of:
            return row.noise
        alike = of is not None and row.load.model == of.model
        count, deviation = (of_lengths[row.load], OTHER_LENGTHS) if alike else (of_model[row.load.model], OTHER_MODEL)
        return np.sqrt(row.noise**2 + count * np.array([deviation[name] for name in row.metrics]) ** 2)

    return [row.with_noise(noise(row)) for row in rows]
