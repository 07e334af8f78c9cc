"""What is emitted for a worker of a serving plan, the reader of the same engine understands."""

from __future__ import annotations

import random
import shlex

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving_cases import random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.serving.problem.engines import ENGINES

EMITTERS = {"vllm": vllm, "sglang": sglang}
STARTS = {"vllm": "vllm serve a/model", "sglang": "python3 -m sglang.launch_server --model-path a/model"}
LIMITS = ("max_num_seqs", "max_batched_tokens")
DEGREES = ("tensor_parallel", "pipeline_parallel", "attention_data_parallel", "expert_parallel", "context_parallel")


@pytest.mark.parametrize("engine", EMITTERS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from((LLAMA_70B, MIXTRAL, DEEPSEEK_V3)))
def test_degrees_and_limits_come_back(engine: str, seed: int, shape) -> None:
    config = random_config(random.Random(seed), ENGINES[engine], shape)
    request = serving_request(shape, config, quantized_checkpoint=True)
    for pool in config.pools:
        try:
            words = [word for flag in EMITTERS[engine].arguments(request, pool) for word in flag if word]
        except CannotExpressError:
            assume(False)
        found = read_inputs([f"{STARTS[engine]} {shlex.join(words)}"])
        assert not found.problems
        assert (found.kind, found.target) == ("serving", engine)
        assert {name: found.values[name] for name in DEGREES} == {name: getattr(pool.layout, name) for name in DEGREES}
        assert {name: found.values[name] for name in LIMITS} == {name: getattr(pool.limits, name) for name in LIMITS}
