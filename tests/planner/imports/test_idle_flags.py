"""Flags of servers on which no plan depends are reported in one line, and nothing else is."""

from __future__ import annotations

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.commands.import_ import spec_text
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.imports.sources.engines import LLAMA_CPP, SGLANG, TRTLLM, VLLM
from meshplan.planner.imports.sources.idle_flags import IDLE_FLAGS
from meshplan.planner.imports.spec import Answers, complete

IDLE = {
    "vllm serve a/model -tp 2": "--host 0.0.0.0 --port 8000 --api-key SECRET --served-model-name m "
    "--no-enable-log-requests --uvicorn-log-level info --tool-call-parser hermes --ssl-keyfile k --trust-remote-code",
    "python -m sglang.launch_server --model-path a/model --tp 2": "--host 0.0.0.0 --port 30000 --api-key SECRET "
    "--log-level info --enable-metrics --random-seed 1 --decode-log-interval 40",
    "trtllm-serve a/model --tp_size 2": "--host 0.0.0.0 --port 8000 --log_level info --trust_remote_code",
    "llama-server -m a/model": "--host 0.0.0.0 --port 8080 --api-key SECRET --metrics --jinja",
}
# What a plan may depend on, whatever is known of it: checkpoints, tokens, answers, processes, kernels.
TELLING = {
    "--revision": "gptq-4bit",
    "--load-format": "bitsandbytes",
    "--tokenizer": "another",
    "--generation-config": "auto",
    "--block-size": "128",
    "--no-such-flag": "3",
}


@pytest.mark.parametrize("command", IDLE)
def test_flags_that_no_plan_depends_on_are_named_apart_and_without_their_values(command: str) -> None:
    telling = " ".join(f"{flag} {value}" for flag, value in TELLING.items())
    plain, found = read_inputs([command]), read_inputs([f"{command} {IDLE[command]} {telling}"])
    stated = [word for word in IDLE[command].split() if word.startswith("--")]
    assert sorted(flag.replace("_", "-") for flag in found.idle) == sorted(flag.replace("_", "-") for flag in stated)
    assert found.unread == [*plain.unread, *(f"{flag} {value}" for flag, value in TELLING.items())]
    assert found.values == plain.values
    assert "SECRET" not in str((found.idle, found.unread, found.left_out))


def test_no_flag_of_a_mapping_table_is_without_influence() -> None:
    for engine in (VLLM, SGLANG, TRTLLM, LLAMA_CPP):
        keys = {key.replace("_", "-") for term in engine.terms for key in term.keys}
        assert not keys & IDLE_FLAGS
        assert not {*engine.model_flags} & IDLE_FLAGS


def test_the_spec_says_how_many_there_are_in_one_note(catalog: Catalog) -> None:
    answers = Answers(node_type="dgx-h100", input_length=1000, output_length=200, concurrency=8)
    command = "vllm serve Qwen/Qwen3-32B -tp 2 --port 8000 --enable-request-id-headers --api-key SECRET --odd 1"
    text = spec_text(complete(read_inputs([command]), answers, catalog))
    assert "# 3 options that no plan depends on: --api-key, --enable-request-id-headers, --port." in text
    assert "#   --odd 1" in text
    assert "SECRET" not in text
