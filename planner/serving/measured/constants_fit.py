"""The serving constants that are fitted to measured runs, the model behind them, and the runs as rows of the fit.

*Notation.* Run i has measured metrics y_im (time to first token, time per token, latency or throughput) and predictions
f_im(θ); θ are the logarithms of :class:`~meshplan.catalogs.constants.serving.ServingConstants`.

*Model.* The constants of release r of engine e on generation a are a sum,

    θ_ra = μ + φ_e + α_r + β_a + γ_ra

μ is shared by all; φ is what an engine does in all of its releases, α what one of them (or of those that behave alike,
an entry of ``engines.yaml``) does everywhere, β what a generation does under every engine, γ the rest. What the host
does (κ instead of φ) is that of the releases whose core is one program: vLLM's since 2025, "V1", has another
scheduler, worker, sampler and API server than before, but the same models and kernels (blog.vllm.ai, 2025-01-27,
v1-alpha-release), and TensorRT-LLM 1.x another executor. Every part is normal about 0, μ about the literature. So a
release that nobody measured is expected to be like its engine's others, an engine that nobody measured like all, and
few runs move only what they depend on. Hosts that work beside the device tell nothing (:data:`HIDDEN`).

φ was chosen inside the folds (2026-11-26): with any one source left out, seven of eight sets of the others predict each
other better with it than without, and the eighth with half of its spread. A trend of host times with the day of the
release, which was tried beside it, would have lowered the error of the time per token over all sources (9.6 / 13.9 to
8.7 / 13.2 %, linearised), by the one source of half of the runs; the others never chose it, so it is not in the model.

*Objective.* That of :mod:`meshplan.planner.validation.fitting` for ln y_im − ln f_im(θ), with Huber's loss and then
Cauchy's, which ignores runs that no constants explain (a front end that is its own bottleneck, a flag that the source
does not state); the weight of a run is 1/(runs of its concurrency curve), so that long curves do not outvote short
ones. Derivatives come from simulations with each constant perturbed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshplan.catalogs.constants.engine_recipes import core_of_constants, engine_of_constants
from meshplan.catalogs.constants.serving import OwnLoad, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.prediction import FITTED_METRICS, TAIL_METRICS, PreparedRun
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.validation.fitting import (
    Linear,
    Loss,
    Parameters,
    Prior,
    gauss_newton,
    limited,
    most_probable,
    most_probable_parts,
)
from meshplan.planner.validation.held_out import HeldOut, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Prior standard deviations of a constant's logarithm, by part of the model.

    Args:
        prior: the shared part μ, about the literature.
        engine: the parts of an engine φ and of a release α, in units of :data:`ENGINE_SHARE` × ``prior``.
        generation: the hardware generation's part β, in units of :data:`GENERATION_SHARE` × ``prior``.
        own: a single server, about the set of its engine and generation.
        iteration: it is part of an iteration's time, in which a server is off by :data:`OWN_SHARED` at once.
        core: its engine's part is that of the program that schedules and prepares, κ; else of models and kernels, φ.
    """

    prior: float
    engine: float = 1.0
    generation: float = 1.0
    own: float
    iteration: bool = True
    core: bool = False


FIXED_SPREAD = 1e-6  # prior of a constant that may not move
# The time before an engine starts on a request depends mostly on flags and front ends, so its prior is wide. How many
# iterations are prepared ahead is documented, one by every engine that does so ("one extra decoding step",
# nvidia.github.io/TensorRT-LLM/features/overlap-scheduler.html; vLLM's async scheduling and SGLang's overlap alike), so
# that published runs do not move it: they took it to 1.5 for vLLM where BLIS was left out, and BLIS's first tokens came
# out 40 % too long. A server of one's own may. Engines differ in host time far more than in kernel time: where kernel
# times seem to differ, the models do, which does not carry over to other models. The hardware generation matters little
# for host time and not at all for the front end. One measured point of a server cannot separate steps and offset before
# the first token, nor the host from the device, so these stay near the catalog's: what one model on one server is off
# by is mostly shared by its iterations at every load, whatever they wait for. Spreads, shares and the loss were chosen
# among some dozens by the held-out error; those of a single server among 206 on 191 curves that are not those of the
# proof (linear), where the best are alike: of these those that leave host and launches to be told by several runs.
FITTED: Mapping[str, Spread] = {
    "decode_factor": Spread(prior=0.07, engine=0.5, own=0.05),
    "prefill_factor": Spread(prior=0.2, engine=0.3, generation=0.5, own=0.2),
    "host_step_s": Spread(prior=0.5, engine=3.0, generation=0.5, own=0.4, core=True),
    "host_s_per_seq": Spread(prior=0.5, engine=3.0, generation=0.5, own=0.4, core=True),
    "launch_s_per_layer": Spread(prior=0.5, generation=0.5, own=0.3),
    "launch_s_per_latent_layer": Spread(prior=0.5, generation=0.5, own=0.3),
    "launch_s_of_experts": Spread(prior=0.5, generation=0.5, own=0.3),
    "first_token_steps": Spread(prior=FIXED_SPREAD, own=0.3, iteration=False, core=True),
    "first_token_offset_s": Spread(prior=2.0, generation=0.2, own=0.3, iteration=False, core=True),
}
# Standard deviation of a single server's iterations as a whole, in the logarithm, besides those of each constant: all
# times of an iteration multiplied by one factor.
OWN_SHARED = 0.15
# Spread of each part of the model over that of μ.
ENGINE_SHARE, GENERATION_SHARE, REST_SHARE = 0.5, 0.2, 0.3
SPREAD = np.array([spread.prior for spread in FITTED.values()])
OF_ENGINE = np.array([spread.engine for spread in FITTED.values()])
OF_CORE = np.array([spread.core for spread in FITTED.values()])
OF_GENERATION = np.array([spread.generation for spread in FITTED.values()])
OWN_SPREAD = np.array([spread.own for spread in FITTED.values()])
OWN_TOGETHER = np.array([OWN_SHARED * spread.iteration for spread in FITTED.values()])
# Scatter of a metric that no constant explains, in the logarithm: another release of the same engine moves both
# latencies by about 15 %, and the time to first token three times as much from run to run as the time per token.
NOISE = {"ttft_s": 0.2, "tpot_s": 0.08, "latency_s": 0.08, "output_tokens_per_s": 0.08}
# The same for fits to the runs of one server. Residuals about a server's best constants are correlated between loads:
# of the time to first token 0.57 is shared at twice the concurrency, 0.16 at four times, nothing beyond. So one point
# must not move constants that all loads share by much. Chosen with the own spreads on half of the curves,
# and so that eight runs still move the constants that they depend on.
OWN_NOISE = {"ttft_s": 0.2, "tpot_s": 0.04, "latency_s": 0.04, "output_tokens_per_s": 0.04}
# What a server is off by for one model and its lengths says less of others. Of what the mean run of a curve is off by
# (280 curves of the public benchmark and the vendor, shipped constants), other lengths of the model share 0.5, other
# layouts 0.35 to 0.43 (time per token; time to first token 0.5 and 0.27 to 0.35), other models nothing. A run counts
# as so much more uncertain, in the logarithm, that it moves an iteration by 0.4 of what it says, and by a fifth of it
# for another model: a cluster of a user's own may be off as a whole, which runs of the sources that constants were
# fitted to cannot show.
OTHER_LENGTHS = {"ttft_s": 0.36, "tpot_s": 0.2, "latency_s": 0.2, "output_tokens_per_s": 0.2}
OTHER_MODEL = {"ttft_s": 0.63, "tpot_s": 0.3, "latency_s": 0.3, "output_tokens_per_s": 0.3}
LOSS, OWN_LOSS = Loss(huber=1.5, cauchy=1.0), Loss(huber=1.5)
STEP = 0.1  # by which constants are perturbed for derivatives, in the logarithm
REACH = 0.3  # by which they are perturbed up and down for secants
MAX_MOVE = 1.0  # of a constant in one iteration, in the logarithm
MOST_OF_CURVE = 3
REWEIGHTINGS = 24
OWN_ITERATIONS = 2
PARAMETERS = Parameters(names=tuple(FITTED))


# What a published run says nothing of where the host works beside the device. It is seen only where it is the longer of
# the two, and whatever else an iteration lacks, a kernel priced too low, passes for it: from such runs the host of vLLM
# since 2025 came out so long that releases without hiding, left out, erred by 39.5 %. One's own may tell.
HIDDEN, HIDDEN_ROUNDS = ("host_step_s", "host_s_per_seq"), 3  # a fourth moves no host by 1e-4 of itself


class Kind(StrEnum):
    """Which of the parts."""

    SHARED = "μ"
    ENGINE = "φ"
    CORE = "κ"
    RELEASE = "α"
    GENERATION = "β"
    REST = "γ"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One term of the sum.

    Args:
        kind: which one.
        name: whose; empty where it is everybody's.
    """

    kind: Kind
    name: str = ""


SHARED = Part(Kind.SHARED)


def parts_of(key: Key) -> tuple[Part, ...]:
    """The parts whose sum is the constants of a key; an engine or generation without a name has none of its own.

    >>> [f"{part.kind} {part.name}".strip() for part in parts_of(("vllm-v0", "hopper"))]
    ['μ', 'φ vllm', 'κ vllm-v0', 'α vllm-v0', 'β hopper', 'γ vllm-v0 on hopper']
    """
    name, generation = key
    found = [SHARED]
    if name:
        found += [Part(Kind.ENGINE, engine_of_constants(name)), Part(Kind.CORE, core_of_constants(name))]
        found.append(Part(Kind.RELEASE, name))
    if generation:
        found.append(Part(Kind.GENERATION, generation))
    if name and generation:
        found.append(Part(Kind.REST, f"{name} on {generation}"))
    return tuple(found)


def spread_of(part: Part) -> FloatArray:
    """Prior standard deviation of a part, by constant."""
    engine = ENGINE_SHARE * OF_ENGINE * SPREAD
    return {
        Kind.SHARED: SPREAD,
        Kind.ENGINE: np.where(OF_CORE, FIXED_SPREAD, engine),
        Kind.CORE: np.where(OF_CORE, engine, FIXED_SPREAD),
        Kind.RELEASE: ENGINE_SHARE * OF_ENGINE * SPREAD,
        Kind.GENERATION: GENERATION_SHARE * OF_GENERATION * SPREAD,
        Kind.REST: REST_SHARE * SPREAD,
    }[part.kind]


class Row:
    """One run with what it is fitted to.

    Args:
        prepared: the run.
        noise: metric → scatter that no constant explains.
    """

    def __init__(self, prepared: PreparedRun, noise: Mapping[str, float]) -> None:
        run = prepared.run
        self.prepared = prepared
        self.key: Key = prepared.key
        self.group: str = run.group
        self.metrics = [name for name in FITTED_METRICS[run.workload.arrival] if run.measured.get(name)]
        if "latency_s" in self.metrics:  # contains the time per token, which would count twice
            self.metrics = [name for name in self.metrics if name in ("latency_s", "ttft_s")]
        if "latency_s" in self.metrics and "tpot_s" in run.measured:
            self.metrics = ["ttft_s", "tpot_s"]
        self.log_measured = np.array([np.log(run.measured[name]) for name in self.metrics])
        self.noise = np.array([noise[name] for name in self.metrics])
        pool = run.config.pools[-1]
        self.curve = (
            self.group,
            self.key,
            pool.layout,
            pool.quantization,
            run.workload.input_length,
            run.workload.output_length,
            run.config.num_devices,
        )

    @property
    def hides_host(self) -> bool:
        """Decodes are prepared beside the device."""
        return self.prepared.workers[-1].hides_host

    @property
    def load(self) -> OwnLoad:
        """What plans share with the run."""
        return self.prepared.own_load

    def with_noise(self, noise: FloatArray) -> Row:
        """The same run with another scatter, [M]."""
        made = copy(self)
        made.noise = noise
        return made

    @property
    def source(self) -> str:
        """Who published the run: the first part of its group."""
        return self.group.partition("|")[0]

    def log_predicted(self, theta: FloatArray) -> FloatArray:
        """Ln f at θ; NaN where the run does not fit the device."""
        values = self.prepared.predicted(PARAMETERS.replaced(ServingConstants(), theta))
        return np.array([np.log(values[name]) if name in values else np.nan for name in self.metrics])

    def held_out(self, theta: FloatArray, evidence: str = "") -> list[HeldOut]:
        """The error of each metric under constants that were fitted without the run, to such evidence as is named."""
        run = self.prepared.run
        values = self.prepared.predicted(PARAMETERS.replaced(ServingConstants(), theta))
        tails = [name for name in TAIL_METRICS if run.measured.get(name)]  # judged, though nothing is fitted to them
        return [
            HeldOut(
                id=run.id,
                group=self.group,
                key=self.key,
                metric=name,
                error=float(values[name] / run.measured[name]) - 1.0,
                evidence=evidence,
            )
            for name in (*self.metrics, *tails)
            if name in values
        ]

    def linear(self, theta: FloatArray, *, is_secant: bool = False) -> tuple[FloatArray, FloatArray]:
        """Ln f [M] and its derivatives [M, constants] at θ.

        Args:
            theta: θ.
            is_secant: slopes are those of secants from θ − :data:`REACH` to θ + :data:`REACH`. Requests of a closed
                loop that are all alike fall into step at some constants and out of it at the next, so that first tokens
                jump by some per cent on a hair: over a small difference that is most of the slope.
        """
        here = self.log_predicted(theta)
        slope = np.zeros((len(here), len(theta)))
        is_closed = self.prepared.run.workload.arrival is Arrival.CLOSED_LOOP
        for j, name in enumerate(FITTED):
            # Time outside is only added to the engine's, ∂ ln f/∂θ = offset/f, where no request waits for an answer.
            if name == "first_token_offset_s" and not is_closed:
                added = np.array([metric in ("ttft_s", "latency_s") for metric in self.metrics])
                slope[:, j] = np.where(added & self.prepared.run.workload.has_front_end, np.exp(theta[j] - here), 0.0)
                continue
            of_constant = np.arange(len(theta)) == j
            if is_secant:
                ends = [self.log_predicted(theta + sign * REACH * of_constant) for sign in (1.0, -1.0)]
                slope[:, j] = (ends[0] - ends[1]) / (2.0 * REACH)
            else:
                slope[:, j] = (self.log_predicted(theta + STEP * of_constant) - here) / STEP
        return here, slope


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


def thinned_curves(rows: Sequence[Row]) -> list[Row]:
    """At most :data:`MOST_OF_CURVE` rows per concurrency curve, spread over its loads: the others add little."""
    curves: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        curves[row.curve].append(row)
    chosen = []
    for members in curves.values():
        members.sort(key=lambda row: row.prepared.run.workload.concurrency or 0)
        kept = np.unique(np.linspace(0, len(members) - 1, min(len(members), MOST_OF_CURVE)).round().astype(int))
        chosen += [members[index] for index in kept]
    return chosen


def linearised(
    rows: Sequence[Row], theta: Callable[[Key], FloatArray], *, is_secant: bool = False
) -> tuple[Linear, list[Row]]:
    """The metrics of the rows, linearised at the θ of their keys, and the row of each; not those that do not fit.

    As each key has its own θ, the point of linearisation is 0: residual = ln y − ln f + slope·θ ≈ slope·θ_key.

    Args:
        rows: the runs.
        theta: key → where to linearise.
        is_secant: see :meth:`Row.linear`.
    """
    rows = thinned_curves(rows)
    curves = Counter(row.curve for row in rows)
    residuals, slopes, noises, weights = [], [], [], []
    owners: list[Row] = []
    for row in rows:
        at = theta(row.key)
        here, slope = row.linear(at, is_secant=is_secant)
        good = np.isfinite(here) & np.isfinite(slope).all(axis=1)
        residuals.append((row.log_measured - here + slope @ at)[good])
        slopes.append(slope[good])
        noises.append(row.noise[good])
        weights.append(np.full(int(good.sum()), 1.0 / curves[row.curve]))
        owners += [row] * int(good.sum())
    linear = Linear(
        at=np.zeros(len(FITTED)),
        residual=np.concatenate(residuals),
        slope=np.concatenate(slopes),
        noise=np.concatenate(noises),
        weight=np.concatenate(weights),
    )
    return linear, owners
