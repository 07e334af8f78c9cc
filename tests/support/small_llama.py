"""The model of the runs over network namespaces: eight layers of Llama, as narrow as a run needs it."""

from __future__ import annotations

from typing import Any


def small_llama(hidden_size: int) -> dict[str, Any]:
    """Its ``config.json``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
