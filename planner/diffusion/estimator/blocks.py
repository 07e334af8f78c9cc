r"""The work of a transformer's blocks, counted from their shapes: matrix products, attention, small kernels, launches.

*Small kernels* are counted in passes: one read or write of a token's hidden vector in bf16 (2·h bytes; in fp32 it is
two). They are what blocks like those of Diffusers 0.35 (from memory, its code was not read) do without
``torch.compile``, one operation after the other:

======================================  ======  ==========================================================
what                                    passes  operations
======================================  ======  ==========================================================
norm, modulation, gate, residual        11      2 + 4 + 2 + 3, once for attention and once for feed-forward
the same in fp32                        30      casts there and back, every operand twice as wide
activation                              2·f/h   read and written, f = width of the feed-forward
text and image joined and parted        6       query, key, value
query and key norm, fused               4       one read and one write each
query and key norm, kernel by kernel    34      cast, square, mean, scale, cast, weight: 17 each
rotation in fp32                        52      26 each: two casts, two products, a sum, a cast
rotation in fp64                        36      18 each: complex products
cross-attention                         5       residual, output
feed-forward beside attention           10      concatenated before the one output projection
linear attention in fp32                31      casts, ReLU, two small products, a division
gated convolution                       19·f/h  activation, 3 × 3 convolution, layouts, gate
======================================  ======  ==========================================================

*Launches* are kernels of a block, counted likewise. Both are counts of code, not fits: what a device makes of them is
(:class:`meshplan.catalogs.constants.diffusion.DiffusionConstants`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshplan.planner.diffusion.problem.job import Job

BYTES = 2.0  # bf16
_QK_NORM = {"none": 0.0, "fused": 4.0, "unfused": 34.0}
_ROPE = {"none": 0.0, "fp32": 52.0, "fp64": 36.0}
_HALF, _WIDE_HALF = 11.0, 30.0  # norm, modulation, gate and residual of one half of a block
_JOINED, _CROSS, _CONCATENATED, _LINEAR, _GATED = 6.0, 5.0, 10.0, 31.0, 19.0
_LAUNCHES = {"double": 75, "single": 32, "joint": 60, "cross": 60, "linear": 80}
_DUAL_LAUNCHES = 25
# FLOPs are counted at the head size that FlashAttention computes with.
_PADDED_HEADS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix products of one shape: tokens × inner by inner × outer.

    Args:
        tokens: of one item and one guidance pass.
        inner: k.
        outer: n.
        count: how many.
        is_split: its tokens are split over the devices of a sequence; prompts are not.
    """

    tokens: int
    inner: int
    outer: int
    count: float
    is_split: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """One forward pass of one item.

    Args:
        products: matrix products.
        attention_flops: of attention, at the head size that kernels compute with.
        exponentials: of its softmax.
        elementwise_bytes: read and written by small kernels.
        num_attentions: attentions whose sequence is split.
        attention_bytes: one tensor (queries, say) of all of these together.
        launches: kernels.
    """

    products: tuple[Product, ...]
    attention_flops: float
    exponentials: float
    elementwise_bytes: float
    num_attentions: int
    attention_bytes: float
    launches: int


def pass_work(job: Job) -> PassWork:
    """Count the blocks of a model for one item."""
    model = job.model
    attentions = list(_attentions(job))
    padded = next((size for size in _PADDED_HEADS if size >= model.head_dim), model.head_dim) / model.head_dim
    passes = sum(count * tokens * _passes(job, kind) for kind, count, tokens in _blocks(job))
    passes += model.dual_attention_layers * job.image_tokens * (_HALF + _JOINED + _QK_NORM[model.qk_norm])
    split = model.num_layers + model.dual_attention_layers
    split_tokens = model.num_layers * job.tokens + model.dual_attention_layers * job.image_tokens
    return PassWork(
        products=tuple(_products(job)),
        attention_flops=sum(4.0 * pairs * width for pairs, width, _ in attentions) * padded,
        exponentials=sum(pairs * heads for pairs, _, heads in attentions),
        elementwise_bytes=passes * model.hidden_size * BYTES,
        num_attentions=split,
        attention_bytes=split_tokens * model.hidden_size * BYTES,
        launches=sum(count * _LAUNCHES[kind] for kind, count, _ in _blocks(job))
        + model.dual_attention_layers * _DUAL_LAUNCHES,
    )


def _blocks(job: Job) -> Iterator[tuple[str, int, int]]:
    """(kind, how many, tokens of the stream)."""
    for kind, count in job.model.blocks.items():
        yield kind, count, job.tokens


def _passes(job: Job, kind: str) -> float:
    """Passes of one block over one token."""
    model = job.model
    half = _WIDE_HALF if model.wide_norms else _HALF
    width = model.intermediate_size / model.hidden_size
    heads = _QK_NORM[model.qk_norm] + _ROPE[model.rope]
    return {
        "double": 2 * half + _JOINED + heads + 2 * width,
        "single": half + heads + 2 * width + _CONCATENATED,
        "joint": 2 * half + _JOINED + heads + 2 * width,
        "cross": 2 * half + heads + _CROSS + 2 * width,
        "linear": 2 * half + _LINEAR + _CROSS + _GATED * width,
    }[kind]


def _attentions(job: Job) -> Iterator[tuple[float, int, int]]:
    """(pairs of tokens, width, heads) of every quadratic attention of a pass, alike ones summed."""
    model, image = job.model, float(job.image_tokens)
    for kind, count, tokens in _blocks(job):
        if kind != "linear":
            yield count * float(tokens) ** 2, model.hidden_size, model.num_attention_heads
        if kind in ("cross", "linear"):
            heads = model.cross_attention_heads or model.num_attention_heads
            yield count * image * model.text_tokens, model.hidden_size, heads
    if model.dual_attention_layers:
        yield model.dual_attention_layers * image**2, model.hidden_size, model.num_attention_heads


def _products(job: Job) -> Iterator[Product]:
    model = job.model
    h, f = model.hidden_size, model.intermediate_size
    image, text = job.image_tokens, model.text_tokens
    for kind, count, tokens in _blocks(job):
        streams = (image, text) if kind == "double" else (tokens,)
        for stream in streams:
            gated = 2 * f if kind == "linear" else f
            projections = 6 if kind in ("cross", "linear") else 3 if kind == "single" else 4
            yield Product(tokens=stream, inner=h, outer=h, count=count * projections)
            yield Product(tokens=stream, inner=h, outer=gated, count=count)
            yield Product(tokens=stream, inner=f + h if kind == "single" else f, outer=h, count=count)
        if kind in ("cross", "linear"):
            yield Product(tokens=text, inner=h, outer=h, count=count * 2, is_split=False)
    if model.dual_attention_layers:
        yield Product(tokens=image, inner=h, outer=h, count=model.dual_attention_layers * 4)
