"""What is emitted for a worker of a serving plan, the reader of the same engine understands."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving_cases import aggregated, disaggregated, layout, pool, random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.config import EngineLimits, Role, ServingConfig
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
    for each in config.pools:
        try:
            words = [word for flag in EMITTERS[engine].arguments(request, each) for word in flag if word]
        except CannotExpressError:
            assume(False)
        found = read_inputs([f"{STARTS[engine]} {shlex.join(words)}"])
        assert not found.problems
        assert (found.kind, found.target) == ("serving", engine)
        assert {name: found.values[name] for name in DEGREES} == {name: getattr(each.layout, name) for name in DEGREES}
        assert {name: found.values[name] for name in LIMITS} == {name: getattr(each.limits, name) for name in LIMITS}


def written(config: ServingConfig, folder: Path) -> Path:
    """The launch script of a plan, with its files beside it."""
    write_artifacts(emit_serving(config.engine, serving_request(LLAMA_70B, config)).artifacts, folder, force=True)
    return folder / "launch.sh"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_written_script_is_read_with_the_flags_of_its_files(engine: str, tmp_path: Path) -> None:
    limits = EngineLimits(max_num_seqs=77, max_batched_tokens=4096)
    found = read_inputs([str(written(aggregated(engine, layout(tensor=4, pipeline=2), limits=limits), tmp_path))])
    assert (found.kind, found.target) == ("serving", engine)
    expected = {"tensor_parallel": 4, "pipeline_parallel": 2, "max_num_seqs": 77, "max_batched_tokens": 4096}
    assert {name: found.values[name] for name in expected} == expected
    (tmp_path / "mixed_args.txt").unlink()
    with pytest.raises(SpecError, match=r"mixed_args\.txt beside it, which is not there"):
        read_inputs([str(tmp_path / "launch.sh")])


def test_of_a_script_with_two_roles_one_is_asked_for(tmp_path: Path) -> None:
    pair = disaggregated("vllm", pool(layout(tensor=2), Role.PREFILL), pool(layout(tensor=4), Role.DECODE))
    script = written(pair, tmp_path)
    with pytest.raises(SpecError, match=r"2 roles .*prefill_args\.txt, decode_args\.txt"):
        read_inputs([str(script)])
    found = read_inputs([str(tmp_path / "decode_args.txt")], source="vllm")
    assert found.values["tensor_parallel"] == 4
