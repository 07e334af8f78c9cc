"""What drafts take of the memory: by hand for each method, and never less than nothing in a plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.estimator.draft_memory import draft_memory
from meshplan.planner.serving.problem.config import Layout, Role
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.speculation import Drafter, computed_cost
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.layouts import placed_workers

BF16 = Quantization.uniform("bf16")
STATED = {"num_draft_tokens": 3, "acceptance": 0.7}


def question(**speculation: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": "llama-3.1-70b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 1000, "output_length": 200, "request_rate_per_s": 2.0},
        "constraints": {"target": "vllm"},
        **({"speculation": speculation} if speculation else {}),
    }


def test_each_method_by_hand(catalog: Catalog) -> None:
    llama, small = catalog.model_shape("llama-3.1-70b"), catalog.model_shape("llama-3.2-1b")
    four = Layout(tensor_parallel=4)
    assert draft_memory(None, llama, BF16, four).weights_bytes == 0.0
    assert draft_memory(Drafter(method="ngram"), llama, BF16, four).weights_bytes == 0.0
    assert draft_memory(Drafter(method="draft_model"), llama, BF16, four).weights_bytes == 0.0  # an unknown one
    eagle = draft_memory(Drafter(method="eagle3"), llama, BF16, four)
    layer = 8192 * 8192 * 2 + 8192 * 1024 * 2 + 3 * 8192 * 28672  # queries and output, keys and values, the MLP
    assert eagle.weights_bytes == pytest.approx(2 * (layer + 128256 * 8192) / 4, rel=1e-3)
    assert eagle.kv_bytes_per_token == 2 * 2 * 128 * 2  # two of eight heads on each of four devices
    model = draft_memory(Drafter(method="draft_model", shape=small), llama, BF16, four)
    assert model.weights_bytes == pytest.approx(2 * small.num_parameters / 4, rel=0.3)  # its ends are counted apart
    assert model.kv_bytes_per_token == 16 * 2 * 2 * 64 * 2


def test_prediction_layers_of_deepseek_are_eleven_billion_parameters(catalog: Catalog) -> None:
    """arXiv:2412.19437, §2.2: 11.5B of the 685B that are published, without what it shares with the model."""
    shape = catalog.model_shape("deepseek-v3")
    layout = Layout(tensor_parallel=8, expert_tensor_parallel=8)
    taken = draft_memory(Drafter(method="mtp"), shape, Quantization.uniform("fp8_block"), layout)
    assert 8 * taken.weights_bytes == pytest.approx(11.5e9, rel=0.1)
    assert taken.kv_bytes_per_token == 576 * 2


@pytest.mark.parametrize("speculation", [{"method": "eagle3"}, {"draft_model": "meta-llama/Llama-3.2-1B"}])
def test_with_drafts_a_cache_holds_fewer_tokens(speculation: dict[str, Any], catalog: Catalog) -> None:
    held = []
    for asked in (question(), question(**STATED, **speculation)):
        problem = resolve_serving(read_serving_spec(asked), catalog, Path()).problem
        placed = placed_workers(problem, Role.MIXED, Counter())
        held.append({one.layout: one.memory.kv_capacity_tokens for one in placed})
    assert held[1].keys() <= held[0].keys()
    assert all(tokens < held[0][layout] for layout, tokens in held[1].items())


def test_a_draft_model_of_the_catalog_brings_its_cost(catalog: Catalog) -> None:
    """Sixteen layers of eighty wait for as many launches: a fifth, where what is read is a fiftieth."""
    asked = question(**STATED, draft_model="meta-llama/Llama-3.2-1B")
    problem = resolve_serving(read_serving_spec(asked), catalog, Path()).problem
    assert problem.speculation is not None
    assert problem.speculation.draft_cost == pytest.approx(0.2)
    stated = resolve_serving(read_serving_spec(question(**asked["speculation"], draft_cost=0.1)), catalog, Path())
    assert stated.problem.speculation is not None
    assert stated.problem.speculation.draft_cost == 0.1
    large, other = catalog.model_shape("llama-3.1-70b"), catalog.model_shape("llama-3.1-8b")
    assert computed_cost(large, "draft_model", 1, other) == pytest.approx(32 / 80)
    assert computed_cost(large, "draft_model", 1, large) == 1.0


def test_a_draft_model_that_nobody_knows_has_to_say_its_cost(catalog: Catalog) -> None:
    profile = {"draft_model": {1: 1.6}}
    asked = question(choose=["draft_model"], profile=profile, draft_model="mine/tiny")
    with pytest.raises(SpecError, match="mine/tiny is not in the catalog: say what one step of it takes"):
        resolve_serving(read_serving_spec(asked), catalog, Path())
    with pytest.raises(SpecError, match="or name a draft_model that the catalog has"):
        read_serving_spec(question(choose=["draft_model"], profile=profile))
    known = question(choose=["draft_model"], profile=profile, draft_model="llama-3.2-1b")
    options = resolve_serving(read_serving_spec(known), catalog, Path()).problem.speculation_options
    assert [option.draft_cost for option in options] == [pytest.approx(0.2)]
