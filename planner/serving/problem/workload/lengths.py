"""Lengths of requests as a distribution: by mean and spread, by percentiles, or by a histogram.

Each is a quantile function that is linear between its knots, so that draws, means and percentiles follow from one form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Knots of a normal distribution: its share beyond the outermost ones is 1 in 1,000 on either side.
NORMAL_SHARES = np.linspace(0.001, 0.999, 999)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A quantile function, linear between knots.

    Args:
        shares: of requests that are at most so long, rising from 0 to 1.
        tokens: how long, rising.
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def at(self, shares: FloatArray) -> IntArray:
        """Whole tokens, at least one, at some shares: draws, where these are uniform random numbers."""
        return np.maximum(np.rint(self.between(shares)), 1).astype(np.int64)

    def between(self, shares: FloatArray) -> FloatArray:
        """Tokens at some shares, before they are rounded."""
        return np.interp(shares, self.shares, self.tokens)

    @property
    def mean(self) -> float:
        """Tokens of a request on average, before they are rounded."""
        tokens = np.array(self.tokens)
        return float(np.diff(self.shares) @ (tokens[1:] + tokens[:-1]) / 2.0)

    @property
    def shortest(self) -> int:
        """Tokens that every request has."""
        return int(self.at(np.zeros(1))[0])

    @property
    def longest(self) -> int:
        """Tokens that no request exceeds."""
        return int(self.at(np.ones(1))[0])

    def scaled_to(self, mean: float) -> LengthDistribution:
        """The same shape with another mean."""
        factor = mean / self.mean
        return LengthDistribution(shares=self.shares, tokens=tuple(factor * tokens for tokens in self.tokens))


def normal_lengths(mean: float, std: float, *, least: float, most: float | None) -> LengthDistribution:
    """A normal distribution whose draws below and above two limits become these, as load generators draw lengths
    (kubernetes-sigs/inference-perf, ``data.input_distribution``).

    Args:
        mean: before limits, tokens.
        std: before limits, tokens; 0: all are alike.
        least: tokens.
        most: tokens; None: the 999th of 1,000.
    """
    if std == 0.0:
        return LengthDistribution(shares=(0.0, 1.0), tokens=(mean, mean))
    drawn = np.array([NormalDist(mean, std).inv_cdf(share) for share in NORMAL_SHARES])
    tokens = np.clip(drawn, least, drawn[-1] if most is None else most)
    shares = (0.0, *NORMAL_SHARES.tolist(), 1.0)
    return LengthDistribution(shares=shares, tokens=(float(tokens[0]), *tokens.tolist(), float(tokens[-1])))


def lengths_at(percentiles: Mapping[float, float]) -> LengthDistribution:
    """Linear between percentiles, those of 0 and 1 among them.

    >>> lengths_at({0.0: 10, 0.5: 20, 1.0: 100}).mean
    37.5
    """
    shares = sorted(percentiles)
    return LengthDistribution(shares=tuple(shares), tokens=tuple(float(percentiles[share]) for share in shares))


def histogram_lengths(counts: Sequence[int], *, least: float, most: float) -> LengthDistribution:
    """Uniform inside each of some bins of one width between two lengths; bins without requests are left out.

    >>> histogram_lengths([1, 0, 1], least=0, most=30).tokens
    (0.0, 10.0, 20.0, 30.0)
    """
    edges = np.linspace(least, most, len(counts) + 1)
    filled = [i for i, count in enumerate(counts) if count > 0]
    reached = np.concatenate([[0.0], np.cumsum([counts[i] for i in filled])]) / sum(counts)
    shares = [share for i in range(len(filled)) for share in (reached[i], reached[i + 1])]
    tokens = [float(edge) for i in filled for edge in (edges[i], edges[i + 1])]
    return LengthDistribution(shares=tuple(float(share) for share in shares), tokens=tuple(tokens))


def shared_tokens(inputs: IntArray, share: float, prefix_tokens: int | None) -> IntArray:
    """[n] Tokens of each prompt that are a prefix which others have, too."""
    if prefix_tokens is not None:
        return np.minimum(inputs, prefix_tokens)
    return np.floor(inputs * share).astype(np.int64)
