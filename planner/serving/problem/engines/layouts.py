"""Conditions of serving engines on the layout of a worker, element-wise over layouts.

Each predicate takes a model and a :class:`~meshplan.planner.serving.problem.config.Layout`, or a struct of NumPy
columns with its fields: only ``% == <= & |`` are used, so that whole grids of layouts can be filtered at once.
Degrees are ≥ 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule

Predicate = Callable[[ModelShape, Any], Any]
FP8_BLOCK = 128  # rows and columns that share a scale (DeepSeek-V3, arXiv:2412.19437, §3.3.2)


def rule(name: str, holds: Predicate, message: str, stage: str, source: str) -> LegalityRule:
    """A rule, written in one line."""
    return LegalityRule(name=name, holds=holds, message=message, stage=stage, source=source)


def group(layout: Any) -> Any:
    """Devices that split one attention block: tensor × context parallel (decode context ranks are tensor ranks)."""
    return layout.tensor_parallel * layout.context_parallel


def stage(layout: Any) -> Any:
    """Devices of one pipeline stage."""
    return layout.tensor_parallel * layout.attention_data_parallel * layout.context_parallel


def stage_unless_all_to_all(layout: Any) -> Any:
    """Devices that split dense MLPs: one where attention is data parallel and whole experts use all-to-all."""
    whole = (layout.attention_data_parallel > 1) & (layout.expert_parallel == stage(layout))
    return np.where(whole, 1, stage(layout))


def stage_unless_data_parallel(layout: Any) -> Any:
    """Devices that split dense MLPs: one where attention is data parallel."""
    return np.where(layout.attention_data_parallel > 1, 1, stage(layout))


def is_latent(shape: ModelShape) -> bool:
    """One latent vector per token in place of keys and values: tensor parallelism cannot split it."""
    return shape.attention is AttentionKind.MULTI_HEAD_LATENT


def heads(shape: ModelShape, layout: Any) -> Any:
    """Every device of an attention group has the same number of whole query heads."""
    return shape.num_attention_heads % group(layout) == 0


def whole_encoder(shape: ModelShape, layout: Any) -> Any:
    """Only tensor parallelism splits a model whose tokens attend to all others, or to what an encoder read."""
    return (layout.pipeline_parallel * layout.context_parallel == 1) | (not shape.keeps_prompts_whole)


def recurrent_heads(shape: ModelShape, layout: Any) -> Any:
    """Every tensor-parallel device has whole heads of the recurrent layers, whose states no context rank can split."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    if recurrent is None:
        return layout.tensor_parallel >= 1
    return (recurrent.num_heads % layout.tensor_parallel == 0) & (layout.context_parallel == 1)


def kv_heads(shape: ModelShape, layout: Any) -> Any:
    """KV heads are split evenly, or copied evenly where there are fewer than devices."""
    if is_latent(shape):
        return layout.tensor_parallel >= 1
    count, devices = shape.num_key_value_heads, group(layout)
    return (count % devices == 0) | (devices % count == 0)


def context_over_copies(shape: ModelShape, layout: Any) -> Any:
    """Decode context parallelism splits tokens between devices that would hold copies of the same KV heads."""
    context = layout.context_parallel
    if is_latent(shape):
        return context >= 1
    per_kv_head = shape.num_attention_heads // shape.num_key_value_heads
    copies = layout.tensor_parallel % shape.num_key_value_heads == 0
    return (context == 1) | (copies & (per_kv_head % context == 0))


def stages(shape: ModelShape, layout: Any) -> Any:
    """At least one layer per stage."""
    return layout.pipeline_parallel <= shape.num_hidden_layers


def data_ranks(shape: ModelShape, layout: Any) -> Any:
    """Attention data-parallel ranks need experts to share; copies of a dense model are separate workers."""
    return (layout.attention_data_parallel == 1) | (shape.moe is not None)


def experts(shape: ModelShape, layout: Any) -> Any:
    """Experts are split evenly over the devices."""
    if shape.moe is None:
        return layout.expert_parallel == 1
    return shape.moe.num_experts % layout.expert_parallel == 0


def expert_groups(shape: ModelShape, layout: Any) -> Any:
    """Expert × expert-tensor devices are those of a stage."""
    if shape.moe is None:
        return layout.expert_parallel == 1
    return layout.expert_parallel * layout.expert_tensor_parallel == stage(layout)


def whole_experts_or_none(shape: ModelShape, layout: Any) -> Any:
    """Experts are spread over all devices of a stage, or all of them are split."""
    if shape.moe is None:
        return layout.expert_parallel == 1
    return (layout.expert_tensor_parallel == 1) | (layout.expert_parallel == 1)


def expert_width(shape: ModelShape, layout: Any) -> Any:
    """Each expert splits evenly."""
    width = 0 if shape.moe is None else shape.moe.expert_intermediate_size
    return width % layout.expert_tensor_parallel == 0


def dense_widths(shape: ModelShape) -> tuple[int, ...]:
    """Widths of the MLPs that tensor parallelism splits: dense layers and shared experts."""
    shared = 0 if shape.moe is None else shape.moe.shared_intermediate_size
    return tuple(width for width in (bool(shape.num_dense_layers) * shape.intermediate_size, shared) if width)


def mlp_over(devices: Callable[[Any], Any]) -> Predicate:
    """Dense MLPs and shared experts split evenly over ``devices`` of a layout."""

    def holds(shape: ModelShape, layout: Any) -> Any:
        parts = devices(layout)
        return np.logical_and.reduce([parts >= 1, *(width % parts == 0 for width in dense_widths(shape))])

    return holds


def blocks_over(devices: Callable[[Any], Any]) -> Predicate:
    """Split MLPs and experts still hold whole 128 × 128 blocks of scales."""

    def holds(shape: ModelShape, layout: Any) -> Any:
        parts = devices(layout)
        whole = [(parts == 1) | (width % (parts * FP8_BLOCK) == 0) for width in dense_widths(shape)]
        if shape.moe is not None:
            whole.append(shape.moe.expert_intermediate_size % (layout.expert_tensor_parallel * FP8_BLOCK) == 0)
        return np.logical_and.reduce([parts >= 1, *whole])

    return holds


def one_context_rank(_: ModelShape, layout: Any) -> Any:
    """The sequence is not split."""
    return layout.context_parallel == 1


def whole_layers(_: ModelShape, layout: Any) -> Any:
    """Every device has whole layers of its own: nothing but pipeline stages."""
    split = (layout.attention_data_parallel, layout.context_parallel, layout.expert_parallel)
    return np.logical_and.reduce([layout.tensor_parallel == 1, *(degree == 1 for degree in split)])


def attention_all_data(_: ModelShape, layout: Any) -> Any:
    """Attention is data parallel on every device of a stage, or on none."""
    return (layout.attention_data_parallel == 1) | (layout.tensor_parallel == 1)


def _with_source(name: str, holds: Predicate, message: str, stage: str) -> Callable[[str], LegalityRule]:
    """A rule that several engines share, as a function of where it was read."""
    return lambda source: rule(name, holds, message, stage, source)


heads_rule = _with_source(
    "heads_divisible_by_tensor_parallel",
    heads,
    "num_attention_heads must be a multiple of tensor_parallel × context_parallel",
    "parser",
)
kv_heads_rule = _with_source(
    "kv_heads_and_tensor_parallel_divide",
    kv_heads,
    "num_key_value_heads must be a multiple or a divisor of tensor_parallel × context_parallel",
    "run time",
)
context_rule = _with_source(
    "context_parallel_over_copied_kv_heads",
    context_over_copies,
    "context_parallel needs tensor_parallel that is a multiple of num_key_value_heads, and must divide the query "
    "heads of a KV head (latent attention: any)",
    "parser",
)
experts_rule = _with_source(
    "experts_divisible_by_expert_parallel",
    experts,
    "num_experts must be a multiple of expert_parallel (1 for a dense model)",
    "run time",
)
expert_width_rule = _with_source(
    "expert_width_divisible_by_expert_tensor_parallel",
    expert_width,
    "the expert width must be a multiple of expert_tensor_parallel",
    "run time",
)


def mlp_rule(devices: Callable[[Any], Any], named: str, source: str) -> LegalityRule:
    """Dense MLPs split evenly over ``devices``."""
    return rule(
        "mlp_width_divisible",
        mlp_over(devices),
        f"the MLP width (and that of the shared experts) must be a multiple of {named}",
        "run time",
        source,
    )


def block_rules(devices: Callable[[Any], Any], source: str) -> tuple[LegalityRule, ...]:
    """Blocks of scales stay whole over ``devices``."""
    return (
        rule(
            "fp8_blocks_stay_whole",
            blocks_over(devices),
            "split MLPs and experts must keep multiples of 128 rows (fp8_block scales)",
            "run time",
            source,
        ),
    )
