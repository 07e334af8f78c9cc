"""What planned plans start with: settings that a practitioner would choose, in each engine's words."""

from __future__ import annotations

import re

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import emit_plan, make_plan

INPUT, OUTPUT = 512, 128
# Engine → its option for the longest request, and what would turn off the reuse of prefixes.
WORDS = {
    "vllm": ("--max-model-len", "--no-enable-prefix-caching"),
    "sglang": ("--context-length", "--disable-radix-cache"),
    "trtllm": ("--max_seq_len", "enable_block_reuse: false"),
}


def question(engine: str) -> dict[str, object]:
    return {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": INPUT, "output_length": OUTPUT, "request_rate_per_s": 1.5, "num_requests": 32},
        "constraints": {"target": engine},
        "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1, "num_workers": 1},
    }


@pytest.mark.parametrize("engine", WORDS)
def test_a_planned_plan_starts_as_a_practitioner_would_start_it(catalog: Catalog, engine: str) -> None:
    emitted = emit_plan(make_plan(question(engine), catalog), engine, catalog)
    files = {str(one.path): one.content for one in emitted.artifacts}
    text = "\n".join(content for name, content in files.items() if name not in ("README.md", "plan.json"))
    longest, without_prefixes = WORDS[engine]
    (allowed,) = {int(value) for value in re.findall(rf"{longest}[ =]+(\d+)", text)}
    assert 1.1 * (INPUT + OUTPUT) < allowed < 2 * (INPUT + OUTPUT)  # room above the nominal lengths
    assert without_prefixes not in text
    assert "meta-llama/Llama-3.1-8B-Instruct" in text  # clients chat; the catalog knows the base
    assert "/health" in files["launch.sh"]  # waits until the servers answer
    measured = files["benchmark.sh"]
    assert re.search(r"warm-?up", measured)
    assert all(str(number) in measured for number in (INPUT, OUTPUT, 1.5))
    assert "plans record" in measured
