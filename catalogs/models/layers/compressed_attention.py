"""Compressed attention (DeepSeek-V4): a cached entry stands for several tokens, beside a window of single ones.

Queries are of low rank, one entry of d elements is key and value of all heads, the output projection is grouped and of
low rank. Three forms of layer: a window alone; *heavily compressed*, whose entries (one for 128 tokens) are all seen;
*compressed sparse*, whose entries (one for 4 tokens) an indexer selects from. Weights of a compressed layer: a
projection and a gate from h to its entries (twice as wide in sparse layers, whose entries overlap), a position bias.

Residuals run as several streams that small matrices mix before and after each block (hyper-connections).

Source: configuration and modelling files of ``deepseek_v4`` in Hugging Face transformers 5.24.0, whose parameters the
test counts. Nothing was measured: kernels of compressed attention are priced as those of latent attention with as many
entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.attention_form import AttentionForm, Matrix

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
WINDOW = "sliding_attention"
BLOCKS_OF_A_LAYER = 2


def read(fields: ConfigFields, hidden_size: int, words: Sequence[str]) -> tuple[tuple[AttentionForm, ...], list[int]]:
    """The forms that occur, and which of them each layer has; ``words`` are the kinds of its layers."""
    kinds = list(dict.fromkeys(words))
    return tuple(_form(fields, hidden_size, kind) for kind in kinds), [kinds.index(word) for word in words]


def _form(fields: ConfigFields, hidden_size: int, kind: str) -> AttentionForm:
    heads, width, rank = (fields.required(name) for name in ("num_attention_heads", "head_dim", "q_lora_rank"))
    groups, group_rank = fields.required("o_groups"), fields.required("o_lora_rank")
    if groups and heads % groups:
        fields.report("o_groups", f"{groups} does not divide {heads} attention heads")
    streams = fields.with_default("hc_mult", 1)
    matrices = [
        Matrix(inputs=hidden_size, outputs=rank + width),
        Matrix(inputs=rank, outputs=heads * width, divides="outputs"),
        Matrix(inputs=heads * width // max(groups, 1), outputs=group_rank, count=groups, divides="count"),
        Matrix(inputs=groups * group_rank, outputs=hidden_size, divides="inputs"),
        # Before and after each block: n streams weigh, mix and receive, (2 + n)·n numbers from all streams.
        Matrix(inputs=streams * hidden_size, outputs=(2 + streams) * streams, count=BLOCKS_OF_A_LAYER),
    ]
    vectors = rank + width + heads + BLOCKS_OF_A_LAYER * ((2 + streams) * streams + 3)
    ratio = 1
    index_heads = index_dim = 0
    if kind in (SPARSE, HEAVY):
        overlap = 2 if kind == SPARSE else 1
        ratio = fields.required("sparse_compression" if kind == SPARSE else "heavy_compression")
        matrices.append(Matrix(inputs=hidden_size, outputs=2 * overlap * width))
        vectors += ratio * overlap * width + width
        if kind == SPARSE:
            index_heads, index_dim = fields.required("index_n_heads"), fields.required("index_head_dim")
            matrices.append(Matrix(inputs=hidden_size, outputs=2 * overlap * index_dim + index_heads))
            matrices.append(Matrix(inputs=rank, outputs=index_heads * index_dim))
            vectors += ratio * overlap * index_dim + index_dim
    return AttentionForm(
        name=kind.removesuffix("_attention").replace("_", " "),
        matrices=tuple(matrices),
        vector_parameters=vectors,
        num_heads=heads,
        num_key_value_heads=1,
        key_dim=width,
        value_dim=width,
        shares_cache=True,
        compression=ratio,
        window=fields.required("sliding_window") if ratio > 1 else 0,
        top_k=fields.required("index_topk") if index_heads else 0,
        index_heads=index_heads,
        index_dim=index_dim,
        streamed_elements=BLOCKS_OF_A_LAYER * 2 * (streams - 1) * hidden_size,
    )
