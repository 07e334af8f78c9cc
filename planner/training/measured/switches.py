"""The switches of a measured training run: what its row states, else what the scripts of its benchmark set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.constants.training_benchmarks import TrainingBenchmark, choices_of, practice_of
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import (
    ADAMW_8BIT,
    CHUNKED,
    CORE_ATTENTION,
    CUDA_GRAPHS,
    EXPERT_ACTIVATION,
    FRAMEWORKS_OWN,
    GATHERS,
    LAYER_NORM,
    LOSSES,
    OPTIMIZERS,
    SAVING_POLICIES,
    SHARED_EXPERTS,
    USUAL_MODULES,
    WHOLE,
    Launches,
    TrainingPractice,
    in_order,
)
from meshplan.planner.validation.fields import Section, caveats

# Values of a key in ``parallelism`` that states a switch of TrainingPractice.
DISPATCHERS = {"alltoall": False, "deepep": True, "hybridep": True}
# Switch → the key that states it.
ROW_KEYS = {
    "launches": "cuda_graphs",
    "fused_dispatch": "expert_dispatcher",
    "overlaps_experts": "expert_parallel_overlap",
    "overlaps_shared_experts": "shared_expert_overlap",
    "gathers": "parameter_gathers",
    "optimizer": "optimizer",
    "loss": "loss",
    "optimizer_in_backward": "optimizer_in_backward",
    "flash_attention": "flash_attention",
    "expert_group_size": "expert_group_size",
}
# Switch → the words that a row may state for it, and what each means; switches that a row answers with yes or no.
WORDS: Mapping[str, Mapping[str, Any]] = {
    "launches": CUDA_GRAPHS,
    "fused_dispatch": DISPATCHERS,
    "gathers": {name: name for name in GATHERS},
    "optimizer": {name: name for name in OPTIMIZERS},
    "loss": {name: name for name in LOSSES},
}
FLAGS = ("overlaps_experts", "overlaps_shared_experts", "optimizer_in_backward", "flash_attention")
# Keys of ``parallelism``: choices of a plan, switches, and what says them in another way or says more.
CHOICES = frozenset(
    {*ROW_KEYS.values(), "tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"}
    | {"expert_parallel", "expert_tensor_parallel", "sequence_parallel", "virtual_pipeline_stages", "num_microbatches"}
    | {"micro_batch_size", "per_device_batch_size", "local_batch_size", "global_batch_size", "pipeline_schedule"}
    | {"zero_stage", "fsdp", "zero1_group_size", "fsdp_group_size", "data_parallel_over_slices", "mixed_precision_mode"}
    | {"activation_recompute", "activation_offload", "cpu_offload", "drops_tokens", "torch_compile", "method"}
    | {"async_tensor_parallel", "tensor_parallel_comm_overlap", "gradient_reduce_precision"}
    | {"layers_per_stage", "stages", "multi_token_prediction"}
)
# Words of published tables for modules that selective recompute repeats → Megatron-Core's names.
MODULE_WORDS = {
    "norm": LAYER_NORM,
    "act": EXPERT_ACTIVATION,
    "shared_expert": SHARED_EXPERTS,
    "attention": CORE_ATTENTION,
}
# What models that join queries, keys and values in one matrix call it (Qwen, Baichuan, ChatGLM).
JOINED_MATRICES = frozenset({"c_attn", "W_pack", "query_key_value"})

# What published rows say in a caveat, in their own words → the switch that it states.
CAVEATS: Mapping[str, Mapping[str, Any]] = {
    "dispatcher DeepEP": {"fused_dispatch": True},
    "TE + DeepEP": {"fused_dispatch": True},
    "dispatcher A2A": {"fused_dispatch": False},
    "1f1b overlap": {"overlaps_experts": True},
    # NeMo AutoModel's ``fake_balanced_gate`` (FakeBalancedGate in nemo_automodel/components/moe/layers.py, noise 0).
    "balanced gate": {"experts_in_turn": True},
    "each step adds to the one above": {"loss": WHOLE},
    "FlashAttention on": {"flash_attention": True},
    "FlashAttention off": {"flash_attention": False},
    "chunked cross entropy": {"loss": CHUNKED},
    "optimizer in backward": {"optimizer_in_backward": True},
    "fused into the backward": {"optimizer_in_backward": True},
    "8-bit": {"optimizer": ADAMW_8BIT},
    "without optimizer in backward and 8-bit": {"optimizer": FRAMEWORKS_OWN, "optimizer_in_backward": False},
}


def observed_modules(choices: Section) -> tuple[str, ...]:
    """What selective recompute repeats in a measured run, such as ``selective (norm, act)`` or ``mlp, moe_act``.

    A policy of JAX leaves what it does not save. Words that name nothing leave the usual attention core.
    """
    stated = str(choices.values.get("activation_recompute") or "").lower()
    if stated in SAVING_POLICIES:
        return SAVING_POLICIES[stated]
    words = re.findall(r"[a-z_]+", stated)
    named = {MODULE_WORDS.get(word, word) for word in words}
    return in_order(named) or USUAL_MODULES


def observed_benchmark(row: Mapping[str, Any], precision: str, phase: Phase) -> TrainingBenchmark:
    """What decides which scripts a measured run was started by.

    Args:
        row: the whole row.
        precision: of matrix products.
        phase: what was trained.
    """
    model, hardware, framework = (Section(row, name) for name in ("model", "hardware", "framework"))
    stated = Section(row, "parallelism")
    return TrainingBenchmark(
        observed_as=framework.text("name"),
        release=str(framework.values.get("version") or ""),
        model=str(model.values.get("name") or ""),
        device=hardware.text("device"),
        precision=precision,
        phase=phase.value,
        num_devices=hardware.whole("num_devices", 1),
        pipeline_parallel=stated.whole("pipeline_parallel", 1),
    )


def with_published_choices(row: Mapping[str, Any], benchmark: TrainingBenchmark) -> tuple[Section, tuple[str, ...]]:
    """``parallelism`` of a measured run with the choices of its benchmark's scripts where the row leaves them out.

    Returns:
        The section, and the keys that the scripts filled.

    Raises:
        UnsupportedError: a degree under the name of a framework's flag; unread it would count as 1.
    """
    stated = Section(row, "parallelism")
    stated.refuse_misnamed(CHOICES)
    stated.refuse_misplaced(
        CHOICES, *(Section(row, name, required=False) for name in ("workload", "hardware", "framework"))
    )
    unstated = {key: value for key, value in choices_of(benchmark).items() if not stated.states(key)}
    return Section({"parallelism": {**stated.values, **unstated}}, "parallelism"), tuple(unstated)


def observed_practice(
    row: Mapping[str, Any], choices: Section, benchmark: TrainingBenchmark
) -> tuple[TrainingPractice, tuple[str, ...]]:
    """CUDA graphs and the transport of expert tokens in a measured run.

    Args:
        row: the whole row.
        choices: its ``parallelism``.
        benchmark: what decides the settings of the scripts.

    Returns:
        The switches, and the keys of those that come from the benchmark's scripts because the row does not state them.

    Raises:
        UnsupportedError: a value that is none of the known ones.
    """
    known = practice_of(benchmark)
    settings = dict(known)
    said = " | ".join(caveats(row))
    for words, setting in CAVEATS.items():
        if words in said:
            settings |= setting
    for name, meanings in WORDS.items():
        if choices.states(ROW_KEYS[name]):
            settings[name] = choices.one_of(ROW_KEYS[name], meanings)
    for name in FLAGS:
        if choices.states(ROW_KEYS[name]):
            settings[name] = choices.flag(ROW_KEYS[name], default=False)
    if choices.states("local_batch_size") and choices.states("micro_batch_size"):
        local, each = choices.whole("local_batch_size"), choices.whole("micro_batch_size")
        settings["local_microbatches"] = max(local // each, 1)
    adapted = Section(Section(row, "model").values, "lora", required=False).values.get("target_modules")
    settings["joins_attention"] = isinstance(adapted, list) and not JOINED_MATRICES.isdisjoint(map(str, adapted))
    unstated = tuple(ROW_KEYS[name] for name in known if not choices.states(ROW_KEYS[name]))
    settings["launches"] = Launches(settings.get("launches", Launches.EAGER))
    return TrainingPractice(**settings), unstated
