"""What a Megatron-LM command line states."""

from __future__ import annotations

from meshplan.planner.emit.terms import count, read_all
from meshplan.planner.emit.training.megatron.hybrid import PATTERN
from meshplan.planner.emit.training.megatron.job import FIXED_ARGUMENTS
from meshplan.planner.emit.training.megatron.script import SETTINGS
from meshplan.planner.emit.training.megatron.terms import TERMS
from meshplan.planner.imports.reading import Given, Reading, as_written

SOURCE = "megatron"
_DEFAULT = "not stated; Megatron-LM's default"
_SIZES = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads"})
_TRAINING_SETTINGS = frozenset({setting.flag for setting in SETTINGS if setting.flag})


def recognises(given: Given) -> bool:
    """Whether this is Megatron-LM's."""
    program = " ".join(given.launch.program[:1])
    return (
        "--tensor-model-parallel-size" in given.arguments
        or program.endswith(("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"))
        or given.arguments.keys() >= _SIZES  # scripts of other names, and commands that leave every degree at 1
    )


def read(given: Given) -> Reading:
    """Degrees, batch and precision; the sizes of the model, to find it in the catalog by."""
    reading = Reading(source=SOURCE, target=SOURCE, launch=given.launch)
    reading.take(read_all(TERMS, given.arguments))
    for term in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline_stages", "context_parallel"):
        reading.assume(term, 1, _DEFAULT)
    has_experts = "--num-experts" in given.arguments
    reading.assume("expert_parallel", 1, _DEFAULT)
    # Without the flag experts are split like the rest of the layer.
    default = reading.values["tensor_parallel"] if has_experts else 1
    reading.assume("expert_tensor_parallel", default, "not stated; Megatron-LM takes tensor_parallel")
    reading.assume("sequence_parallel", False, _DEFAULT)
    reading.assume("zero_stage", 0, "no --use-distributed-optimizer")
    reading.assume("activation_recompute", "none", _DEFAULT)
    reading.assume("micro_batch_size", 1, _DEFAULT)
    reading.assume("precision", "fp32", "neither --bf16 nor --fp16")
    if reading.values["pipeline_parallel"] > 1:
        is_interleaved = reading.values["virtual_pipeline_stages"] > 1
        reading.values["pipeline_schedule"] = "interleaved" if is_interleaved else "1f1b"
    if "global_batch_size" not in reading.values:
        reading.assume("num_microbatches", 1, "no --global-batch-size: micro-batch × replicas")
    if "expert_capacity_factor" in reading.values and "--moe-pad-expert-input-to-capacity" not in given.arguments:
        reading.left_out.append("experts not padded to their capacity: a spec is priced with padding")
    if has_experts and "--moe-token-dispatcher-type" not in given.arguments:
        reading.left_out.append("Megatron-LM's all-gather of tokens (its default): a spec is priced with an all-to-all")
    modules = str(given.arguments.get("--recompute-modules", "core_attn"))
    if modules != "core_attn":
        reading.left_out.append(f"--recompute-modules {modules}: selective recomputation is priced for core_attn only")
    positions = str(given.arguments.get("--max-position-embeddings", ""))
    reading.num_positions = int(positions) if positions.isascii() and positions.isdigit() else 0
    known = {key for term in TERMS for key in term.keys} | _TRAINING_SETTINGS | FIXED_ARGUMENTS.keys()
    reading.model_arguments = {flag: value for flag, value in given.arguments.items() if flag not in known}
    try:
        if PATTERN in given.arguments:  # its blocks are the model's, its bars the plan's
            reading.model_arguments |= {PATTERN: str(given.arguments[PATTERN]).replace("|", "")}
        elif "--num-layers" in given.arguments:  # else --model says it
            reading.model_arguments |= {"--num-layers": str(count(given.arguments, "--num-layers"))}
    except ValueError as error:
        reading.report("model", str(error))
    reading.left_out += [
        as_written(flag, value) for flag, value in given.arguments.items() if flag in _TRAINING_SETTINGS
    ]
    return reading
