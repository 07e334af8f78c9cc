"""What of a model each way sends, and what compressing it takes: bytes, passes through memory, states on a device.

*Outer gradients* of b bits have N·b/8 bytes. Fragments are whole layers, dealt as evenly as they go; the embedding is
with the first, LM head and last norm with the last (as TorchTitan 0.3.0 splits, experiments/torchft/diloco/utils.py).

*PowerSGD* (arXiv:1905.13727, algorithm 1) sends P (m×r) and Q (n×r) of each matrix, r(m + n) numbers, and everything
else whole. Three products with the m×n gradient, M·Q, Mᵀ·P and P·Qᵀ, take 6mnr FLOPs, the orthogonalisation 2mr². Of a
matrix that tensor parallelism splits over t ranks each part is compressed by itself: r(m + t·n) or r(t·m + n).

*Top-k* (Deep Gradient Compression, arXiv:1712.01887) sends value and index of the largest share of the gradients.
*8-bit* sends a byte a gradient, *1-bit* (1-bit Adam, arXiv:2102.02888) a bit; their scales are left out, they are few.

*async-pipeline* sends the activations of the whole batch to the next site and their gradients back: B·s·h numbers of 16
bits each way, which pass a link at the same time.

Passes through memory are counted from the algorithms: how often a number of four bytes is read or written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.states import checkpoint_bytes, optimizer_bytes
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

BYTES_32_BIT = 4.0
INDEX_BYTES = 4.0
BITS_PER_BYTE = 8
# Reads and writes of a parameter by the outer step: weight, kept copy and momentum read, pseudo-gradient written and
# read, momentum, copy and weight written.
OUTER_PASSES = 8
# … by quantising with error feedback: gradient and residual read, residual and code written.
QUANTISE_PASSES = 4
# … by top-k: the same, and one more to find the threshold.
TOP_K_PASSES = 5
# … by PowerSGD: gradient and residual read, their sum written, three products that read or write it, residual written.
POWERSGD_PASSES = 7
# Kept copy and momentum of the outer optimizer (SGD with Nesterov momentum), fp32; the pseudo-gradient under way.
OUTER_STATE_BYTES, PSEUDO_GRADIENT_BYTES = 8.0, 4.0
# Residual that error feedback keeps, fp32; 1-bit Adam keeps a second one of the part that a rank sums.
RESIDUAL_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Trained parameters of one rank of the fullest stage.

    Args:
        whole: with its tensor- and expert-parallel part only.
        owned: whose optimizer states it keeps: ZeRO divides them.
    """

    whole: float
    owned: float


def trained_parameters(problem: TrainingProblem) -> float:
    """N: all parameters, or the adapters'."""
    recipe = problem.calibration.recipe
    per_parameter = recipe.weight_bytes + optimizer_bytes(recipe, problem.workload)
    return checkpoint_bytes(problem.shape, problem.workload, recipe) / per_parameter


def gradient_bytes(problem: TrainingProblem) -> float:
    """Bytes of a gradient that synchronous training sends: as the framework keeps them, unless pinned."""
    return problem.workload.gradient_bytes or problem.calibration.recipe.gradient_bytes


def hop_bytes(problem: TrainingProblem) -> float:
    """Activations of a step's sequences between two layers, one way."""
    workload = problem.workload
    numbers = workload.global_batch_size * workload.sequence_length * problem.shape.hidden_size
    return BYTES_16_BIT * float(numbers)


def layers_of_sites(rates: Sequence[float], layers: int) -> tuple[int, ...]:
    """Whole layers for each site, so that the slowest is soonest done: at least one, then each to who is done first.

    Args:
        rates: layers that a site works through in a second.
        layers: of the model, at least one for each site.
    """
    dealt = [1] * len(rates)
    for _ in range(layers - len(rates)):
        first = min(range(len(rates)), key=lambda site: (dealt[site] + 1) / rates[site])
        dealt[first] += 1
    return tuple(dealt)


def fragment_shares(shape: ModelShape, count: int) -> tuple[float, ...]:
    """Share of the parameters in each fragment; sums to 1."""
    layers = shape.num_hidden_layers
    ends = [layers * place // count for place in range(count + 1)]
    sizes = [
        float(sum(shape.layer_parameters(layer) for layer in range(begin, end)))
        for begin, end in itertools.pairwise(ends)
    ]
    sizes[0] += shape.embedding_parameters
    sizes[-1] += shape.num_parameters - sum(sizes)
    return tuple(size / shape.num_parameters for size in sizes)


def held_parameters(problem: TrainingProblem, config: TrainingConfig) -> Held:
    """Parameters of a rank of the stage that has most; adapters are few and counted as if on one rank."""
    shape = problem.shape
    if problem.workload.phase.has_adapters:
        few = trained_parameters(problem)
        return Held(whole=few, owned=few)
    stages = config.pipeline_parallel
    dense, experts, layer = [0.0] * stages, [0.0] * stages, 0
    for chunk, count in enumerate(config.layers_per_chunk):
        for _ in range(count):
            own = _expert_parameters(shape, layer)
            experts[chunk % stages] += own
            dense[chunk % stages] += shape.layer_parameters(layer) - own
            layer += 1
    dense[0] += shape.embedding_parameters
    dense[-1] += shape.lm_head_parameters
    shards = config.data_parallel_shard * config.context_parallel if config.zero_stage else 1
    parts = config.expert_parallel * config.expert_tensor_parallel
    over = max(1, config.expert_data_parallel * config.data_parallel_shard // config.data_parallel)
    whole = [one / config.tensor_parallel + two / parts for one, two in zip(dense, experts, strict=True)]
    owned = [
        one / config.tensor_parallel / shards + two / parts / (over if config.zero_stage else 1)
        for one, two in zip(dense, experts, strict=True)
    ]
    return Held(whole=max(whole), owned=max(owned))


def _expert_parameters(shape: ModelShape, layer: int) -> float:
    """Routed experts of a layer; 0 where it has none."""
    has_experts = shape.moe is not None and shape.is_moe_layer(layer)
    return float(shape.moe.num_experts * shape.expert_parameters) if has_experts and shape.moe else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """PowerSGD of a model.

    Args:
        numbers: that are sent.
        flops: of all products.
    """

    numbers: float
    flops: float


def low_rank(shape: ModelShape, rank: int, tensor_parallel: int) -> LowRank | None:
    """What PowerSGD of rank r sends; None for models whose matrices are not plain attention and MLPs."""
    if shape.blocks is not None or shape.attention is AttentionKind.MULTI_HEAD_LATENT:
        return None
    split_rows, split_columns = _matrices(shape)
    numbers = flops = compressed = 0.0
    for rows, columns, count, pieces in (
        *((m, n, count, (tensor_parallel, 1)) for m, n, count in split_rows),
        *((m, n, count, (1, tensor_parallel)) for m, n, count in split_columns),
    ):
        sent = rank * (rows * pieces[1] + columns * pieces[0])
        if sent >= rows * columns:  # not smaller: sent whole
            continue
        numbers += count * sent
        flops += count * (6.0 * rows * columns * rank + 2.0 * rows * pieces[1] * rank**2)
        compressed += count * rows * columns
    return LowRank(numbers=numbers + shape.num_parameters - compressed, flops=flops)


def _matrices(shape: ModelShape) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(outputs, inputs, how many) of the matrices that tensor parallelism splits by rows, and by columns."""
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    rows = [(queries, hidden, layers), (keys, hidden, 2 * layers)]
    columns = [(hidden, queries, layers)]
    mlps = [(shape.intermediate_size, hidden, shape.num_dense_layers)]
    if shape.moe is not None:
        mlps.append((shape.moe.expert_intermediate_size, hidden, shape.moe.num_experts * shape.num_moe_layers))
        if shape.moe.shared_intermediate_size:
            mlps.append((shape.moe.shared_intermediate_size, hidden, shape.num_moe_layers))
    for width, inputs, count in mlps:
        rows.append((width, inputs, (shape.mlp_matrices - 1) * count))
        columns.append((inputs, width, count))
    rows.append((shape.vocab_size, hidden, 1 if shape.tie_word_embeddings else 2))
    return [one for one in rows if one[2]], [one for one in columns if one[2]]


def pass_s(device: Device, parameters: float, passes: int) -> float:
    """Time of reads and writes of fp32 numbers through device memory, s."""
    return passes * BYTES_32_BIT * parameters / device.memory_bandwidth_bytes_per_s


def products_s(device: Device, flops: float) -> float:
    """Time of PowerSGD's products where FLOPs bound it, s: at the peak of 16-bit products, which skinny ones miss."""
    return flops / peak_flops_per_s(device, "bf16")
