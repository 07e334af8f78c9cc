"""Time to choose the next tokens from logits: penalties, truncation, the draw. Greedy decoding needs none of it.

Every tensor-parallel device has the logits of all V tokens of the vocabulary, so that nothing here is divided. For n
sequences::

    t = draw + bytes·n·V / memory bandwidth        + start + n·V / sorted_logits_per_s   where top-p sorts

From some hundred sequences on PyTorch sorts each by a block of threads of its own: V·(row + n·each) where that was
timed and takes less.

An engine whose kernels sort nothing (FlashInfer, TensorRT-LLM) passes over the logits a few times. PyTorch's
``logits.sort``, which vLLM called for top-p before 2026, is far from the memory's rate: 512 sequences of 131,072 logits
take 8 ms, as long as an H100 reads the weights of eleven billion parameters.

*On the host* vLLM copies all tokens generated so far into one padded matrix in every step with penalties
(vllm-project/vllm, pull request 47540). It does so once the layers of the step are launched, and the sampler waits for
both, so that a step takes max(layers, copy) + t.

Left out: where a container's processors are fewer than PyTorch takes its threads for, that copy alone takes tens of
milliseconds on one device (issues 9113, 13247; mended by pull request 49919).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.problem.requests import Sampling

# Bytes that a random draw moves for each logit in fp32, and its kernels: temperature 8, softmax 12, exponential noise
# 4, their quotient 12, its largest 4 (vLLM 0.11: v1/sample/sampler.py, v1/sample/ops/topk_topp_sampler.py).
DRAW_BYTES, DRAW_KERNELS = 40.0, 6.0
# Kernels of penalties: two counts and masks, the repetition, frequency and presence penalties.
PENALTY_KERNELS = 12.0
# What PyTorch's sort, cumulative sum and masks take before they are bound by the logits: 0.094 ms for one sequence of
# 32,768 (vllm-project/vllm, pull request 42191).
SORT_START_S = 90e-6
# Generation of devices → seconds for each logit of the vocabulary: of one sequence by one block, and that each sequence
# adds. On a B200 top-p takes 0.626 and 1.694 ms for 128 and 512 sequences of 32,768 logits, 2.318 and 6.150 ms of
# 131,072 (vllm-project/vllm, pull request 40376); means of the lines through the two of each vocabulary.
BLOCK_SORT_S: Mapping[str, tuple[float, float]] = {"blackwell": (8.1e-9, 8.05e-11)}


# Bytes that top-p's sort moves for each logit: a radix sort of fp32 keys with int64 places reads and writes both for
# each digit of 8 bits (arXiv:2206.01784: 2n global memory operations a digit).
SORT_BYTES = (32 / 8) * 2 * (4.0 + 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCost:
    """What sampling costs on an engine.

    Args:
        bytes_per_logit: that its kernels move for each logit, beside a sort.
        kernels: so many.
        sorted_logits_per_s: rate of the sort; None where nothing is sorted.
        host_s_per_token: that the host takes for each token generated so far, beside the layers of the step.
    """

    bytes_per_logit: float
    kernels: float
    sorted_logits_per_s: float | None = None
    host_s_per_token: float = 0.0

    @property
    def moved_bytes_per_logit(self) -> float:
        """Of all kernels, a sort's among them."""
        return self.bytes_per_logit + (0.0 if self.sorted_logits_per_s is None else SORT_BYTES)

    def seconds(self, operators: Operators, sequences: FloatArray, vocab_size: int) -> FloatArray:
        """[N] Time for so many sequences of one batch, s."""
        logits = sequences * vocab_size
        passes = operators.memory_op_s(self.bytes_per_logit * logits, kernels=self.kernels)
        if self.sorted_logits_per_s is None:
            return passes
        sort_s = logits / self.sorted_logits_per_s
        if operators.device.architecture in BLOCK_SORT_S:
            row_s, each_s = BLOCK_SORT_S[operators.device.architecture]
            sort_s = np.minimum(sort_s, vocab_size * (row_s + sequences * each_s))
        return passes + SORT_START_S + sort_s


def sampling_cost(recipe: EngineRecipe, sampling: Sampling | None) -> SamplingCost | None:
    """The cost of a workload's sampling on an engine; None where every token is the likeliest one."""
    if sampling is None:
        return None
    penalty = recipe.penalty_bytes if sampling.penalties else 0.0
    return SamplingCost(
        bytes_per_logit=DRAW_BYTES + penalty,
        kernels=DRAW_KERNELS + PENALTY_KERNELS * sampling.penalties,
        sorted_logits_per_s=recipe.sorted_logits_per_s if sampling.top_p < 1.0 else None,
        host_s_per_token=recipe.penalty_host_s_per_token if sampling.penalties else 0.0,
    )
