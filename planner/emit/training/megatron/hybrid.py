"""Hybrids of attention and recurrent layers as Megatron-LM flags, or the reason why a model has none.

Megatron-LM 0.19.2 knows two ways, whose files were read and whose parser tests/conformance/megatron runs:

* ``pretrain_hybrid.py --hybrid-layer-pattern``: a letter for each block, M (Mamba-2), * (attention), - (MLP), E
  (experts), and | between the chunks of a pipeline (core/models/hybrid/hybrid_layer_allocation.py). A layer of a mixer
  and an MLP is two blocks, each with its own norm.
* ``pretrain_gpt.py --experimental-attention-variant gated_delta_net --linear-attention-freq``: layers of which some
  have the gated delta rule in the place of attention (core/transformer/transformer_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.catalogs.models.layers import gated_delta, mamba2
from meshplan.catalogs.models.layers.naming import describe_blocks
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.target import Feature

MAMBA, DELTA = "mamba-2", "gated-delta"
PATTERN = "--hybrid-layer-pattern"
STACK = ("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
_MAMBA_KERNEL = 4  # core/ssm/mamba_mixer.py, d_conv: no flag changes it
_BLOCKS_OF_A_LAYER = 2

HYBRIDS = Feature(
    name="recurrent layers",
    expressed_by=f"{PATTERN}, --mamba-num-heads … (Mamba-2); --experimental-attention-variant gated_delta_net, "
    "--linear-attention-freq … (gated delta nets)",
    verified_by="parser",
)

Flag = tuple[str, ...]


def has_pattern(shape: ModelShape) -> bool:
    """Whether the model is written as a pattern of blocks."""
    return shape.blocks is not None and shape.blocks.recurrent is not None and shape.blocks.recurrent.kind == MAMBA


def missing_part(shape: ModelShape) -> str:
    """The part of a model's blocks that Megatron-LM has no flag for; empty where it has all."""
    blocks = shape.blocks
    if blocks is None:
        return ""
    recurrent = blocks.recurrent
    if blocks.forms or blocks.indexer is not None:
        return "attention in several forms or with an indexer"
    if recurrent is not None and recurrent.kind not in (MAMBA, DELTA):
        return f"{describe_blocks(shape)}: of recurrent layers there are Mamba-2 and gated delta nets"
    if Mixer.BOTH in blocks.mixers:
        return "attention and a recurrent mixer side by side in a layer"
    if recurrent is not None and recurrent.kind == MAMBA:
        return _missing_of_pattern(shape, blocks)
    if not all(blocks.has_mlp):
        return "layers of one block each"
    return ""


def _missing_of_pattern(shape: ModelShape, blocks: LayerBlocks) -> str:
    kernel = 0 if blocks.recurrent is None else mamba2.sizes(blocks.recurrent).kernel
    if kernel != _MAMBA_KERNEL:
        return f"a convolution over {kernel} tokens in Mamba-2 ({_MAMBA_KERNEL} there)"
    if shape.num_nextn_predict_layers:
        return "multi-token prediction layers of a hybrid, whose blocks no shape holds"
    if blocks.output_gate:
        return "attention with an output gate beside Mamba-2"
    of_a_layer = _BLOCKS_OF_A_LAYER if all(blocks.has_mlp) else 1
    if shape.norms_per_layer != of_a_layer:
        return f"{shape.norms_per_layer} norms in a layer of {of_a_layer} blocks"
    return ""


def letters(shape: ModelShape) -> tuple[str, ...]:
    """The blocks of each layer as Megatron's letters."""
    return tuple("".join(_blocks_of(shape, layer)) for layer in range(shape.num_hidden_layers))


def _blocks_of(shape: ModelShape, layer: int) -> Iterator[str]:
    if shape.has_recurrent(layer):
        yield "M"
    elif shape.has_attention(layer):
        yield "*"
    if shape.has_mlp(layer):
        yield "E" if shape.is_moe_layer(layer) else "-"


def hybrid_flags(shape: ModelShape) -> tuple[Flag, ...]:
    """Sizes of the recurrent layers, and which layers they are where that is no pattern; empty without any."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    gate: tuple[Flag, ...] = (("--attention-output-gate",),) if shape.has_output_gate else ()
    if recurrent is None:
        return gate
    if recurrent.kind == MAMBA:
        state = mamba2.sizes(recurrent)
        return (
            STACK,
            ("--mamba-num-heads", str(state.num_heads)),
            ("--mamba-head-dim", str(state.head_dim)),
            ("--mamba-state-dim", str(state.state_size)),
            ("--mamba-num-groups", str(state.num_groups)),
        )
    delta = gated_delta.sizes(recurrent)
    return (
        *gate,
        ("--experimental-attention-variant", "gated_delta_net"),
        ("--linear-num-key-heads", str(delta.num_key_heads)),
        ("--linear-num-value-heads", str(delta.num_value_heads)),
        ("--linear-key-head-dim", str(delta.key_head_dim)),
        ("--linear-value-head-dim", str(delta.value_head_dim)),
        ("--linear-conv-kernel-dim", str(delta.kernel)),
    )
