"""What Accelerate allows, beyond what the mathematics of parallelism asks.

Held against its own plugin classes by tests/conformance/accelerate.
"""

from __future__ import annotations

from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.legality import (
    capacity_rule,
    context_style_rule,
    expert_transport_rules,
    host_only_rule,
    joint_offload_rule,
    no_offload_rule,
    no_vocabulary_parallel,
    own_loss_rules,
    own_optimizer_rule,
    switch_rules,
)
from meshplan.planner.training.problem.frameworks.pytorch import (
    ZERO_2,
    only_one,
    plain_sharding,
    sequence_splits,
    whole_sequences,
    without_stages,
)

_ACCELERATE = "accelerate 1.15.0"


ACCELERATE = without_stages(
    name="accelerate",
    version="1.15.0",
    rules=(
        *ANY_FRAMEWORK.rules,
        only_one("pipeline_parallel", "accelerate", "FSDP2 has no stages", f"{_ACCELERATE}: parallelism_config.py"),
        only_one("expert_parallel", "accelerate", "experts are not spread", f"{_ACCELERATE}: parallelism_config.py"),
        only_one(
            "expert_tensor_parallel", "accelerate", "experts are not split", f"{_ACCELERATE}: parallelism_config.py"
        ),
        whole_sequences("it has no word", f"{_ACCELERATE}: parallelism_config.py"),
        LegalityRule(
            name="sequence_divisible_by_its_splits",
            holds=sequence_splits,
            message="sequence_length must be a multiple of 2 × context_parallel",
            stage="run time",
            source="torch 2.13: distributed/tensor/experimental/_context_parallel (head-tail balancing; read, not run)",
        ),
        LegalityRule(
            name="replicas_are_sharded",
            holds=lambda _, config: (config.data_parallel == 1) | (config.data_parallel_shard > 1),
            message="data_parallel > 1 needs data_parallel_shard > 1",
            stage="parser",
            source=f"{_ACCELERATE}: parallelism_config.py, ParallelismConfig.__post_init__",
        ),
        LegalityRule(
            name="fully_sharded",
            holds=lambda _, config: config.zero_stage >= ZERO_2,
            message="FSDP2 shards optimizer states and gradients together: zero_stage 2 or 3",
            stage="parser",
            source=f"{_ACCELERATE}: utils/dataclasses.py, FullyShardedDataParallelPlugin",
        ),
        *expert_transport_rules("accelerate", f"{_ACCELERATE}: parallelism_config.py"),
        *switch_rules("accelerate", f"{_ACCELERATE}: utils/dataclasses.py"),
        own_optimizer_rule("accelerate", f"{_ACCELERATE}: utils/dataclasses.py (the optimizer is the user's script's)"),
        *own_loss_rules("accelerate", f"{_ACCELERATE}: utils/dataclasses.py (the loss is the user's script's)"),
        capacity_rule("accelerate", "experts are those of the user's model", f"{_ACCELERATE}: parallelism_config.py"),
        context_style_rule("accelerate", ("ring",), f"{_ACCELERATE}: parallelism_config.py (cp_size)"),
        *plain_sharding("accelerate", f"{_ACCELERATE}: utils/dataclasses.py, FullyShardedDataParallelPlugin"),
        no_vocabulary_parallel("accelerate"),
        joint_offload_rule("accelerate", f"{_ACCELERATE}: utils/dataclasses.py (fsdp_offload_params moves all)"),
        no_offload_rule(
            "accelerate",
            "activation_offload_num_layers",
            "it is an argument of TRL's trainers (activation_offloading), not of accelerate launch",
            f"{_ACCELERATE}: utils/dataclasses.py",
        ),
        host_only_rule("accelerate", f"{_ACCELERATE}: utils/dataclasses.py"),
    ),
    shards_over_context_parallel=True,
    precisions=("bf16", "fp16"),
    quantised_weights=True,
    is_eager=True,  # the Trainer of transformers, without torch_compile
)
