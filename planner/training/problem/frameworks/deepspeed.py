"""What DeepSpeed allows, beyond what the mathematics of parallelism asks.

Held against its own configuration reader by tests/conformance/deepspeed.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.legality import (
    capacity_rule,
    expert_transport_rules,
    no_offload_rule,
    no_vocabulary_parallel,
    offload_rule,
    own_loss_rules,
    own_optimizer_rule,
    switch_rules,
    whole_weights_rule,
)
from meshplan.planner.training.problem.frameworks.pytorch import (
    ZERO_3,
    only_one,
    plain_sharding,
    whole_sequences,
    without_stages,
)

_SPEED = "deepspeed 0.19.8"


DEEPSPEED = without_stages(
    name="deepspeed",
    version="0.19.8",
    rules=(
        *ANY_FRAMEWORK.rules,
        only_one(
            "pipeline_parallel",
            "deepspeed",
            "stages are built in code (PipelineModule)",
            f"{_SPEED}: runtime/config.py",
        ),
        only_one(
            "context_parallel", "deepspeed", "sequences are split in code (Ulysses)", f"{_SPEED}: runtime/config.py"
        ),
        only_one(
            "expert_parallel", "deepspeed", "experts are placed in code (deepspeed.moe)", f"{_SPEED}: moe/layer.py"
        ),
        only_one("expert_tensor_parallel", "deepspeed", "experts are not split", f"{_SPEED}: moe/layer.py"),
        whole_sequences("AutoTP keeps whole sequences", f"{_SPEED}: runtime/tensor_parallel/config.py"),
        LegalityRule(
            name="shards_are_whole",
            holds=lambda _, config: (config.zero_stage == 0) | (config.data_parallel_shard == config.data_parallel),
            message="states are sharded over all of data_parallel: data_parallel_shard must equal it",
            stage="run time",
            source=f"{_SPEED}: runtime/zero/stage_1_and_2.py",
        ),
        LegalityRule(
            name="tensor_parallel_without_zero_3",
            holds=lambda _, config: (config.tensor_parallel == 1) | (config.zero_stage < ZERO_3),
            message="tensor_parallel (AutoTP) needs zero_stage 0, 1 or 2",
            stage="run time",
            source=f"{_SPEED}: docs, tutorials/autotp-training (read, not run)",
        ),
        *expert_transport_rules("deepspeed", f"{_SPEED}: moe/layer.py"),
        capacity_rule("deepspeed", "experts are built in code (deepspeed.moe)", f"{_SPEED}: moe/layer.py"),
        *switch_rules("deepspeed", f"{_SPEED}: runtime/config.py (its own settings were not tried)"),
        own_optimizer_rule("deepspeed", f"{_SPEED}: runtime/config.py (its other optimizers were not tried)"),
        *own_loss_rules("deepspeed", f"{_SPEED}: runtime/config.py (the loss is the user's script's)"),
        whole_weights_rule("deepspeed", f"{_SPEED}: runtime/config.py (weights are those of the user's script)"),
        *plain_sharding("deepspeed", f"{_SPEED}: runtime/zero/config.py", hpz=True),
        no_vocabulary_parallel("deepspeed"),
        no_offload_rule(
            "deepspeed",
            "activation_offload_num_layers",
            "cpu_checkpointing moves the inputs of recomputed layers alone",
            f"{_SPEED}: runtime/activation_checkpointing/config.py",
        ),
        offload_rule("deepspeed", (1, 2, 3), f"{_SPEED}: runtime/zero/offload_config.py"),
        LegalityRule(
            name="part_of_the_states_needs_zero_3",
            holds=lambda _, config: (
                np.equal(config.optimizer_offload_percent, ALL_STATES) | np.equal(config.zero_stage, ZERO_3)
            ),
            message="optimizer_offload_percent below 100 needs zero_stage 3",
            stage="parser",
            source=f"{_SPEED}: runtime/zero/config.py, offload_ratio_check",
            about=("optimizer_offload_percent",),
        ),
        LegalityRule(
            name="nvme_needs_zero_3",
            holds=lambda _, config: np.not_equal(config.offload_to, "nvme") | (config.zero_stage == ZERO_3),
            message="offload to NVMe needs zero_stage 3",
            stage="run time",
            source=f"{_SPEED}: runtime/zero/offload_config.py (read, not run)",
        ),
    ),
    shards_over_context_parallel=False,
    precisions=("bf16", "fp16"),
    is_eager=True,  # the Trainer of transformers, without torch_compile
)
