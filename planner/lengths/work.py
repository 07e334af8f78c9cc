"""Time of a micro-batch from the lengths of the documents in it.

    t = fixed + per_token·Σ l + Σ_k per_pair_k·Σ pairs(l, w_k)

over kinds k of layers by their attention window w_k, pairs as in :mod:`.packing`. Matrix products, norms and exchanges
grow with tokens; attention within documents with pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.packing import causal_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Coefficients of a micro-batch's time on one pipeline stage, forward and backward.

    Args:
        per_token_s: seconds for a token.
        per_pair_s: (attention window or None, seconds for a causal pair), for each kind of layer.
        fixed_s: seconds of a micro-batch whatever is in it.
    """

    per_token_s: float
    per_pair_s: tuple[tuple[int | None, float], ...]
    fixed_s: float = 0.0

    def of(self, lengths: IntArray | FloatArray | Sequence[int]) -> FloatArray:
        """Seconds of each document, [n], without the micro-batch's fixed part.

        >>> Work(per_token_s=1.0, per_pair_s=((None, 0.5),)).of([4, 8]).tolist()
        [8.0, 24.0]
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        seconds = self.per_token_s * tokens
        for window, per_pair_s in self.per_pair_s:
            seconds = seconds + per_pair_s * causal_pairs(tokens, window)
        return np.asarray(seconds)

    def to_document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "fixed_s": self.fixed_s,
            "per_token_s": self.per_token_s,
            "per_pair_s": [{"window": window, "seconds": seconds} for window, seconds in self.per_pair_s],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Work:
        """Read back what :meth:`to_document` wrote."""
        return cls(
            fixed_s=document["fixed_s"],
            per_token_s=document["per_token_s"],
            per_pair_s=tuple((row["window"], row["seconds"]) for row in document["per_pair_s"]),
        )
