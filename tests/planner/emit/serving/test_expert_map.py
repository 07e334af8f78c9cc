"""A plan's map of experts: written for SGLang, refused where no engine can take it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from emit_cases import DEEPSEEK_V3, MIXTRAL
from serving_cases import aggregated, layout, serving_plan, serving_request

from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.serving import sglang, trtllm, vllm
from meshplan.planner.emit.serving.job import Template
from meshplan.planner.emit.serving.request import ServingRequest

SPREAD, COPIES, DENSE = layout(1, data=16, expert=16), 16, 3


def request(engine: str, shape: ModelShape = DEEPSEEK_V3, *, layers: int | None = None) -> ServingRequest:
    assert shape.moe is not None
    slots = np.r_[np.arange(shape.moe.num_experts)[::-1], np.arange(COPIES)].tolist()
    lies = (tuple(slots),) * (layers or shape.num_moe_layers)
    return serving_request(shape, replace(aggregated(engine, SPREAD), expert_map=lies), quantized_checkpoint=False)


def test_sglang_gets_a_file_with_a_row_for_every_layer() -> None:
    job = sglang.job(request("sglang"))
    (program,) = job.programs
    assert ("--ep-num-redundant-experts", str(COPIES)) in program.flags
    (file,) = job.files
    for arguments in (program.head, program.follower):
        at = arguments.index("--init-expert-location")
        assert arguments[at + 1] == Template(text=f"{{files}}/{file.path}")
    rows = np.array(json.loads(file.content)["physical_to_logical_map"])
    assert rows.shape == (DEEPSEEK_V3.num_hidden_layers, 256 + COPIES)
    assert rows[:DENSE, :256].tolist() == [list(range(256))] * DENSE  # dense layers: in order
    assert (rows[DENSE:, 0] == 255).all()


def test_without_a_map_nothing_is_written() -> None:
    job = sglang.job(serving_request(DEEPSEEK_V3, aggregated("sglang", SPREAD), quantized_checkpoint=False))
    assert not job.files
    assert "--init-expert-location" not in job.programs[0].head


@pytest.mark.parametrize(("emitter", "says"), [(vllm, "loads none"), (trtllm, "WIDEEP")])
def test_engines_that_load_no_map_say_so(emitter: object, says: str) -> None:
    name = emitter.__name__.rpartition(".")[2]
    with pytest.raises(CannotExpressError, match=says):
        emitter.job(request(name))


def test_a_map_that_sglang_would_pass_over_or_cannot_read_is_refused() -> None:
    eight = layout(1, data=8, expert=8)
    of_mixtral = tuple(tuple(range(8)) for _ in range(32))
    mixtral = serving_request(MIXTRAL, replace(aggregated("sglang", eight), expert_map=of_mixtral))
    with pytest.raises(CannotExpressError, match="passes over it for Mixtral"):
        sglang.job(mixtral)
    with pytest.raises(CannotExpressError, match="a map of 5 of the model's 58 MoE layers"):
        sglang.job(request("sglang", layers=5))
    lacking = request("sglang")
    lies = tuple(tuple(slot or 1 for slot in layer) for layer in lacking.config.expert_map or ())
    broken = serving_request(DEEPSEEK_V3, replace(lacking.config, expert_map=lies), quantized_checkpoint=False)
    with pytest.raises(SpecError, match="no slot for expert 0"):
        sglang.job(broken)


@pytest.mark.parametrize("emitter", [vllm, sglang, trtllm])
def test_no_engine_keeps_tokens_with_their_experts(emitter: object) -> None:
    name = emitter.__name__.rpartition(".")[2]
    config = aggregated(name, SPREAD)
    spec = {"kind": "serving", "model": "deepseek-v3", "experts": {"loads": "a.npz", "dispatch": "stays"}}
    plan = serving_plan(DEEPSEEK_V3, config, spec=spec)
    with pytest.raises(CannotExpressError, match="return to their attention rank"):
        emitter.job(serving_request(DEEPSEEK_V3, config, plan=plan))
