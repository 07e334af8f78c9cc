"""A published training run as a row of a file of measured runs, for tests to change."""

from __future__ import annotations

from typing import Any

# Two nodes of eight, tensor × pipeline × data = 2 × 2 × 4; the shapes of a small dense decoder.
TRAINING_ROW: dict[str, Any] = {
    "id": "run-1",
    "task": "training",
    "model": {
        "name": "small",
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "gated_mlp": True,
        "tie_word_embeddings": False,
    },
    "hardware": {"device": "h100-sxm-80gb", "num_devices": 16, "devices_per_node": 8, "inter_node": "8x400Gb/s IB"},
    "precision": "bf16",
    "framework": {"name": "Megatron-Bridge", "version": "26.08"},
    "parallelism": {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "data_parallel": 4,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "activation_recompute": "full",
    },
    "workload": {"sequence_length": 4096},
    "measured": {"iteration_s": 1.0},
}
