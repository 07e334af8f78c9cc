"""What a run meets besides its steps: interruptions, restarts, repairs, checkpoints. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.units import SECONDS_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """Interruptions of jobs as somebody counted them.

    Args:
        per_node_day: λ₁, of one node; a job of n nodes is interrupted n λ₁ times a day, since any node stops it.
        low: least rate that the evidence admits.
        high: largest.
        source: where the rate is from, in words.
    """

    per_node_day: float
    low: float
    high: float
    source: str

    def per_s(self, num_nodes: float) -> float:
        """λ, interruptions per second of a job on that many nodes."""
        return self.per_node_day * num_nodes / SECONDS_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What a checkpoint costs.

    Args:
        block_s: b, the training stands still while it is taken.
        durable_s: w, after that until it can be restored from (the upload; 0 where the writing blocks).
        interval_s: τ, training between two checkpoints; None: the best.
    """

    block_s: float
    durable_s: float = 0.0
    interval_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """How often a job stops, and what follows.

    Args:
        per_s: λ, interruptions per second while the job trains or starts.
        restart_s: R, from the interruption to the first new step: detection, scheduling, loading, warm-up.
        broken_share: share of interruptions after which a node needs repair or replacement.
        repair_s: mean time until such a node is back.
        spares: nodes that stand by.
        late_share: share of interruptions whose damage is older than they are (silent corruption).
        late_s: age of that damage: checkpoints taken since are of no use.
    """

    per_s: float
    restart_s: float
    broken_share: float = 0.0
    repair_s: float = 0.0
    spares: int = 0
    late_share: float = 0.0
    late_s: float = 0.0
