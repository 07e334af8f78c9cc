"""A training run and a serving run as rows of a file of measured runs, for tests to change."""

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

# A server of one device that was sent a recording.
SERVING_ROW: dict[str, Any] = {
    "id": "served-1",
    "task": "serving",
    "model": {**TRAINING_ROW["model"], "name": "small"},
    "hardware": {"device": "h100-sxm-80gb", "num_devices": 1},
    "precision": "bf16",
    "framework": {"name": "vLLM", "version": "0.19.0"},
    "parallelism": {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1},
    "workload": {"arrival": "trace", "disaggregated": False, "trace": "chat.csv", "request_rate_per_s": 10.0},
    "measured": {"ttft_s": 0.02, "tpot_s": 0.004, "latency_s": 0.2},
}
