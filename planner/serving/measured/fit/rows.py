"""Measured runs as rows of the fit of serving constants: what each is fitted to, and its derivatives.

Run i has measured metrics y_im (time to first token, time per token, latency or throughput) and predictions f_im(θ); a
row says ln f_im and ∂ ln f_im/∂θ, from simulations with each constant perturbed. First tokens of a client that warms no
server up tell nothing: kernels that the server compiles when it first needs them are in them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy

import numpy as np

from meshplan.catalogs.constants.serving import OwnLoad, ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import LAUNCHES
from meshplan.planner.serving.measured.fit.parts import FITTED, PARAMETERS
from meshplan.planner.serving.measured.prediction import FITTED_METRICS, TAIL_METRICS, PreparedRun
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.validation.fitting import Linear
from meshplan.planner.validation.held_out import HeldOut, Key

# Scatter of a metric that no constant explains, in the logarithm: another release of the same engine moves both
# latencies by about 15 %, and the time to first token three times as much from run to run as the time per token.
NOISE = {"ttft_s": 0.2, "tpot_s": 0.08, "latency_s": 0.08, "output_tokens_per_s": 0.08}
# The same for fits to the runs of one server. Residuals about a server's best constants are correlated between loads:
# of the time to first token 0.57 is shared at twice the concurrency, 0.16 at four times, nothing beyond. So one point
# must not move constants that all loads share by much. Chosen with the own spreads on half of the curves,
# and so that eight runs still move the constants that they depend on.
OWN_NOISE = {"ttft_s": 0.2, "tpot_s": 0.04, "latency_s": 0.04, "output_tokens_per_s": 0.04}
STEP = 0.1  # by which constants are perturbed for derivatives, in the logarithm
REACH = 0.3  # by which they are perturbed up and down for secants
MOST_OF_CURVE = 3


class Row:
    """One run with what it is fitted to.

    Args:
        prepared: the run.
        noise: metric → scatter that no constant explains.
        is_own: of the server that plans are made for, so that first tokens tell of it however they were measured.
    """

    def __init__(self, prepared: PreparedRun, noise: Mapping[str, float], *, is_own: bool = False) -> None:
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
        self.tells = np.array([name != "ttft_s" or run.warms_up or is_own for name in self.metrics], dtype=bool)
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
            if name in LAUNCHES and not LAUNCHES[name](self.prepared.run.shape):
                continue
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
    """The metrics of the rows, linearised at the θ of their keys, and the row of each; not those that do not fit
    or tell nothing.

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
        good = row.tells & np.isfinite(here) & np.isfinite(slope).all(axis=1)
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
