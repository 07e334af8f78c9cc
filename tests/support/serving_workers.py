"""Workers whose iterations tests price: one engine, layout and limits, but what a test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.layers.recurrent import Mixer
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization


def worker_of(shape: ModelShape, machine: Machine, **fields: Any) -> Worker:
    """vLLM on eight devices in fp16, with the fields given in place of its own."""
    defaults: dict[str, Any] = {
        "shape": shape,
        "machine": machine,
        "engine": "vllm",
        "layout": Layout(tensor_parallel=8, expert_tensor_parallel=8),
        "limits": EngineLimits(max_num_seqs=64, max_batched_tokens=4096),
        "quantization": Quantization.uniform("fp16"),
        "constants": ServingConstants(),
        "contexts": ContextRange(prompt=1000.0, least=1000.0, most=2000.0),
    }
    return Worker(**{**defaults, **fields})


def all_attention(shape: ModelShape) -> ModelShape:
    """The same model with softmax attention in place of its recurrent layers."""
    assert shape.blocks is not None
    mixers = (Mixer.ATTENTION,) * shape.num_hidden_layers
    return replace(shape, blocks=replace(shape.blocks, mixers=mixers, recurrent=None))
