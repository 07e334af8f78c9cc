"""What torchtune allows, beyond what the mathematics of parallelism asks.

Held against its own recipes and builders by tests/conformance/finetuning.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.legality import no_offload_rule, own_optimizer_rule
from meshplan.planner.training.problem.frameworks.pytorch import ZERO_2, data_parallel_only, without_stages

_TUNE = "torchtune 0.6.1"

# Our models by the builder of torchtune.models that makes the same layers. Mistral's and Gemma's builders are left out:
# they leave out the sliding window, or cap logits, as the planner's model does not.
TORCHTUNE_BUILDERS = {
    "llama-2-7b": ("llama2", "llama2_7b"),
    "llama-2-13b": ("llama2", "llama2_13b"),
    "llama-2-70b": ("llama2", "llama2_70b"),
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-8b": ("llama3_1", "llama3_1_8b"),
    "llama-3.1-70b": ("llama3_1", "llama3_1_70b"),
    "llama-3.1-405b": ("llama3_1", "llama3_1_405b"),
    "llama-3.2-1b": ("llama3_2", "llama3_2_1b"),
    "llama-3.2-3b": ("llama3_2", "llama3_2_3b"),
    "llama-3.3-70b": ("llama3_3", "llama3_3_70b"),
    "qwen2-7b": ("qwen2", "qwen2_7b"),
    "qwen2.5-0.5b": ("qwen2_5", "qwen2_5_0_5b"),
    "qwen2.5-1.5b": ("qwen2_5", "qwen2_5_1_5b_base"),
    "qwen2.5-3b": ("qwen2_5", "qwen2_5_3b"),
    "qwen2.5-7b": ("qwen2_5", "qwen2_5_7b_base"),
    "qwen2.5-14b": ("qwen2_5", "qwen2_5_14b_base"),
    "qwen2.5-32b": ("qwen2_5", "qwen2_5_32b_base"),
    "qwen2.5-72b": ("qwen2_5", "qwen2_5_72b_base"),
}


TORCHTUNE = without_stages(
    name="torchtune",
    version="0.6.1",
    rules=(
        own_optimizer_rule("torchtune", f"{_TUNE}: recipes/ (optimizers in 8 bits take one device)"),
        *data_parallel_only("torchtune", f"{_TUNE}: recipes/lora_finetune_distributed.py"),
        LegalityRule(
            name="model_has_a_builder",
            holds=lambda shape, config: (config.tensor_parallel >= 1) & (shape.slug in TORCHTUNE_BUILDERS),
            message=f"torchtune builds its own models: one of {', '.join(TORCHTUNE_BUILDERS)}",
            stage="parser",
            source=f"{_TUNE}: torchtune/models/*/_model_builders.py",
        ),
        LegalityRule(
            name="sharded_over_all",
            holds=lambda _, config: np.where(
                config.data_parallel > 1,
                (config.zero_stage >= ZERO_2) & (config.data_parallel_shard == config.data_parallel),
                config.zero_stage == 0,
            ),
            message="several devices always shard (FSDP2: zero_stage 2 or 3, data_parallel_shard = data_parallel), one "
            "device never (zero_stage 0)",
            stage="run time",
            source=f"{_TUNE}: recipes/lora_finetune_distributed.py, _setup_model",
        ),
        no_offload_rule(
            "torchtune",
            "activation_offload_num_layers",
            "enable_activation_offloading needs enable_activation_checkpointing",
            f"{_TUNE}: recipes/lora_finetune_single_device.py",
        ),
        LegalityRule(
            name="offload_needs_shards",
            holds=lambda _, config: np.logical_not(config.parameter_offload) | (config.data_parallel > 1),
            message="parameter_offload (fsdp_cpu_offload) needs several devices",
            stage="run time",
            source=f"{_TUNE}: recipes/lora_finetune_single_device.py (no such key)",
        ),
    ),
    shards_over_context_parallel=True,
    precisions=("bf16",),
    quantised_weights=True,
)
