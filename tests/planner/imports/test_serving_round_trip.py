"""What is emitted for a worker of a serving plan, the reader of the same engine understands."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving_cases import aggregated, disaggregated, layout, pool, random_config, serving_request

from meshplan.catalogs.constants.machines.device_shares import MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import mig_profiles
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.config import EngineLimits, Role, ServingConfig
from meshplan.planner.serving.problem.engines.table import ENGINES

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
    servers = 3 if engine == "vllm" else None
    limits = EngineLimits(max_num_seqs=77, max_batched_tokens=4096, stream_interval=5, api_servers=servers)
    found = read_inputs([str(written(aggregated(engine, layout(tensor=4, pipeline=2), limits=limits), tmp_path))])
    assert (found.kind, found.target) == ("serving", engine)
    expected = {"tensor_parallel": 4, "pipeline_parallel": 2, "max_num_seqs": 77, "max_batched_tokens": 4096}
    if engine != "trtllm":  # its file of options is named by a variable of the script
        expected["stream_interval"] = 5
    if engine == "vllm":
        expected["api_servers"] = 3
    assert {name: found.values[name] for name in expected} == expected
    (tmp_path / "mixed_args.txt").unlink()
    with pytest.raises(SpecError, match=r"mixed_args\.txt beside it, which is not there"):
        read_inputs([str(tmp_path / "launch.sh")])


H100 = "h100-sxm-80gb"


@pytest.mark.parametrize(
    ("fields", "stated"),
    [
        ({"num_workers": 3}, {"num_workers": 3}),
        ({"num_workers": 4, "share": MpsShare.of(80e9, 2)}, {"num_workers": 4, "mps": [2]}),
        ({"num_workers": 2, "share": mig_profiles()[H100]["3g.40gb"]}, {"num_workers": 2, "mig": ["3g.40gb"]}),
        ({"num_workers": 2, "power_cap_w": 512.5}, {"num_workers": 2, "power_caps_w": [512.5]}),
    ],
    ids=["replicas", "MPS", "MIG", "power limit"],
)
def test_replicas_shares_and_limits_come_back_from_our_files(
    fields: dict[str, Any], stated: dict[str, Any], tmp_path: Path
) -> None:
    found = read_inputs([str(written(aggregated("vllm", layout(), **fields), tmp_path))])
    assert found.values["memory_fraction"] == EngineLimits().memory_fraction  # of replicas on a device the sum
    assert {
        name: found.values[name] for name in ("num_workers", "mps", "mig", "power_caps_w") if name in found.values
    } == (stated)
    assert found.launch.num_hosts == 1
    assert all(len(entry) < 60 and "$" not in entry for entry in found.unread)
    assert [one.term for one in found.assumed if one.term.startswith("$")] == []


def test_workers_that_are_not_there_or_not_as_written_are_refused(tmp_path: Path) -> None:
    script = written(aggregated("vllm", layout(), num_workers=2), tmp_path)
    workers = tmp_path / "workers.txt"
    workers.write_text(workers.read_text("utf-8") + "one more\n", "utf-8")
    with pytest.raises(SpecError, match=r"workers\.txt is not as meshplan writes it"):
        read_inputs([str(script)])
    workers.unlink()
    with pytest.raises(SpecError, match=r"workers from workers\.txt beside it"):
        read_inputs([str(script)])


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("vllm serve a/model -tp 2 --port 8000 &", "vllm bench serve --model a/model --num-prompts 300"),
        (
            "python -m sglang.launch_server --model-path a/model --tp 2 &",
            "python -m sglang.bench_serving --model a/model --num-prompts 300",
        ),
    ],
)
def test_a_benchmark_beside_the_server_is_not_the_server(server: str, client: str, tmp_path: Path) -> None:
    """The last command of its name was read: a server without tensor parallelism."""
    script = tmp_path / "run.sh"
    script.write_text(f"{server}\nsleep 60\n{client}\n")
    assert read_inputs([str(script)]).values["tensor_parallel"] == 2
    script.write_text(f"{client}\n")
    with pytest.raises(SpecError, match=r"(vllm bench serve|bench_serving) is nothing that is known"):
        read_inputs([str(script)])


def test_of_a_script_with_two_roles_one_is_asked_for(tmp_path: Path) -> None:
    pair = disaggregated("vllm", pool(layout(tensor=2), Role.PREFILL), pool(layout(tensor=4), Role.DECODE))
    script = written(pair, tmp_path)
    with pytest.raises(SpecError, match=r"2 roles .*prefill_args\.txt, decode_args\.txt"):
        read_inputs([str(script)])
    found = read_inputs([str(tmp_path / "decode_args.txt")], source="vllm")
    assert found.values["tensor_parallel"] == 4
