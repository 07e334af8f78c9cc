"""Files are written for CUDA and ROCm: plans on other accelerators are refused, not given files that start nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emit_cases import H100, LLAMA_70B, config_for, request_for
from serving_cases import NODE, aggregated, layout, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving.request import HostType
from meshplan.planner.launch.registry import emit, emit_serving


@pytest.mark.parametrize(("vendor", "name"), [("google", "TPU v5e"), ("aws", "Trainium2"), ("intel", "Gaudi 3")])
@pytest.mark.parametrize(("target", "framework"), [("megatron", None), ("deepspeed", None), ("jobset", "torchtitan")])
def test_training_on_other_accelerators_is_refused(target: str, framework: str | None, vendor: str, name: str) -> None:
    device = replace(H100, vendor=vendor, name=name, slug=name.lower())
    request = replace(request_for(LLAMA_70B, config_for(LLAMA_70B, data_parallel=8, zero_stage=3)), device=device)
    with pytest.raises(CannotExpressError, match=f"{name}: meshplan has no launcher"):
        emit(target, request, framework=framework)


@pytest.mark.parametrize(
    ("target", "engine", "vendor"), [("vllm", "vllm", "google"), ("lws", "vllm", "aws"), ("trtllm", "trtllm", "amd")]
)
def test_serving_on_other_accelerators_is_refused(target: str, engine: str, vendor: str) -> None:
    hosts = {NODE: HostType(devices_per_host=8, device=replace(H100, vendor=vendor))}
    request = serving_request(LLAMA_70B, aggregated(engine, layout(8)), host_types=hosts)
    with pytest.raises(CannotExpressError, match="has no launcher"):
        emit_serving(target, request)
