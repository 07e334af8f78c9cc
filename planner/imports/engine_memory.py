"""The share of a device's memory that a server's command states, as a spec counts it.

vLLM counts weights, workspace and KV cache together, as a plan does. SGLang leaves the workspace out, and TensorRT-LLM
counts the cache alone, over what the others leave: theirs need the memory that the model takes on the devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshplan.planner.emit.serving.terms import MEMORY_SHARES
from meshplan.planner.serving.estimator.memory import share_of_device, worker_memory
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.engines.table import ENGINES, expert_padding
from meshplan.planner.serving.problem.quantization import checkpoint_formats, published_formats

if TYPE_CHECKING:
    from meshplan.catalogs.hardware import Device
    from meshplan.catalogs.models.shapes import ModelShape
    from meshplan.planner.imports.reading import Reading

# Digits of a share that engines are given: a tenth of a percent is 80 MB of 80 GB.
_DIGITS = 3
_DEGREES = ("tensor_parallel", "pipeline_parallel", "attention_data_parallel", "context_parallel")


def take_memory_share(reading: Reading, shape: ModelShape | None, device: Device, *, context: float) -> None:
    """Put a stated share in ``memory_fraction``, as a plan counts it; without the model's shape it is left out.

    Args:
        reading: of a server's command, its degrees, limits and formats read.
        shape: of the model; None where the catalog does not hold it.
        device: that the server runs on.
        context: tokens of a request.
    """
    for of, term in MEMORY_SHARES.items():
        share = reading.values.pop(term, None)
        if share is None:
            continue
        flags = reading.source_flags.pop(term)
        if of != "total" and shape is None:
            reading.left_out.append(f"{flags} (a share of what the model leaves)")
            continue
        if of != "total" and shape is not None:
            share = round(_share_of_device(reading, shape, device, share, of, context=context), _DIGITS)
        reading.values["memory_fraction"] = share
        reading.source_flags["memory_fraction"] = flags


def _share_of_device(
    reading: Reading, shape: ModelShape, device: Device, share: float, of: str, *, context: float
) -> float:
    values = reading.values
    degrees = {name: int(values.get(name, 1)) for name in _DEGREES}
    experts = int(values.get("expert_parallel", 1))
    layout = Layout(**degrees)
    spread = 1 if shape.moe is None else max(layout.devices_per_stage // experts, 1)
    layout = replace(layout, expert_parallel=experts, expert_tensor_parallel=spread)
    limits = ENGINES[reading.target].default_limits(device)
    pinned = {name: values[name] for name in ("max_num_seqs", "max_batched_tokens") if name in values}
    limits = replace(limits, **pinned, memory_fraction=1.0)
    cache = str(values.get("kv_cache", "bf16"))
    published = None if "quantization" in values else published_formats(shape)
    named = checkpoint_formats(shape, str(values.get("quantization", "bf16")), cache)
    formats = published.with_cache(cache) if published is not None else named
    padding = expert_padding(reading.target, formats, device)
    memory = worker_memory(shape, device, layout, limits, formats, context=context, padding=padding)
    return share_of_device(memory, share, of)
