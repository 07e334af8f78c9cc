"""Attention and the other work of a micro-batch, each spread over the ranks in its own way (Zeppelin).

*Notation.* R ranks; document i has l_i tokens. In a group of c ranks its attention takes a_i(c) seconds on each of
them, exchanges of keys and values included. The other work takes g seconds a token, wherever the token lies. Attention
has A_r seconds and n_r tokens on rank r; before it tokens move there, and after it back, so that every rank has L/R of
them, L = Σ l_i; h seconds for each token that a rank receives.

*Objective.*    T = max_r A_r + g·L/R + h·max_r |n_r − L/R|

*Bound.*        T ≥ max(Σ_i min_c c·a_i(c)/R, max_i min_c a_i(c)) + g·L/R

*Method.* Documents by falling work, each in the smallest group in which it ends within a limit, else in the one that
ends first; the best of a few limits around the bound. Groups are aligned: of c ranks from a multiple of c on.

Source: Zeppelin (arXiv:2509.21841): attention by sequence within ranks, nodes or over them, and a remapping of tokens
between its layout and that of the linear modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray

# Limits that are tried, over the bound of attention; 0: each document where it ends first.
_SHARES = (1.0, 1.1, 1.3, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartQuestion:
    """Documents of one micro-batch over all ranks.

    Args:
        attention: size c, a power of two → a_i(c), seconds, [documents].
        tokens: l_i.
        ranks: R, a power of two.
        per_token_s: g.
        per_moved_token_s: h.
        most_tokens: that one rank holds for attention.
    """

    attention: Mapping[int, FloatArray]
    tokens: IntArray
    ranks: int
    per_token_s: float
    per_moved_token_s: float
    most_tokens: float

    @property
    def linear_s(self) -> float:
        """g·L/R."""
        return self.per_token_s * float(self.tokens.sum()) / self.ranks

    def least_attention_s(self) -> float:
        """The bound of max A_r."""
        sizes = sorted(self.attention)
        table = np.stack([self.attention[size] for size in sizes])
        busy = (table * np.array(sizes)[:, None]).min(axis=0).sum() / self.ranks
        return float(max(busy, table.min(axis=0).max()))

    def seconds(self, attention_s: FloatArray, tokens: FloatArray) -> float:
        """T. Args: A_r, [R]; n_r, [R]."""
        moved = np.abs(tokens - float(self.tokens.sum()) / self.ranks).max()
        return float(attention_s.max() + self.linear_s + self.per_moved_token_s * moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Where the attention of each document runs.

    Args:
        groups: (first rank, ranks) of each document.
        attention_s: A_r, [R].
        seconds: T.
        bound_s: no placement takes less.
    """

    groups: tuple[tuple[int, int], ...]
    attention_s: FloatArray
    seconds: float
    bound_s: float


def spread_apart(question: ApartQuestion) -> Apart | None:
    """A group for each document; None where one has room in none."""
    limit = question.least_attention_s()
    found = [one for one in (_placed(question, limit * share) for share in _SHARES) if one is not None]
    return min(found, key=lambda one: one.seconds) if found else None


def _placed(question: ApartQuestion, limit: float) -> Apart | None:
    """Each document in the smallest group in which it ends by the limit, else where it ends first."""
    ranks = question.ranks
    busy, held = np.zeros(ranks), np.zeros(ranks)
    groups: dict[int, tuple[int, int]] = {}
    for document in np.argsort(-question.attention[1], kind="stable").tolist():
        best: tuple[float, int, int] | None = None
        for size in sorted(question.attention):
            own_s, own_tokens = float(question.attention[size][document]), float(question.tokens[document]) / size
            ends = busy.reshape(-1, size).max(axis=1) + own_s
            ends[held.reshape(-1, size).max(axis=1) + own_tokens > question.most_tokens] = np.inf
            at = int(np.argmin(ends))
            if np.isfinite(ends[at]) and (best is None or ends[at] < best[0]):
                best = float(ends[at]), at * size, size
            if best is not None and best[0] <= limit:
                break
        if best is None:
            return None
        end_s, first, size = best
        groups[document] = first, size
        busy[first : first + size] = end_s
        held[first : first + size] += float(question.tokens[document]) / size
    return Apart(
        groups=tuple(groups[document] for document in range(len(question.tokens))),
        attention_s=busy,
        seconds=question.seconds(busy, held),
        bound_s=question.least_attention_s() + question.linear_s,
    )
