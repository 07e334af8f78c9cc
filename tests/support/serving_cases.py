"""Serving plans that the tests of the emitters share (plain data; no fixtures)."""

from __future__ import annotations

import random
from typing import Any

from emit_cases import H100

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Interval, Plan
from meshplan.planner.emit.serving.request import HostType, ServingRequest
from meshplan.planner.serving.problem.config import (
    EngineLimits,
    Layout,
    Pool,
    Role,
    Router,
    ServingConfig,
    Speculation,
    serving_config_document,
)
from meshplan.planner.serving.problem.engines.rules import EngineRules
from meshplan.planner.serving.problem.quantization import Quantization

NODE = "dgx-h100"
HOSTS = {NODE: HostType(devices_per_host=8, device=H100)}


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, expert: int = 1, context: int = 1) -> Layout:
    """A layout whose experts fill the stage."""
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        attention_data_parallel=data,
        expert_parallel=expert,
        expert_tensor_parallel=tensor * data * context // expert,
        context_parallel=context,
    )


def pool(of: Layout, role: Role = Role.MIXED, **fields: Any) -> Pool:
    """Alike workers on DGX H100 hosts; ``fields`` change limits (by name), formats and their number."""
    defaults: dict[str, Any] = {
        "num_workers": 1,
        "limits": EngineLimits(),
        "quantization": Quantization.uniform("bf16"),
        "node_type": NODE,
    }
    return Pool(role=role, layout=of, **{**defaults, **fields})


def serving_plan(shape: ModelShape, config: ServingConfig, **fields: Any) -> Plan:
    """A plan of the kind ``serving``."""
    defaults: dict[str, Any] = {
        "kind": "serving",
        "spec": {"kind": "serving", "model": shape.slug},
        "spec_digest": "0" * 64,
        "catalog_digest": "1" * 64,
        "config": serving_config_document(config),
        "predicted": {"ttft_p99_s": Interval(value=1.0, low=0.9, high=1.1)},
        "solution": {"status": "feasible", "solver": "enumeration", "wall_s": 0.1, "cpu_s": 0.1},
    }
    return Plan(**{**defaults, **fields})


def serving_request(shape: ModelShape, config: ServingConfig, **fields: Any) -> ServingRequest:
    """What the serving emitters take."""
    plan = fields.pop("plan", None) or serving_plan(shape, config)
    path = f"/models/{shape.slug}.gguf" if config.engine == "llama.cpp" else f"publisher/{shape.slug}"
    return ServingRequest(plan=plan, shape=shape, **{"host_types": HOSTS, "model_path": path, **fields})


def aggregated(engine: str, of: Layout, **fields: Any) -> ServingConfig:
    """One pool; ``router`` and ``speculation`` go to the configuration, the rest to the pool."""
    own = {name: fields.pop(name) for name in ("router", "speculation") if name in fields}
    return ServingConfig(engine=engine, pools=(pool(of, **fields),), **own)


def disaggregated(engine: str, prefill: Pool, decode: Pool, **fields: Any) -> ServingConfig:
    """Two pools."""
    return ServingConfig(engine=engine, pools=(prefill, decode), **fields)


def random_config(draw: random.Random, rules: EngineRules, shape: ModelShape) -> ServingConfig:
    """A configuration that the engine's rules allow, drawn until one is found."""
    while True:
        config = _draw_config(draw, rules, shape)
        if not rules.broken(shape, config):
            return config


def _draw_config(draw: random.Random, rules: EngineRules, shape: ModelShape) -> ServingConfig:
    formats = Quantization.uniform(
        draw.choice(("bf16", *rules.online, "fp8_block")), kv_cache=draw.choice(("bf16", "fp8"))
    )
    if draw.random() < 0.5:
        pools: tuple[Pool, ...] = (_draw_pool(draw, shape, Role.MIXED, formats),)
    else:
        pools = tuple(_draw_pool(draw, shape, role, formats) for role in (Role.PREFILL, Role.DECODE))
    guesses = Speculation(num_draft_tokens=draw.randint(1, 4), acceptance=0.7)
    return ServingConfig(
        engine=rules.name,
        pools=pools,
        router=draw.choice(tuple(Router)),
        speculation=guesses if shape.num_nextn_predict_layers and draw.random() < 0.3 else None,
        kv_connector=draw.choice(rules.kv_connectors),
    )


def _draw_pool(draw: random.Random, shape: ModelShape, role: Role, formats: Quantization) -> Pool:
    tensor, context = draw.choice((1, 1, 2, 4, 8, 16)), draw.choice((1, 1, 1, 2, 4))
    data = draw.choice((1, 2, 4, 8, 16)) if shape.moe is not None else 1
    stage = tensor * data * context
    experts = draw.choice((1, stage, stage, max(1, stage // 2))) if shape.moe is not None else 1
    limits = EngineLimits(
        max_num_seqs=draw.choice((16, 64, 256, 1024)),
        max_batched_tokens=draw.choice((2048, 8192, 16384)),
        memory_fraction=draw.choice((0.8, 0.9, 0.95)),
        prefix_caching=role is not Role.DECODE and draw.random() < 0.5,
        cuda_graphs=draw.random() < 0.8,
    )
    return Pool(
        role=role,
        layout=layout(tensor, draw.choice((1, 1, 2, 4)), data, experts, context),
        num_workers=draw.randint(1, 3),
        limits=limits,
        quantization=formats,
        node_type=NODE,
    )
