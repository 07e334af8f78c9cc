"""Times of the fused mixture-of-experts layer on one device, interpolated from published measurements.

One surface per device, quantization and framework: a formula, a correction by size, and a correction by shape::

    base = t₀ + t_e·E_d + t_n·n + ((2·m·rows·H·I/R)⁴ + (bytes/B)⁴)^¼
    bytes = A·m·H·I·element + P·(H·(2 + element) + 2·m·I)

with n tokens that arrive at the group of ep devices, k experts each, of E experts E_d = E/ep on this device; H and I
the hidden size and the experts' size on this device (after tensor parallelism); m = 3 products with a gate, 2 without;
P = F·n·k/ep pairs of token and expert here, A experts that get a token, rows the pairs padded to tiles of 64 per
expert. F is the load of the fullest device over the mean, 1 when routing is balanced.

log(measured/base) is a grid over P/E_d, E_d, H, I and skew, plus, for shapes (H, I, k, E, ep, m) that were measured
themselves, which are the published models at their degrees of parallelism, a curve over n. The times of a shape are
then made to rise with n. Beyond the measured n they grow as the formula does.

Measured skew: balanced routing, and experts whose loads follow a power law with exponent 1.01 and 1.2, timed on the
fullest device of the group. F is estimated from the law's mean and variance as 1 + cv·√(2·ln ep·(1 − 1/ep)/E_d).

The law's tables leave more experts without a token than tokens do that choose by themselves: 16 tokens with 8 of 128
experts each hit 57 there and 82 here (:func:`experts_of_law`, :func:`distinct_experts`). Few tokens take as long as the
weights that they read, so that such a table is too fast for them. Where nothing but the law was timed (vLLM 0.12 and
0.14, A100), ``by_choice`` takes its times × base(A)/base(A'), where A' is smaller than A by the ratio of the two, and
those of balanced routing, which nobody measured, are the law's corrected so as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshplan.catalogs.surfaces.files import Rows, SurfaceFile
from meshplan.catalogs.surfaces.grid import FloatArray, Knots, grid_from_row, grid_row, grid_value, sparse_from_row
from meshplan.catalogs.surfaces.known_times import KnownTimes
from meshplan.catalogs.surfaces.time_tables import STEP, smooth_maximum

SURFACES = SurfaceFile("expert_surfaces.json", key=("device", "quantization", "framework"))
# Fields that a row stores as they are, and as rounded numbers.
_TEXTS = ("device", "quantization", "framework", "kernel", "source")
_ERRORS = ("median_error", "p90_error", "new_shape_median_error", "new_shape_p90_error")
# Bytes of a weight with its scales: 16 elements share one byte (nvfp4), 32 (mxfp4), 128 and more (others).
ELEMENT_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "w4a16_mxfp4": 0.53125,
    "w4a8_mxfp4_mxfp8": 0.53125,
    "int4_wo": 0.5625,
}
TILE_ROWS = 64
ACTIVATION_BYTES = 2.0
GATED_PRODUCTS, PLAIN_PRODUCTS = 3, 2
# Tokens at which the tables were measured: a shape's curve has its points there.
TOKENS = np.array(
    [
        *(1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768),
        *(1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
    ],
    dtype=float,
)
# Tokens at which the correction by shape is stored.
SHAPE_TOKENS = np.array([1.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 16384.0])
SHAPE_STEP = 0.03  # resolution of a stored correction by shape, in log(time)
SKEW_KNOTS = np.array([1.0, 2.0])  # balanced, skewed
SKEWED = 1.01  # the mildest measured exponent: from here on routing counts as skewed
# The loads of the power law reach from one token to this share of all; from 0.01 to 2 where there are few tokens.
_LARGEST_SHARE = 0.8
_FEW_LOADS = (0.01, 2.0)
# Loads that are rounded to the next number of tokens; those of few tokens end below the last.
_ROUNDED_UP = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5)
_SINGULAR = 1e-6


class ExpertShape(NamedTuple):
    """The routed experts of one layer over a group of devices.

    Args:
        hidden_size: the model's.
        expert_size: intermediate size of an expert on a device, after tensor parallelism.
        top_k: experts of a token.
        num_experts: routed experts of the layer, on all devices.
        expert_parallel: devices that share them.
        products: matrices of an expert: three gated (SwiGLU), or two.
    """

    hidden_size: int
    expert_size: int
    top_k: int
    num_experts: int
    expert_parallel: int = 1
    products: int = GATED_PRODUCTS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSurface:
    """The fused experts of one layer on one device, with routing's permutation, without the exchange between devices.

    Args:
        device: slug.
        quantization: a key of :data:`ELEMENT_BYTES`.
        framework: ``trtllm``, ``vllm`` or ``sglang``.
        parameters: R FLOP/s, B bytes/s, t₀, t_e and t_n seconds.
        knots: grid positions in P/E_d, E_d, H, I and skew.
        corrections: log(measured/base) on the grid.
        touched: knots that a measurement touched.
        shapes: shapes that were measured themselves → further correction, [tokens, skew].
        kernel: framework and versions.
        num_samples: measurements that it was fitted to.
        median_error: |predicted/measured − 1| on a random fifth of the measurements that a fit had not seen.
        p90_error: 90th percentile of the same.
        new_shape_median_error: the same on a random fifth of the shapes, of which a fit had seen nothing.
        new_shape_p90_error: 90th percentile of the same.
        source: citation.
        known: what it was asked before.
    """

    device: str
    quantization: str
    framework: str
    parameters: tuple[float, ...]
    knots: Knots
    corrections: FloatArray
    touched: NDArray[np.bool_]
    shapes: Mapping[ExpertShape, FloatArray]
    kernel: str
    num_samples: int
    median_error: float
    p90_error: float
    new_shape_median_error: float
    new_shape_p90_error: float
    source: str
    known: KnownTimes = field(default_factory=KnownTimes, repr=False)

    @property
    def has_balanced(self) -> bool:
        """Whether balanced routing was timed, besides the power law."""
        return bool(self.touched[..., 0].any())

    def time_s(
        self,
        num_tokens: ArrayLike,
        shape: ExpertShape,
        *,
        skew: float = 0.0,
        load_factor: float | None = None,
        by_choice: bool = False,
    ) -> FloatArray:
        """Seconds of one layer's experts on the fullest device, shape of ``num_tokens``; never falls with it.

        Args:
            num_tokens: arriving at the whole expert-parallel group, before they are multiplied by ``top_k``.
            shape: of the experts.
            skew: exponent of the power law of the experts' loads; 0 is balanced, 1.01 and 1.2 were measured.
            load_factor: load of the fullest device over the mean where it is known, in place of ``skew``.
            by_choice: where nothing but the law was timed, its times on as many experts as tokens hit that choose by
                themselves.
        """
        tokens = np.asarray(num_tokens, dtype=float)
        if load_factor is not None:
            return self._at(shape, 0.0, tokens * load_factor)
        if skew <= 0.0 or skew >= SKEWED:
            return self._at(shape, max(skew, 0.0), tokens, by_choice=by_choice)
        share, skewed = skew / SKEWED, self._at(shape, SKEWED, tokens, by_choice=by_choice)
        between = (1.0 - share) * np.log(self._at(shape, 0.0, tokens)) + share * np.log(skewed)
        return np.asarray(np.exp(between))

    def _at(self, shape: ExpertShape, skew: float, tokens: FloatArray, *, by_choice: bool = False) -> FloatArray:
        return self.known.of(self._time_s, shape=shape, skew=skew, tokens=tokens, by_choice=by_choice)

    def _time_s(self, shape: ExpertShape, skew: float, tokens: FloatArray, by_choice: bool) -> FloatArray:
        log_times = _curve(self, shape, skew, by_choice)
        inside = np.clip(tokens, TOKENS[0], TOKENS[-1])
        growth = self.base_s(shape, skew, np.atleast_1d(np.maximum(tokens, TOKENS[0]))) / self.base_s(
            shape, skew, np.atleast_1d(inside)
        )
        return np.asarray(np.exp(np.interp(np.log(inside), np.log(TOKENS), log_times)) * growth.reshape(tokens.shape))

    def base_s(self, shape: ExpertShape, skew: float, tokens: FloatArray) -> FloatArray:
        """The formula, [n]."""
        columns = tuple(np.full(len(tokens), float(value)) for value in shape)
        features = expert_features(tokens, columns, np.full(len(tokens), skew))
        return expert_formula(np.asarray(self.parameters), features, element_bytes=ELEMENT_BYTES[self.quantization])

    def log_times(self, shape: ExpertShape, skew: float, *, by_choice: bool = False) -> FloatArray:
        """Log seconds at :data:`TOKENS`, made to rise; ``by_choice`` as in :meth:`time_s`."""
        columns = tuple(np.full(len(TOKENS), float(value)) for value in shape)
        features = expert_features(TOKENS, columns, np.full(len(TOKENS), skew))
        parameters, element_bytes = np.asarray(self.parameters), ELEMENT_BYTES[self.quantization]
        values = np.log(expert_formula(parameters, features, element_bytes=element_bytes))
        values = values + grid_value(self.knots, self.corrections, grid_points(features))
        if shape in self.shapes:
            known = self.shapes[shape][:, int(skew > 0.0)]
            values = values + np.interp(np.log(TOKENS), np.log(SHAPE_TOKENS), known)
        if not self.has_balanced and (by_choice or skew <= 0.0):
            values = values + self._log_more_experts(shape, max(skew, SKEWED))
        below = np.maximum.accumulate(values)
        above = np.flip(np.minimum.accumulate(np.flip(values)))
        return np.asarray(0.5 * (below + above))

    def _log_more_experts(self, shape: ExpertShape, skew: float) -> FloatArray:
        """log(base/base of the experts that the law's tables hit), at :data:`TOKENS`: base takes those of choice."""
        columns, exponents = tuple(np.full(len(TOKENS), float(value)) for value in shape), np.full(len(TOKENS), skew)
        features = expert_features(TOKENS, columns, exponents)
        of_law = experts_of_law(TOKENS, columns[2], columns[3], exponents)
        share = np.minimum(of_law / distinct_experts(TOKENS, top_k=shape.top_k, num_experts=shape.num_experts), 1.0)
        parameters, element_bytes = np.asarray(self.parameters), ELEMENT_BYTES[self.quantization]
        more, fewer = (
            expert_formula(parameters, one, element_bytes=element_bytes)
            for one in (features, replace(features, active=share * features.active))
        )
        return np.asarray(np.log(more / fewer))


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestExperts:
    """The fastest of several frameworks' kernels for each request; see :meth:`ExpertSurface.time_s`."""

    surfaces: tuple[ExpertSurface, ...]

    def time_s(self, num_tokens: ArrayLike, shape: ExpertShape, **routing: Any) -> FloatArray:
        """Seconds, the least of the surfaces."""
        return np.asarray(np.min([surface.time_s(num_tokens, shape, **routing) for surface in self.surfaces], axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFeatures:
    """What the formula and the grid are functions of, flat arrays of one length."""

    tokens: FloatArray
    hidden: FloatArray
    expert_size: FloatArray
    local_experts: FloatArray
    products: FloatArray
    pairs: FloatArray
    active: FloatArray
    skewed: NDArray[np.bool_]


def expert_features(tokens: FloatArray, shape: tuple[FloatArray, ...], skew: FloatArray) -> ExpertFeatures:
    """The features of ``tokens`` on shapes (H, I, k, E, ep, products) with exponents ``skew``, all [n]."""
    hidden, expert_size, top_k, experts, devices, products = shape
    local = experts / devices
    mean = tokens * top_k / devices
    pairs = mean * load_of_fullest(tokens, top_k, experts, devices, skew)
    # Balanced tables spread the tokens evenly: each expert gets one before any gets two.
    active = np.where(skew > 0.0, local * (1.0 - np.exp(-pairs / local)), np.minimum(pairs, local))
    return ExpertFeatures(
        tokens=tokens,
        hidden=hidden,
        expert_size=expert_size,
        local_experts=local,
        products=products,
        pairs=pairs,
        active=active,
        skewed=skew > 0.0,
    )


def distinct_experts(tokens: FloatArray, *, top_k: int, num_experts: int) -> FloatArray:
    """Expected number of distinct experts that ``tokens`` visit under even routing: E·(1 − (1 − k/E)^T).

    >>> distinct_experts(np.array([1.0, 1e6]), top_k=8, num_experts=256).round(3).tolist()
    [8.0, 256.0]
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def load_of_fullest(
    tokens: FloatArray, top_k: FloatArray, experts: FloatArray, devices: FloatArray, skew: FloatArray
) -> FloatArray:
    """F of the module's text, at most what one device can get: every token's choices that fit on it."""
    exponent = np.where(skew > 0.0, skew, SKEWED)
    ratio = _largest_load(tokens, top_k, experts)
    mean = _moment(ratio, exponent, 1.0)
    deviation = np.sqrt(np.maximum(_moment(ratio, exponent, 2.0) / mean**2 - 1.0, 0.0))
    local = experts / devices
    fullest = 1.0 + deviation * np.sqrt(2.0 * np.log(devices) * (1.0 - 1.0 / devices) / local)
    most = np.minimum(top_k, local) * devices / top_k
    return np.where(skew > 0.0, np.minimum(fullest, np.maximum(most, 1.0)), 1.0)


def experts_of_law(tokens: FloatArray, top_k: FloatArray, experts: FloatArray, exponent: FloatArray) -> FloatArray:
    """Experts, of all devices, that get a token in a table of the power law, [n].

    Its loads x are drawn, made to add up to the pairs T·k and rounded; pairs that rounding leaves over go one by one to
    the fullest experts, and past these to empty ones::

        max(E·P(s·x ≥ 1/2), T·k − E·Σ_j P(s·x ≥ j − 1/2)),    s = T·k/(E·mean of x)

    (power_law_logits_v3 of AIConfigurator's collectors). The sum is needed where there are few tokens alone, whose
    loads end early.

    >>> experts_of_law(*(np.array([one]) for one in (16.0, 8.0, 128.0, 1.01))).round().tolist()
    [57.0]
    """
    ratio = _largest_load(tokens, top_k, experts)
    scale = tokens * top_k / experts / _moment(ratio, exponent, 1.0)

    def reach(load: float) -> FloatArray:
        level = np.clip(load / scale, 1.0, ratio) ** (1.0 - exponent)
        end = ratio ** (1.0 - exponent)
        return np.asarray((level - end) / (1.0 - end))

    rounded = sum((reach(load) for load in _ROUNDED_UP), np.zeros_like(tokens))
    left_over = np.where(tokens * top_k > experts, 0.0, tokens * top_k - experts * rounded)
    return np.asarray(np.clip(np.maximum(experts * reach(_ROUNDED_UP[0]), left_over), 1.0, experts))


def _largest_load(tokens: FloatArray, top_k: FloatArray, experts: FloatArray) -> FloatArray:
    """Largest over smallest load of an expert that the law draws."""
    many = tokens * top_k > experts
    least, most = _FEW_LOADS
    return np.asarray(np.where(many, np.maximum(_LARGEST_SHARE * tokens, 1.5), most / least))


def _moment(ratio: FloatArray, exponent: FloatArray, order: float) -> FloatArray:
    """Mean of x^order where x has the density x^−exponent on [1, ratio]."""
    rest = 1.0 - exponent
    rest = np.where(np.abs(rest) < _SINGULAR, _SINGULAR, rest)
    power = np.where(np.abs(order + rest) < _SINGULAR, _SINGULAR, order + rest)
    return np.asarray(rest / power * (ratio**power - 1.0) / (ratio**rest - 1.0))


def expert_formula(parameters: FloatArray, features: ExpertFeatures, *, element_bytes: float) -> FloatArray:
    """The formula of the module's text for (R, B, t₀, t_e, t_n), seconds, [n]."""
    rate, bandwidth, launch_s, expert_s, token_s = parameters
    each = features.pairs / features.local_experts
    rows = np.maximum(np.ceil(each / TILE_ROWS) * TILE_ROWS * features.active, features.pairs)
    matrix = features.products * features.hidden * features.expert_size
    moved = features.active * matrix * element_bytes + features.pairs * (
        features.hidden * (ACTIVATION_BYTES + element_bytes)
        + ACTIVATION_BYTES * features.products * features.expert_size
    )
    busy = smooth_maximum(2.0 * rows * matrix / rate, moved / bandwidth)
    return np.asarray(launch_s + expert_s * features.local_experts + token_s * features.tokens + busy)


def grid_points(features: ExpertFeatures) -> tuple[FloatArray, ...]:
    """Coordinates on the grid: P/E_d, E_d, H, I and skew."""
    each = features.pairs / features.local_experts
    skew = np.where(features.skewed, SKEW_KNOTS[1], SKEW_KNOTS[0])
    return each, features.local_experts, features.hidden, features.expert_size, skew


def expert_surface(device: str, quantization: str, framework: str = "any") -> ExpertSurface | FastestExperts | None:
    """The shipped surface; None where there is none.

    Args:
        device: slug.
        quantization: a key of :data:`ELEMENT_BYTES`.
        framework: ``trtllm``, ``vllm``, ``sglang``, or ``any`` for the fastest of those that were measured.
    """
    found = tuple(SURFACES.measured(_surface, device, quantization, framework))
    return FastestExperts(surfaces=found) if len(found) > 1 else next(iter(found), None)


@lru_cache(maxsize=4096)
def _curve(surface: ExpertSurface, shape: ExpertShape, skew: float, by_choice: bool) -> FloatArray:
    return surface.log_times(shape, skew, by_choice=by_choice)


def _surface(rows: Rows) -> ExpertSurface:
    row = rows[-1]
    knots = tuple(np.array(positions, dtype=float) for positions in row["knots"])
    corrections, touched = grid_from_row(row["grid"], tuple(len(positions) for positions in knots))
    sizes = (len(row["shapes"]), len(SHAPE_TOKENS), len(SKEW_KNOTS))
    by_shape, known = sparse_from_row(row["by_shape"], sizes)
    shapes = zip(row["shapes"], by_shape, known, strict=True)
    return ExpertSurface(
        parameters=tuple(row["parameters"]),
        knots=knots,
        corrections=corrections,
        touched=touched,
        shapes={ExpertShape(*shape): values for shape, values, there in shapes if there.all()},
        **{name: row[name] for name in (*_TEXTS, *_ERRORS, "num_samples")},
    )


def surface_row(surface: ExpertSurface, shapes: Sequence[ExpertShape]) -> dict[str, Any]:
    """The stored form of a surface in a file that lists ``shapes``."""
    by_shape = np.zeros((len(shapes), len(SHAPE_TOKENS), len(SKEW_KNOTS)))
    known = np.zeros(by_shape.shape, dtype=bool)
    for index, shape in enumerate(shapes):
        if shape in surface.shapes:
            by_shape[index], known[index] = surface.shapes[shape], True
    return {
        **{name: getattr(surface, name) for name in (*_TEXTS, "num_samples") if name != "source"},
        **{name: round(getattr(surface, name), 4) for name in _ERRORS},
        "parameters": [float(f"{parameter:.6g}") for parameter in surface.parameters],
        "grid": grid_row(surface.corrections, surface.touched, step=STEP),
        "by_shape": grid_row(by_shape, known, step=SHAPE_STEP),
    }
