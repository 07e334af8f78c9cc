from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import EmitError
from meshplan.planner.serving.problem.config import (
    EngineLimits,
    Layout,
    Pool,
    Role,
    Router,
    ServingConfig,
    Speculation,
    serving_config_document,
    serving_config_from_document,
)
from meshplan.planner.serving.problem.quantization import KV_CACHE_BYTES, SCHEMES, Quantization

degrees = st.integers(1, 64)
schemes = st.sampled_from(sorted(SCHEMES))
pools = st.builds(
    Pool,
    role=st.sampled_from(Role),
    layout=st.builds(Layout, **dict.fromkeys(Layout.__dataclass_fields__, degrees)),
    num_workers=degrees,
    limits=st.builds(
        EngineLimits, max_num_seqs=degrees, memory_fraction=st.floats(0.1, 1.0), cuda_graphs=st.booleans()
    ),
    quantization=st.builds(
        Quantization, attention=schemes, mlp=schemes, experts=schemes, kv_cache=st.sampled_from(sorted(KV_CACHE_BYTES))
    ),
    node_type=st.text(min_size=1, max_size=9),
)
configs = st.builds(
    ServingConfig,
    engine=st.sampled_from(("vllm", "sglang", "trtllm")),
    pools=st.lists(pools, min_size=1, max_size=2).map(tuple),
    router=st.sampled_from(Router),
    speculation=st.none() | st.builds(Speculation, num_draft_tokens=degrees, acceptance=st.floats(0.0, 1.0)),
)


@given(configs)
def test_round_trip_through_json(config: ServingConfig) -> None:
    document = json.loads(json.dumps(serving_config_document(config), allow_nan=False))
    assert serving_config_from_document(document) == config
    assert document["num_devices"] == sum(pool["num_devices"] for pool in document["pools"])


def example() -> dict:
    layout = Layout(tensor_parallel=4)
    pool = Pool(
        role=Role.MIXED,
        layout=layout,
        num_workers=2,
        limits=EngineLimits(),
        quantization=Quantization.uniform("fp8"),
        node_type="dgx-h100",
    )
    return serving_config_document(ServingConfig(engine="vllm", pools=(pool,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_devices": 256}, "says 256 devices, its pools make 8"),
        ({"router": "nearest"}, "'nearest' is not a valid Router"),
        ({"pools": [{"role": "mixed"}]}, "field 'layout' is missing"),
        ({"speculation": {"tokens": 3}}, "unexpected keyword argument 'tokens'"),
    ],
)
def test_bad_documents_are_named(change: dict, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        serving_config_from_document({**example(), **change})
