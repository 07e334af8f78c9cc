"""Memory of what drafts tokens: prediction layers, a head of EAGLE, or a small model beside the large one.

It is loaded beside the weights and has a cache of its own for every token that the model's cache holds.

- *Prediction layers*: their parameters in the model's formats, split as its layers are.
- *EAGLE-3*: one layer and one LM head of the model's width in 16 bits, which its draft cost counts, too.
- *A draft model*: in 16 bits, over as many tensor-parallel devices as the model, as engines do by themselves. One that
  the catalog does not have is not counted.
- *N-grams* are looked up in the text.

All of it lies on the devices of one stage.
"""

from __future__ import annotations

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.memory import (
    NO_DRAFTS,
    DraftMemory,
    kv_bytes_per_token,
    weights_bytes,
)
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.speculation import Drafter, eagle_parameters


def draft_memory(drafter: Drafter | None, shape: ModelShape, quantization: Quantization, layout: Layout) -> DraftMemory:
    """What drafts take of one device.

    Args:
        drafter: where drafts come from; None without any.
        shape: the model.
        quantization: its formats; keys and values of drafts have that of its cache.
        layout: of the worker.
    """
    if drafter is None:
        return NO_DRAFTS
    t = layout.tensor_parallel
    each_layer = kv_bytes_per_token(shape, quantization, tensor_parallel=t) / max(shape.num_attention_layers, 1)
    if drafter.method == "mtp":
        held = weights_bytes(shape, quantization, layout) * layout.pipeline_parallel / shape.num_parameters
        layers = shape.num_nextn_predict_layers
        return DraftMemory(
            weights_bytes=held * layers * shape.nextn_layer_parameters, kv_bytes_per_token=layers * each_layer
        )
    if drafter.method == "eagle3":
        return DraftMemory(weights_bytes=BYTES_16_BIT * eagle_parameters(shape) / t, kv_bytes_per_token=each_layer)
    if drafter.shape is not None:
        plain = Quantization.uniform("bf16", kv_cache=quantization.kv_cache)
        return DraftMemory(
            weights_bytes=weights_bytes(drafter.shape, plain, Layout(tensor_parallel=t)),
            kv_bytes_per_token=kv_bytes_per_token(drafter.shape, plain, tensor_parallel=t),
        )
    return NO_DRAFTS
