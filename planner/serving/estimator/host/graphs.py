"""Which iterations an engine replays from CUDA graphs; the others are launched kernel by kernel.

vLLM captures graphs up to so many tokens, for batches with prompts in pieces with attention between them, and launches
what is larger ("cudagraph will not be used", vllm 0.33.0, config/vllm.py, _set_cudagraph_sizes); launch files raise
that size where more requests may decode (:meth:`Graphs.raised_size`). SGLang captures decodes up to so many requests
and, from 0.5.10 on, prompts up to its token budget. TensorRT-LLM is told to capture decodes of as many requests as may
run, and captures no prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.serving.problem.config import EngineLimits, Layout

SIZE_STEP = 16  # tokens between the sizes that vLLM captures beyond 256 (vllm 0.33.0, config/vllm.py)
LARGEST_LATENT = 8192  # tokens of prompts with latent attention (SGLang 0.5.23, arg_groups/memory_hook.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """Graphs that an engine captures where it is started with them.

    Args:
        tokens: a batch with prompts is replayed where it has at most so many tokens, and at most two for each request
            that may run; one without where it has at most so many. 0: those with prompts never are, those without
            always.
        is_fixed: whatever the requests that may run: the size was set.
        any_prompts: batches of prompts alone are replayed, whatever their size.
        most_decodes: decoding requests of the largest batch without prompts that is replayed, whatever ``tokens`` says.
        raises_to: ``tokens`` at most where a launch file sets it for more decoding requests; 0: none does.
    """

    tokens: int = 0
    is_fixed: bool = False
    any_prompts: bool = False
    most_decodes: float = math.inf
    raises_to: int = 0

    @classmethod
    def of(cls, recipe: EngineRecipe, shape: ModelShape, device: Device, *, raises: bool = False) -> Graphs:
        """Those of an engine's release for a model on a device.

        ``raises``: its launch files may raise their size, as those of workers that decode without drafts do. With
        drafts the engine's own sizes are multiples of the tokens that a request verifies, which a size that is set puts
        an end to (vllm 0.33.0, config/vllm.py, uniform_decode_sizes).
        """
        return cls(
            tokens=recipe.graphs_on(device.slug, shape.family),
            is_fixed=recipe.fixes_graphs(shape.family),
            any_prompts=recipe.graphs_prompts,
            most_decodes=recipe.largest_decode_graph or math.inf,
            raises_to=recipe.raises_graphs_to if raises else 0,
        )

    def raised_size(self, layout: Layout, limits: EngineLimits) -> int:
        """Tokens up to which a launch file has graphs captured; 0 where the engine's own size does.

        It is set where a rank may decode more requests than the engine captures by itself.
        """
        running = -(-limits.max_num_seqs // layout.attention_data_parallel)
        if not limits.cuda_graphs or running <= self.tokens:
            return 0
        most = min(self.raises_to, limits.max_batched_tokens) // SIZE_STEP * SIZE_STEP
        size = min(-(-running // SIZE_STEP) * SIZE_STEP, most)
        return size if size > self.tokens else 0

    def most_with_prompts(self, shape: ModelShape, layout: Layout, limits: EngineLimits, device: Device) -> int:
        """Tokens of the largest batch with prompts that is replayed.

        None is where the engine is started without graphs, an encoder comes before (vLLM 0.33.0: config/vllm.py,
        FULL_DECODE_ONLY), or recurrent layers, which such a batch runs kernel by kernel between the pieces of its graph
        (splitting_ops: mamba_mixer2, gdn_attention, …; vLLM pull request 34571).
        """
        if shape.encoder is not None or shape.num_recurrent_layers or not limits.cuda_graphs:
            return 0
        if self.any_prompts:
            return _most_of_prompts_alone(shape, layout, limits, device)
        if size := self.raised_size(layout, limits):
            return size
        most = 2 * limits.max_num_seqs // layout.attention_data_parallel
        return self.tokens if self.is_fixed else min(self.tokens, most)

    def most_without(self, layout: Layout, limits: EngineLimits, verified_tokens: int) -> float:
        """Tokens of the largest batch without prompts that is replayed, so many verified for each request."""
        if not limits.cuda_graphs:
            return 0.0
        most = self.raised_size(layout, limits) or self.tokens or math.inf
        return min(most, self.most_decodes * verified_tokens)


NO_LIMIT = Graphs()


def _most_of_prompts_alone(shape: ModelShape, layout: Layout, limits: EngineLimits, device: Device) -> int:
    """SGLang's: as many tokens as it admits; with latent attention at most 8,192, and none on Blackwell, whose kernels
    for it run none in graphs, nor where stages follow each other (0.5.23: arg_groups/cuda_graph_hook.py).
    """
    is_latent = shape.latent is not None
    if layout.pipeline_parallel > 1 or (is_latent and device.architecture == "blackwell"):
        return 0
    return min(limits.max_batched_tokens, LARGEST_LATENT) if is_latent else limits.max_batched_tokens
