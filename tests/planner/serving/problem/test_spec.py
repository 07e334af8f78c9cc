"""The serving question as users write it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.reading.spec_reader import plain_numbers, spec_schema
from meshplan.planner.service import make_plan
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.slo import slos_of
from meshplan.planner.serving.problem.spec import ServingSpec, read_serving_spec

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 1000, "output_length": 200, "request_rate_per_s": 4},
    "slo": {"ttft_p99_s": 2.0, "tpot_p95_s": 0.05},
}


def with_workload(**workload: Any) -> dict[str, Any]:
    return {**SPEC, "workload": workload}


def messages(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        read_serving_spec(document)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_slos_have_their_percentile() -> None:
    slos = {slo.key: slo for slo in read_serving_spec(SPEC).slos}
    assert set(slos) == {"ttft_p99_s", "tpot_p95_s"}
    assert (slos["ttft_p99_s"].metric, slos["ttft_p99_s"].percentile) == ("ttft", "p99")
    assert slos["tpot_p95_s"].limit_s == 0.05


def test_a_limit_may_bring_its_unit_and_is_the_same_question() -> None:
    written = {**SPEC, "slo": {"ttft_p99_s": "2 s", "tpot_p95_s": "50 ms"}}
    assert [slo.limit_s for slo in read_serving_spec(written).slos] == [2.0, 0.05]
    assert plain_numbers(ServingSpec, written) == SPEC
    assert jsonschema.Draft202012Validator(spec_schema(ServingSpec)).is_valid(written)


def test_a_limit_without_its_unit_in_the_key_is_told_the_key() -> None:
    assert "did you mean 'tpot_p95_s'" in messages({**SPEC, "slo": {"tpot_p95": "50 ms"}})["slo"]


def test_a_model_of_images_is_told_its_kind(catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=r"FLUX\.1 dev makes images or videos: ask with kind: diffusion"):
        make_plan({**SPEC, "model": "flux.1-dev"}, catalog)


@pytest.mark.parametrize("limit", ["50 GB", "soon", "50 msec", "-1 s", "0 ms", "2 weeks", True])
def test_a_limit_that_is_no_time_is_refused(limit: Any) -> None:
    assert "slo.ttft_p99_s" in messages({**SPEC, "slo": {"ttft_p99_s": limit}})


@pytest.mark.parametrize(
    ("workload", "process"),
    [
        ({"request_rate_per_s": 2}, Arrival.POISSON),
        ({"request_rate_per_s": 2, "burstiness": 3}, Arrival.GAMMA),
        ({"concurrency": 8}, Arrival.CLOSED_LOOP),
        ({}, None),
        ({"arrival": "all_at_once"}, Arrival.ALL_AT_ONCE),
    ],
)
def test_the_process_follows_from_what_is_given(workload: dict[str, Any], process: Arrival | None) -> None:
    spec: ServingSpec = read_serving_spec(with_workload(input_length=10, output_length=10, **workload))
    assert spec.workload.process is process


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"input_length": 10}, "give input_length and output_length, or a trace"),
        ({"input_length": 10, "output_length": 5, "request_rate_per_s": 1, "concurrency": 2}, "not both"),
        ({"input_length": 10, "output_length": 5, "arrival": "trace"}, "needs trace: FILE"),
        ({"input_length": 10, "output_length": 5, "arrival": "poisson", "concurrency": 3}, "request_rate_per_s"),
        ({"input_length": 10, "output_length": 5, "arrival": "closed_loop", "request_rate_per_s": 3}, "concurrency"),
        ({"input_length": 10, "output_length": 5, "arrival": "gamma", "request_rate_per_s": 3}, "burstiness above 1"),
        ({"trace": "t.csv", "arrival": "poisson"}, "brings its own arrivals"),
        ({"input_length": 10, "output_length": 5, "concurrency": 3, "burstiness": 2}, "burstiness is of gaps"),
        ({"input_length": 10, "output_length": 5, "arrival": "all_at_once", "burstiness": 2}, "burstiness is of gaps"),
        (
            {"input_length": 10, "output_length": 5, "arrival": "poisson", "request_rate_per_s": 3, "burstiness": 2},
            "burstiness is of gaps",
        ),
        ({"trace": "t.csv", "burstiness": 2}, "burstiness is of gaps"),
    ],
)
def test_contradictions_are_named(workload: dict[str, Any], said: str) -> None:
    assert said in messages(with_workload(**workload))["workload"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pins_of_one_role_do_not_go_with_aggregated_workers(role: str) -> None:
    fixed = {"mode": "aggregated", role: {"tensor_parallel": 2}}
    assert "fixed" in messages({**SPEC, "fixed": fixed})
    assert f"{role} is of disaggregated workers" in messages({**SPEC, "fixed": fixed})["fixed"]


@pytest.mark.parametrize("length", [0, -1, 1.5, "100 GB", "1.0001k", None])
def test_lengths_are_whole_numbers_from_one(length: Any) -> None:
    assert messages(with_workload(input_length=length, output_length=10))


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan")])
def test_slos_are_finite_seconds(limit: float) -> None:
    assert "slo.ttft_p99_s" in messages({**SPEC, "slo": {"ttft_p99_s": limit}})


def test_every_problem_is_named_at_once() -> None:
    found = messages(
        {
            **SPEC,
            "workload": {"input_length": 10, "output_lenght": 5},
            "slo": {"ttft_p98_s": 1.0},
            "fixed": {"tensor_paralel": 2, "decode": {"tensor_parallel": 0}},
            "quantization": ["fp7"],
        }
    )
    assert "did you mean 'output_length'" in found["workload.output_lenght"]
    assert "not ttft_p98_s" in found["slo"]
    assert "tensor_parallel" in found["fixed.tensor_paralel"]
    assert {"fixed.decode.tensor_parallel", "quantization[0]"} <= set(found)


@pytest.mark.parametrize(
    ("mps", "path", "message"),
    [
        (2, "mps", "must be a list, such as [first, second] (given: 2)"),
        ([2, 1], "mps[1]", "must be at least 2 (given: 1)"),
        ("chose", "mps", "must be 'choose' (given: 'chose'); did you mean 'choose'?"),
    ],
)
def test_a_list_or_a_word_is_one_problem(mps: Any, path: str, message: str) -> None:
    """Of the type that was meant; other fields keep theirs."""
    assert (
        messages({**SPEC, "mps": mps, "mig": ["1g.20gb", 7], "objective": "speed"}).items()
        >= {
            path: message,
            "mig[1]": "must be a text (given: 7)",
        }.items()
    )
    assert len(messages({**SPEC, "mps": mps})) == 1


def test_draft_and_pins_are_read() -> None:
    spec = read_serving_spec(
        {
            **SPEC,
            "speculation": {"num_draft_tokens": 3, "acceptance": 0.8},
            "fixed": {"mode": "disaggregated", "prefill": {"tensor_parallel": 2}, "decode": {"num_workers": 3}},
        }
    )
    assert spec.speculation is not None
    assert spec.speculation.value.tokens_per_step == pytest.approx((1 - 0.8**4) / 0.2)
    assert spec.fixed.prefill.pinned() == {"tensor_parallel": 2}
    assert spec.fixed.pinned() == {}


def test_the_schema_reads_what_the_models_read() -> None:
    validator = jsonschema.Draft202012Validator(spec_schema(ServingSpec))
    jsonschema.Draft202012Validator.check_schema(validator.schema)
    assert validator.is_valid(SPEC)
    assert not validator.is_valid({**SPEC, "kind": "training"})
    assert not validator.is_valid({**SPEC, "fixed": {"tensor_parallel": 0}})


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"profile": "sharegpt"}, "profile"),
        ({"method": "ngram", "draft_model": "org/draft"}, "draft_model"),
        ({"method": "mtp", "draft_model": "org/draft"}, "draft_model"),
    ],
)
def test_what_stated_drafts_do_not_use_is_named(said: dict[str, Any], name: str) -> None:
    drafts = {"num_draft_tokens": 3, "acceptance": 0.8, **said}
    assert f"{name} is" in messages({**SPEC, "speculation": drafts})["speculation"]


def test_a_checkpoint_of_drafts_that_no_chosen_method_loads_is_named() -> None:
    chosen = {"choose": ["ngram"], "draft_model": "org/draft"}
    assert "draft_model is" in messages({**SPEC, "speculation": chosen})["speculation"]
    assert read_serving_spec({**SPEC, "speculation": {**chosen, "choose": ["ngram", "eagle3"]}}).speculation


def test_limits_have_one_order_however_a_spec_lists_them() -> None:
    """What a plan says of several followed the spec, so that one question had two plans."""
    limits = {"tpot_p95_s": 0.05, "e2e_mean_s": 9.0, "ttft_p99_s": 1.0, "note": 0.0}
    listed = [slo.key for slo in slos_of(limits)]
    assert listed == ["ttft_p99_s", "tpot_p95_s", "e2e_mean_s"]
    assert slos_of(dict(reversed(limits.items()))) == slos_of(limits)
