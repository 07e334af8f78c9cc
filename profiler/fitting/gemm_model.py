"""The three-parameter model of a matrix product's time, fitted to measured products.

m×k by k×n on one device, with ⌈·⌉ rounding up to the tile of 128::

    time = ((2·⌈m⌉·⌈n⌉·(k + k₀)/R)⁴ + (bytes/B)⁴)^¼,    bytes = element·(m·k + k·n) + 2·m·n

R is the rate of a large product, B the rate at which operands stream, k₀ the inner length that costs as much as
filling the pipeline. The planner evaluates the same equation (``meshplan.planner.training.estimator.compute.gemm_s``; a
test holds the two together), the profiler only fits it.

There is no launch term, because the planner adds the host's time per layer separately. Products shorter than
:data:`MIN_TIME_S` are mostly launch and are left out of the fit, as are those smaller than :data:`MIN_DIMENSION` in
any direction, which no training step has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.surfaces.time_tables import smooth_maximum
from meshplan.profiler.fitting.least_squares import FloatArray, RelativeError, fit_positive, held_out, relative_error

GEMM_TILE = 128
OUTPUT_BYTES = 2.0  # results leave in 16 bits at every precision
MIN_DIMENSION = 256
MIN_TIME_S = 20e-6
HELD_OUT_FRACTION = 0.2
MIN_FOR_FIFTH = 100  # a fifth of fewer would be too few to take quantiles of
MIN_SAMPLES = 10  # three parameters and an error need some points each
_START_SATURATION = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSamples:
    """Measured products: arrays of one length.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: inner length.
        time_s: median time, seconds.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    time_s: FloatArray

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def flops_per_s(self) -> FloatArray:
        """Useful FLOP/s, 2·m·n·k over the time."""
        return 2.0 * self.m * self.n * self.k / self.time_s

    def where(self, mask: np.ndarray) -> GemmSamples:
        """The samples under a mask."""
        return GemmSamples(m=self.m[mask], n=self.n[mask], k=self.k[mask], time_s=self.time_s[mask])

    def training_size(self) -> GemmSamples:
        """The samples that the model is for; see the module's text."""
        smallest = np.minimum(np.minimum(self.m, self.n), self.k)
        return self.where((smallest >= MIN_DIMENSION) & (self.time_s >= MIN_TIME_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedGemm:
    """A fitted curve.

    Args:
        rate_flops_per_s: R.
        bandwidth_bytes_per_s: B.
        inner_saturation: k₀, in elements.
        residual: error on the products of the fit.
        held_out_error: on a random fifth of the products that this fit did not see.
        num_samples: products that the shipped parameters were fitted to (all of them).
    """

    rate_flops_per_s: float
    bandwidth_bytes_per_s: float
    inner_saturation: float
    residual: RelativeError
    held_out_error: RelativeError
    num_samples: int


def gemm_time_s(parameters: FloatArray, samples: GemmSamples, *, element_bytes: float) -> FloatArray:
    """Predicted seconds for ``parameters`` (R, B, k₀), [n]."""
    rate, bandwidth, saturation = parameters
    tiles = np.ceil(samples.m / GEMM_TILE) * np.ceil(samples.n / GEMM_TILE) * GEMM_TILE**2
    compute = 2.0 * tiles * (samples.k + saturation) / rate
    operands = element_bytes * (samples.m * samples.k + samples.k * samples.n)
    memory = (operands + OUTPUT_BYTES * samples.m * samples.n) / bandwidth
    return smooth_maximum(compute, memory)


def fit_gemm(samples: GemmSamples, *, element_bytes: float, seed: int = 0) -> FittedGemm:
    """Fit R, B and k₀ to training-size products, and say how well a fit predicts products it has not seen.

    Args:
        samples: measured products; small ones are left out.
        element_bytes: size of one operand element, scales of block formats included.
        seed: for the random fifth that is held out.

    Raises:
        ValueError: fewer than ten products are large enough.
    """
    used = samples.training_size()
    if len(used) < MIN_SAMPLES:
        raise ValueError(
            f"{len(used)} of {len(samples)} products are large enough for a fit; measure at least {MIN_SAMPLES}"
        )
    final = _fitted(used, element_bytes)
    rate, bandwidth, saturation = (float(parameter) for parameter in final)
    return FittedGemm(
        rate_flops_per_s=rate,
        bandwidth_bytes_per_s=bandwidth,
        inner_saturation=saturation,
        residual=relative_error(gemm_time_s(final, used, element_bytes=element_bytes), used.time_s),
        held_out_error=_held_out_error(used, element_bytes, seed),
        num_samples=len(used),
    )


def _held_out_error(samples: GemmSamples, element_bytes: float, seed: int) -> RelativeError:
    """Error on a random fifth that a fit has not seen; of a few products each one in turn is left out."""
    count = len(samples)
    if count >= MIN_FOR_FIFTH:
        masks = [held_out(count, fraction=HELD_OUT_FRACTION, seed=seed)]
    else:
        masks = list(np.eye(count, dtype=bool))
    predicted, measured = [], []
    for hidden in masks:
        trial = _fitted(samples.where(~hidden), element_bytes)
        unseen = samples.where(hidden)
        predicted.append(gemm_time_s(trial, unseen, element_bytes=element_bytes))
        measured.append(unseen.time_s)
    return relative_error(np.concatenate(predicted), np.concatenate(measured))


def fastest(*tables: GemmSamples) -> GemmSamples:
    """For each shape the fastest of several kernels with the same precision, as a library would choose."""
    best: dict[tuple[float, float, float], float] = {}
    for table in tables:
        for *shape, time_s in zip(table.m, table.n, table.k, table.time_s, strict=True):
            key = (float(shape[0]), float(shape[1]), float(shape[2]))
            best[key] = min(float(time_s), best.get(key, np.inf))
    m, n, k = np.array(sorted(best)).T
    return GemmSamples(m=m, n=n, k=k, time_s=np.array([best[key] for key in sorted(best)]))


def _fitted(samples: GemmSamples, element_bytes: float) -> FloatArray:
    operands = element_bytes * (samples.m * samples.k + samples.k * samples.n) + OUTPUT_BYTES * samples.m * samples.n
    # The best rate and the best bandwidth that any product reached: each term alone explains some of the products.
    fastest_rate, fastest_bandwidth = (
        float(np.quantile(values, 0.9)) for values in (samples.flops_per_s, operands / samples.time_s)
    )
    return fit_positive(
        lambda parameters: gemm_time_s(parameters, samples, element_bytes=element_bytes),
        samples.time_s,
        np.array([fastest_rate, fastest_bandwidth, _START_SATURATION]),
    )
