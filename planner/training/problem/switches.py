"""Switches of a framework: how it launches, carries and recomputes, and in which format it sums gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


# What ``cuda_graphs`` may be → how the host starts kernels then.
CUDA_GRAPHS: Mapping[str, Launches] = {
    "none": Launches.EAGER,
    "partial": Launches.PARTLY_GRAPHED,
    "full": Launches.GRAPHED,
}
# What selective recompute may compute again, by Megatron-Core's names (0.19.2, transformer_config.py).
CORE_ATTENTION, LAYER_NORM, LATENT_PROJECTION = "core_attn", "layernorm", "mla_up_proj"
DENSE_MLP, EXPERT_ACTIVATION, SHARED_EXPERTS, EXPERT_LAYER = "mlp", "moe_act", "shared_experts", "moe"
RECOMPUTE_MODULES = (
    CORE_ATTENTION,
    LAYER_NORM,
    LATENT_PROJECTION,
    DENSE_MLP,
    EXPERT_ACTIVATION,
    SHARED_EXPERTS,
    EXPERT_LAYER,
)
USUAL_MODULES = (CORE_ATTENTION,)


def in_order(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules that are named, once each, in the order of :data:`RECOMPUTE_MODULES`."""
    named = frozenset(modules)
    return tuple(module for module in RECOMPUTE_MODULES if module in named)


# ``gradient_precision``: how gradients are kept and summed. "default" is the framework's own way.
FRAMEWORKS_OWN = "default"
GRADIENT_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0}


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
