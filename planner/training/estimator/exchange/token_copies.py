"""How many ranks, and how many nodes, does a token reach that visits k experts?

A dispatcher that sends a token once to each place (a rank, a node) sends as many copies as places hold an expert of it;
Megatron-LM's all-to-all sends one for each expert (``MoEAlltoAllTokenDispatcher`` in core/transformer/moe/
token_dispatcher.py: ``permute`` by the routing map).

*Model.* E experts lie in G equal groups (``n_group``), in order, and on n equal places, in order. A token chooses M of
the groups (``topk_group``) and k experts in them, every choice as likely as any other (DeepSeek-V2, arXiv:2405.04434,
section 2.2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.2). A place holds ω = G/n groups: ⌊ω⌋ whole ones and the part
ω − ⌊ω⌋ of one more. With x the chosen groups that it holds, whole or in part, the token misses it in (1 − x/M)^k of all
cases, so that it reaches

    places = n · (1 − E[(1 − x/M)^k]),    the whole ones among x hypergeometric: M of G, ⌊ω⌋ marked

With M = G, x is ω for certain, and the k choices are uniform over the places: n · (1 − (1 − 1/n)^k). A tighter limit
never reaches more: x/M is the mean of a sample without replacement, that of a smaller sample is the same with a
mean-preserving spread (Hoeffding 1963, doi:10.1080/01621459.1963.10500830, section 6), and (1 − x)^k is convex.

A synthetic gate that deals the experts out in turn gives token i the experts k·i to k·i + k − 1, modulo E. With h = E/n
experts on a place such a run begins at each multiple of gcd(k, h) equally often, so that it touches

    places = 1 + (k − gcd(k, h)) / h

Assumes: experts drawn one by one with replacement, where a router draws distinct ones, which reach more places (256
experts on 64 ranks, k = 8: 7.68 for 7.58); places begin where a group begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.core.arrays import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCopies:
    """The experts that a token may visit.

    Args:
        experts_per_token: k.
        num_groups: G, groups of experts.
        groups_per_token: M, groups that the experts of one token lie in at most.
        dealt_experts: E of a gate that deals experts out in turn; None for a router that chooses.
    """

    experts_per_token: float
    num_groups: int = 1
    groups_per_token: int = 1
    dealt_experts: int | None = None

    @classmethod
    def of(cls, moe: MixtureOfExperts, *, in_turn: bool = False) -> TokenCopies:
        """What the router of a model chooses, or what is dealt ``in_turn`` instead."""
        return cls(
            dealt_experts=moe.num_experts if in_turn else None,
            experts_per_token=float(moe.num_experts_per_token),
            num_groups=moe.num_expert_groups,
            groups_per_token=moe.num_groups_per_token,
        )

    def share_sent(self, places: FloatArray) -> FloatArray:
        """Share of the copies of a token that are sent where each of ``places`` gets no more than one, [n].

        >>> eight = TokenCopies(experts_per_token=8.0)
        >>> float(eight.share_sent(np.array(1.0))), round(float(eight.share_sent(np.array(8.0))), 3)
        (0.125, 0.656)
        """
        return np.asarray(self.places_reached(places) / self.experts_per_token)

    def places_reached(self, places: FloatArray) -> FloatArray:
        """Expected number of the ``places`` that a token reaches, [n].

        DeepSeek-V3 over eight nodes, each with one group, and four groups a token:

        >>> v3 = TokenCopies(experts_per_token=8.0, num_groups=8, groups_per_token=4)
        >>> round(float(v3.places_reached(np.array(8.0))), 2)
        3.6
        """
        if self.dealt_experts is not None:
            held = self.dealt_experts / np.asarray(places, dtype=np.float64)
            aligned = np.gcd(int(self.experts_per_token), np.rint(held).astype(np.int64))
            return np.asarray(1.0 + (self.experts_per_token - aligned) / held)
        if self.groups_per_token == self.num_groups:
            return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** self.experts_per_token))
        groups = np.minimum(self.num_groups / np.asarray(places, dtype=np.float64), self.num_groups)
        whole = np.floor(groups).astype(np.int64)
        table = _whole_groups(self.num_groups, self.groups_per_token)
        chosen = np.arange(self.groups_per_token + 1)
        # Of the M − x groups that are left to choose, the one held in part is one of the G − ⌊ω⌋ left to choose from.
        left = np.maximum(self.num_groups - whole, 1)[..., None]
        partly = np.clip((self.groups_per_token - chosen) / left, 0.0, 1.0)
        part = (groups - whole)[..., None]
        missed = partly * self._missed(chosen + part) + (1.0 - partly) * self._missed(chosen)
        return np.asarray(places * (1.0 - np.sum(table[whole] * missed, axis=-1)))

    def _missed(self, groups: FloatArray) -> FloatArray:
        """Probability that no expert lies in ``groups`` of the chosen ones."""
        return np.asarray(np.maximum(1.0 - groups / self.groups_per_token, 0.0) ** self.experts_per_token)


@lru_cache(maxsize=64)
def _whole_groups(num_groups: int, groups_per_token: int) -> FloatArray:
    """Probability that j of the chosen groups are among w given ones, [w, j]."""
    ways = comb(num_groups, groups_per_token)
    return np.array(
        [
            [comb(held, j) * comb(num_groups - held, groups_per_token - j) / ways for j in range(groups_per_token + 1)]
            for held in range(num_groups + 1)
        ]
    )
