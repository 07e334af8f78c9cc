"""Switches of a framework that change how long a step takes but not what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Who carries tokens to their experts unless somebody else is asked.
ALL_TO_ALL = "alltoall"
FUSED_DISPATCHERS = ("deepep", "hybridep")


class Launches(Enum):
    """How the host starts the kernels of a layer."""

    EAGER = "eager"  # one by one
    PARTLY_GRAPHED = "partly-graphed"  # some parts of a layer from CUDA graphs: attention and router, or the MLP
    GRAPHED = "graphed"  # the whole step from one CUDA graph


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPractice:
    """Switches of a framework that change how long a step takes but not what it computes.

    Args:
        launches: see :class:`Launches`.
        fused_dispatch: kernels of their own put tokens in the order of the experts while they travel, and send one copy
            to each domain (DeepEP, HybridEP); otherwise tokens are sorted in memory and an all-to-all sends every copy.
        overlaps_experts: dispatch and combine of one micro-batch run during the compute of another.
    """

    launches: Launches = Launches.EAGER
    fused_dispatch: bool = False
    overlaps_experts: bool = False


AS_IT_COMES = TrainingPractice()
