"""Which experts of a mixture lie in device memory: their popularity, and a knapsack with its bound.

A token chooses expert e of layer l with probability p[l, e] (rows sum to top_k). T tokens hit it with probability
1 − (1 − p)^T, and the host then reads it once. With room for N experts of equal size the least expected reading is that
of keeping the N largest p: sorted by gain over size, the knapsack's linear relaxation takes whole items, so that its
bound is attained. The order does not depend on T, because 1 − (1 − p)^T rises with p.

An engine that keeps the same number in each layer (``uniform``) loses little: :func:`regret` says how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnHost:
    """Experts of each MoE layer that lie on the host, as tokens meet them.

    Args:
        chances: [L, M] p of those that may lie there.
        share: of these that do.
    """

    chances: FloatArray
    share: float = 1.0

    def hits(self, tokens: FloatArray) -> FloatArray:
        """[T] Expected number of distinct ones that so many tokens of an iteration hit, mean over layers."""
        each = 1.0 - (1.0 - self.chances[None, :, :]) ** np.asarray(tokens, dtype=np.float64)[:, None, None]
        return np.asarray(self.share * each.sum(axis=2).mean(axis=1))

    def any_hit(self, tokens: FloatArray) -> FloatArray:
        """[T] Probability that a layer needs any of them, choices taken as independent."""
        none = self.share * np.log1p(-np.minimum(self.chances, 1.0 - 1e-12)).sum(axis=1)
        return np.asarray(1.0 - np.exp(np.asarray(tokens)[:, None] * none[None, :]).mean(axis=1))

    @property
    def copies(self) -> float:
        """Choices of one token that fall on them, mean over layers; top_k where no expert is on the devices."""
        return float(self.share * self.chances.sum(axis=1).mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Popularity:
    """How tokens choose the experts of a model's MoE layers.

    Args:
        chances: [L, E] p, each layer's in falling order; one layer may stand for all.
        source: where they come from, in words.
        is_known: differs from even routing, so that it is worth choosing by.
    """

    chances: FloatArray
    source: str
    is_known: bool

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.chances.shape[1])

    def on_host(self, num_kept: int, *, by_popularity: bool = True) -> OnHost:
        """The experts of each layer that are not in device memory.

        Args:
            num_kept: experts of each layer in device memory.
            by_popularity: the most popular are kept; else any, so that each is missed in proportion.
        """
        if by_popularity:
            return OnHost(chances=self.chances[:, num_kept:])
        return OnHost(chances=self.chances, share=1.0 - num_kept / self.num_experts)


def even(num_experts: int, top_k: int) -> Popularity:
    """All experts the same."""
    chances = np.full((1, num_experts), top_k / num_experts)
    return Popularity(chances=chances, source="even routing (nothing is known of the model's)", is_known=False)


def from_loads(load: FloatArray, top_k: int, source: str) -> Popularity:
    """From shares of token copies.

    Args:
        load: [L, E] share of a layer's copies on each expert; rows sum to 1.
        top_k: experts of a token.
        source: in words.
    """
    chances = -np.sort(-np.minimum(top_k * np.asarray(load, dtype=np.float64), 1.0), axis=1)
    return Popularity(chances=chances, source=source, is_known=bool(np.ptp(chances) > 0.0))


def zipf(num_experts: int, top_k: int, exponent: float) -> Popularity:
    """A named skew: the r-th expert takes a share in proportion to r^−exponent."""
    shares = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return from_loads((shares / shares.sum())[None, :], top_k, f"zipf {exponent:g}")


def kept_by_knapsack(popularity: Popularity, room: int, *, tokens: float = 1.0) -> tuple[list[int], float, float]:
    """The experts of all layers together that spare the host most reading, for engines that let layers differ.

    Notation: x[l, e] ∈ {0, 1} is 1 where an expert is kept. Objective: min Σ (1 − x)·(1 − (1 − p)^T).
    Constraint: Σ x ≤ room. Bound: the same with 0 ≤ x ≤ 1.

    Args:
        popularity: one row for each MoE layer.
        room: experts that fit, all layers together.
        tokens: T.

    Returns:
        Experts kept in each layer, the expected hits that are left over all layers, and the bound on them.
    """
    gain = 1.0 - (1.0 - popularity.chances) ** tokens
    order = np.argsort(-gain, axis=None, kind="stable")
    whole = min(int(room), order.size)
    layers = np.bincount(order[:whole] // gain.shape[1], minlength=gain.shape[0])
    left = float(gain.sum() - gain.ravel()[order[:whole]].sum())
    fraction = min(float(room), float(order.size)) - whole
    bound = left - fraction * float(gain.ravel()[order[whole]]) if whole < order.size else left
    return layers.tolist(), left, bound


def regret(popularity: Popularity, num_kept: int, *, tokens: float = 1.0) -> float:
    """How much more the host reads where every layer keeps as many than with the knapsack's least, as a share."""
    num_layers = popularity.chances.shape[0]
    _, least, _ = kept_by_knapsack(popularity, num_kept * num_layers, tokens=tokens)
    reads = float(popularity.on_host(num_kept).hits(np.array([tokens]))[0]) * num_layers
    return reads / least - 1.0 if least > 0.0 else 0.0
