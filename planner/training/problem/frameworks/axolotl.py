"""What Axolotl allows, beyond what the mathematics of parallelism asks.

Held against its own schema by tests/conformance/finetuning.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.legality import (
    context_style_rule,
    no_offload_rule,
    own_loss_rules,
    own_optimizer_rule,
)
from meshplan.planner.training.problem.frameworks.pytorch import ZERO_2, data_parallel_only, without_stages

_AXOLOTL = "axolotl 0.19.0"
# Of packed sequences each rank takes the next part, and gathers keys and values head by head (ring-flash-attn's
# llama3_flash_attn_varlen): its messages are those of a ring, its causal work is not evened out.
_STYLE = "ring-plain"


AXOLOTL = without_stages(
    name="axolotl",
    version="0.19.0",
    rules=(
        *data_parallel_only(
            "axolotl",
            f"{_AXOLOTL}: utils/schemas/config.py (its other degrees were not tried)",
            splits_sequences=True,
        ),
        context_style_rule("axolotl", (_STYLE,), f"{_AXOLOTL}: utils/ctx_managers/sequence_parallel.py"),
        LegalityRule(
            name="one_packed_sequence_is_split",
            holds=lambda _, config: (config.context_parallel == 1) | (config.micro_batch_size == 1),
            message="context_parallel > 1 needs micro_batch_size 1 (ring-flash-attn takes one packed sequence)",
            stage="parser",
            source=f"{_AXOLOTL}: utils/schemas/validation.py, check_context_parallel_size",
        ),
        LegalityRule(
            name="split_sequences_are_those_of_shards",
            holds=lambda _, config: (config.context_parallel == 1) | (config.zero_stage >= ZERO_2),
            message="context_parallel > 1 needs zero_stage 2 or 3 (over replicas it was not tried)",
            stage="run time",
            source=f"{_AXOLOTL}: monkeypatch/accelerate/parallelism_config.py",
        ),
        LegalityRule(
            name="split_sequences_of_attention_alone",
            holds=lambda shape, config: (config.context_parallel == 1) | (shape.num_recurrent_layers == 0),
            message="context_parallel > 1 with recurrent layers was not tried",
            stage="run time",
            source=f"{_AXOLOTL}: utils/schemas/validation.py (it warns of hybrids)",
        ),
        LegalityRule(
            name="replicated_or_sharded",
            holds=lambda _, config: np.where(
                config.zero_stage >= ZERO_2,
                config.data_parallel_shard * config.context_parallel > 1,
                config.zero_stage == 0,
            ),
            message="zero_stage 0 (replicas), or 2 and 3 (FSDP2) with data_parallel_shard × context_parallel > 1",
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
    context_parallel_style=_STYLE,
    is_eager=True,  # transformers' models, without torch_compile
)
