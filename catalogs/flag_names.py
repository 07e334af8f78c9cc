"""What command lines, papers and benchmarks call a key of ours, so that a file that uses their word is told the key.

Of a word the ends that flags have (``--tensor-model-parallel-size``) are left away first.
"""

from __future__ import annotations

from collections.abc import Collection

_ENDS = ("_world_size", "_size", "_degree")
# Word → the keys that may be meant, of which a section knows some: Megatron-LM's arguments.py, TorchTitan's
# JobConfig, vLLM's and SGLang's server arguments (their releases: ``meshplan catalog support``), the abbreviations of
# papers (arXiv:2104.04473), InferenceMAX's columns (isl, osl, dpa).
_MEANT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tp", "tensor_model_parallel"), ("tensor_parallel",)),
    **dict.fromkeys(("pp", "pipeline_model_parallel"), ("pipeline_parallel",)),
    "dp": ("data_parallel", "attention_data_parallel"),
    **dict.fromkeys(("dpa", "adp", "dp_attention"), ("attention_data_parallel",)),
    **dict.fromkeys(("dp_shard", "data_parallel_shard"), ("data_parallel_shard", "data_parallel")),
    "cp": ("context_parallel",),
    **dict.fromkeys(("ep", "expert_model_parallel"), ("expert_parallel",)),
    "etp": ("expert_tensor_parallel",),
    **dict.fromkeys(("vpp", "vp", "virtual_pipeline_model_parallel"), ("virtual_pipeline_stages",)),
    "sp": ("sequence_parallel",),
    "fsdp": ("data_parallel_shard",),
    "hpz": ("zero_hpz_partition_size",),
    "zero": ("zero_stage",),
    "recompute": ("activation_recompute",),
    **dict.fromkeys(("graphs", "enforce_eager"), ("cuda_graphs",)),
    "schedule": ("pipeline_schedule",),
    **dict.fromkeys(("mbs", "micro_batch"), ("micro_batch_size",)),
    **dict.fromkeys(("gbs", "global_batch"), ("global_batch_size",)),
    **dict.fromkeys(("ga", "gradient_accumulation_steps", "num_micro_batches"), ("num_microbatches",)),
    **dict.fromkeys(("seq_len", "seqlen", "seq_length", "max_seq_len"), ("sequence_length",)),
    **dict.fromkeys(("world", "world_size", "num_gpus", "n_gpus", "ngpus"), ("num_devices",)),
    **dict.fromkeys(("gpus_per_node", "num_gpus_per_node", "nproc_per_node"), ("devices_per_node",)),
    **dict.fromkeys(("isl", "input_len", "random_input_len"), ("input_length",)),
    **dict.fromkeys(("osl", "output_len", "random_output_len"), ("output_length",)),
    **dict.fromkeys(("qps", "rps", "request_rate"), ("request_rate_per_s",)),
    "max_concurrency": ("concurrency",),
    "num_prompts": ("num_requests",),
    **dict.fromkeys(("num_tokens", "total_tokens", "train_tokens", "training_tokens"), ("num_training_tokens",)),
    **dict.fromkeys(("engine", "framework", "backend"), ("target",)),
    **dict.fromkeys(("adapter", "lora", "peft", "finetune", "fine_tuning", "finetuning"), ("phase", "lora_rank")),
    **dict.fromkeys(("dtype", "torch_dtype"), ("precision", "quantization")),
}


def bare(word: str) -> str:
    """A word as the table has it.

    >>> bare("--tensor-model-parallel-size"), bare("TP")
    ('tensor_model_parallel', 'tp')
    """
    plain = word.lower().lstrip("-").replace("-", "_")
    return next((plain.removesuffix(end) for end in _ENDS if plain.endswith(end)), plain)


def keys_meant(word: str, known: Collection[str]) -> tuple[str, ...]:
    """The ``known`` keys that somebody else's word means; empty where it means none of them.

    >>> keys_meant("tp_size", {"tensor_parallel"}), keys_meant("tp_size", {"objective"})
    (('tensor_parallel',), ())
    """
    plain = word.lower().lstrip("-").replace("-", "_")
    meant = _MEANT.get(plain) or _MEANT.get(bare(word)) or (plain, bare(word))
    return tuple(key for key in dict.fromkeys(meant) if key in known and key != word)
