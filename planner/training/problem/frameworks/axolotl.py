"""What Axolotl allows, beyond what the mathematics of parallelism asks.

Held against its own schema by tests/conformance/finetuning.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.legality import no_offload_rule, own_loss_rules, own_optimizer_rule
from meshplan.planner.training.problem.frameworks.pytorch import ZERO_2, data_parallel_only, without_stages

_AXOLOTL = "axolotl 0.19.0"


AXOLOTL = without_stages(
    name="axolotl",
    version="0.19.0",
    rules=(
        *data_parallel_only("axolotl", f"{_AXOLOTL}: utils/schemas/config.py (its other degrees were not tried)"),
        LegalityRule(
            name="replicated_or_sharded",
            holds=lambda _, config: np.where(
                config.zero_stage >= ZERO_2, config.data_parallel_shard > 1, config.zero_stage == 0
            ),
            message="zero_stage 0 (replicas), or 2 and 3 (FSDP2) with data_parallel_shard > 1",
            stage="parser",
            source=f"{_AXOLOTL}: utils/schemas/fsdp.py, utils/trainer.py (setup_parallelism_envs)",
        ),
        own_optimizer_rule("axolotl", f"{_AXOLOTL}: utils/schemas/ (8-bit optimizers over FSDP were not tried)"),
        *own_loss_rules("axolotl", f"{_AXOLOTL}: integrations/ (its plug-ins for losses were not tried)"),
        no_offload_rule("axolotl", "activation_offload", "its own ways of it were not tried", f"{_AXOLOTL}: schemas/"),
        LegalityRule(
            name="axolotl_offloads_all_layers",
            holds=lambda shape, config: (
                (config.activation_offload_num_layers == 0)
                | ((config.activation_offload_num_layers == shape.num_hidden_layers) & (config.zero_stage == 0))
            ),
            message="activation_offload_num_layers is all layers of the model or none, with zero_stage 0",
            stage="parser",
            source=f"{_AXOLOTL}: core/trainers/mixins/activation_checkpointing.py (under FSDP2 it was not tried)",
            about=("activation_offload_num_layers",),
        ),
    ),
    full_rules=(
        no_offload_rule(
            "axolotl",
            "activation_offload_num_layers",
            "activation_offloading recomputes every layer unless it trains adapters",
            f"{_AXOLOTL}: loaders/model.py, _apply_activation_checkpointing",
        ),
    ),
    shards_over_context_parallel=True,
    precisions=("bf16", "fp16"),
    quantised_weights=True,
    is_eager=True,  # transformers' models, without torch_compile
)
