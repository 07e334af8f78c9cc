"""Plans side by side: only what differs, whether the order is certain, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshplan.catalogs.errors import StoreError
from meshplan.planner.compare import compare_measured, compare_plans
from meshplan.planner.core.plan import Interval, Plan


def plan(*, step_s: float = 10.0, spread: float = 1.1, config: dict[str, Any] | None = None, **parts: float) -> Plan:
    """A small training plan whose step is the sum of ``parts``."""
    times = parts or {"matrix products": step_s}
    total = sum(times.values())
    choices = {"tensor_parallel": 2, "layers_per_chunk": (4, 4), "global_batch_size": 8, "sequence_length": 1024}
    return Plan(
        kind="training",
        spec={"kind": "training", "model": "m", "workload": {"sequence_length": 1024}},
        spec_digest="s",
        catalog_digest="c",
        config={**choices, **(config or {})},
        predicted={"iteration_s": Interval(value=total, low=total / spread, high=total * spread)},
        solution={"status": "optimal", "objective": total},
        breakdown=tuple(
            {"name": name, "seconds": seconds, "share": seconds / total} for name, seconds in times.items()
        ),
    )


def test_only_what_differs_is_listed() -> None:
    other = replace(plan(config={"tensor_parallel": 4}), spec={"kind": "training", "model": "m", "workload": {}})
    found = compare_plans([plan(), other])
    assert [(item.field, item.values) for item in found.choices] == [("tensor_parallel", (2, 4))]
    assert [(item.field, item.values) for item in found.question] == [("workload.sequence_length", (1024, None))]


def pool(role: str, tensor_parallel: int, *, chunked_prefill: bool = True) -> dict[str, Any]:
    layout, limits = {"tensor_parallel": tensor_parallel}, {"chunked_prefill": chunked_prefill}
    return {"role": role, "layout": layout, "limits": limits}


def test_pools_of_other_roles_differ_in_what_they_do_not_all_share() -> None:
    mixed = plan(config={"pools": [pool("mixed", 8)]})
    apart = plan(config={"pools": [pool("prefill", 2), pool("decode", 4)]})
    assert {item.field: item.values for item in compare_plans([mixed, apart]).choices} == {
        "pools.mixed.layout.tensor_parallel": (8, None),
        "pools.prefill.layout.tensor_parallel": (None, 2),
        "pools.decode.layout.tensor_parallel": (None, 4),
    }
    unlike = plan(config={"pools": [pool("prefill", 2), pool("decode", 4, chunked_prefill=False)]})
    fields = {item.field for item in compare_plans([mixed, unlike]).choices}
    assert {"pools.mixed.limits.chunked_prefill", "pools.decode.limits.chunked_prefill"} <= fields


def test_pools_of_one_role_are_all_compared() -> None:
    two = plan(config={"pools": [pool("mixed", 2), pool("mixed", 1)]})
    other = plan(config={"pools": [pool("mixed", 4), pool("mixed", 1)]})
    found = compare_plans([two, other]).choices
    assert [(item.field, item.values) for item in found] == [("pools.mixed_1.layout.tensor_parallel", (2, 4))]


def test_constants_of_one_machine_each_stand_in_one_line() -> None:
    one, other = (
        replace(plan(), provenance={"calibration": {node: {"engine": "vllm", "num_runs": runs}}, "sources": {}})
        for node, runs in (("dgx-h100", 102), ("dgx-h200", 99))
    )
    found = [(item.field, item.values) for item in compare_plans([one, other]).rests_on]
    assert ("calibration.num_runs", (102, 99)) in found
    assert not any("dgx-h100" in name for name, _ in found)


def test_a_default_that_is_left_out_is_no_difference() -> None:
    spec = {
        "kind": "training",
        "model": "m",
        "cluster": {"nodes": [{"type": "n", "count": 1}]},
        "workload": {"sequence_length": 1024, "global_batch_size": 8},
    }
    spelt_out = {**spec, "objective": "throughput", "fixed": {}, "constraints": {"target": "megatron"}}
    assert compare_plans([replace(plan(), spec=spec), replace(plan(), spec=spelt_out)]).question == ()


def test_what_the_numbers_rest_on_is_listed_where_it_differs() -> None:
    one = replace(plan(), provenance={"meshplan": "1", "calibration": {"num_runs": 3}, "sources": {"price": "a"}})
    newer = replace(
        one,
        provenance={
            **one.provenance,
            "meshplan": "2",
            "sources": {"price": "b"},
            "share_of_time_by_evidence": {"x": 1},
        },
        catalog_digest="d",
        solution={**one.solution, "status": "feasible", "gap": 0.2},
    )
    found = compare_plans([one, newer])
    assert {item.field: item.values for item in found.rests_on} == {
        "catalog entries": ("c", "d"),
        "meshplan": ("1", "2"),
        "source.price": ("a", "b"),
    }
    assert {item.field: item.values for item in found.proof} == {"status": ("optimal", "feasible"), "gap": (None, 0.2)}
    document = found.to_document()
    assert document["rests_on"][0] == {"field": "catalog entries", "values": ["c", "d"]}
    # Another question looks other entries up: their digest says nothing of the catalog.
    other = replace(newer, spec={**one.spec, "model": "n"})
    assert "catalog entries" not in {item.field for item in compare_plans([one, other]).rests_on}


def test_a_plan_does_not_differ_from_itself_or_from_its_json() -> None:
    one = plan()
    found = compare_plans([one, Plan.from_document(one.to_document())])
    assert (found.choices, found.question, found.rests_on, found.proof) == ((), (), (), ())
    assert found.metrics[0].changes == (0.0, 0.0)
    assert found.reasons == ("a step takes 10.00 s in both plans",)


@pytest.mark.parametrize(("seconds", "apart"), [(10.5, False), (12.0, False), (12.2, True), (8.0, True), (9.0, False)])
def test_the_order_is_certain_only_where_intervals_lie_apart(seconds: float, apart: bool) -> None:
    found = compare_plans([plan(step_s=10.0), plan(step_s=seconds)])
    assert found.metrics[0].apart == (False, apart)
    assert ("not certain" in found.reasons[0]) is not apart
    assert found.metrics[0].changes[1] == pytest.approx(seconds / 10.0 - 1.0)


def test_a_metric_that_only_one_plan_predicts_has_no_change() -> None:
    richer = replace(plan(), predicted={**plan().predicted, "mfu": Interval(value=0.4, low=0.3, high=0.5)})
    mfu = next(item for item in compare_plans([plan(), richer]).metrics if item.metric == "mfu")
    assert (mfu.predicted[0], mfu.changes, mfu.apart) == (None, (None, None), (None, None))


def test_the_reason_names_the_parts_that_changed_most() -> None:
    first = plan(compute=10.0, bubble=1.0, messages=2.0, overhead=0.01)
    other = plan(compute=10.0, bubble=4.0, messages=0.5, overhead=0.03)
    (why,) = compare_plans([first, other]).reasons
    assert f"11.7% more time than in {first.plan_id}: bubble +3.00 s, messages −1.50 s" in why
    assert "overhead" not in why


def test_different_batches_are_compared_for_the_same_tokens() -> None:
    (why,) = compare_plans([plan(compute=10.0), plan(compute=20.0, config={"global_batch_size": 16})]).reasons
    assert why.startswith("a million tokens takes 20.3 min in both plans")


@pytest.mark.parametrize(("seconds", "doubted"), [(19.0, True), (10.0, False)])
def test_the_order_of_different_batches_is_that_of_the_same_tokens(seconds: float, doubted: bool) -> None:
    """A step of twice the tokens takes longer without being slower: 10 s ± 10 % against 9.5 s and 5 s for the same."""
    (why,) = compare_plans([plan(compute=10.0), plan(compute=seconds, config={"global_batch_size": 16})]).reasons
    assert "less time" in why
    assert ("the order is not certain" in why) is doubted


def test_plans_of_stand_alone_problems_compare_their_objectives() -> None:
    def mapping(objective: float) -> Plan:
        answer = {"method": "exact", "assignment": [0, 1]}
        return replace(
            plan(), kind="rank-mapping", config={}, predicted={}, answer=answer, solution={"objective": objective}
        )

    found = compare_plans([mapping(2.0), mapping(3.0)])
    assert [item.metric for item in found.metrics] == ["objective"]
    assert found.metrics[0].apart == (False, True)
    assert found.reasons == ("",)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(StoreError, match="two plans"):
        compare_plans([plan()])
    with pytest.raises(StoreError, match="different kinds"):
        compare_plans([plan(), replace(plan(), kind="gpu-allocation")])


def test_a_measurement_is_inside_or_outside_the_interval() -> None:
    one = plan(step_s=10.0, spread=1.1)
    (inside,) = compare_measured(one, {"iteration_s": 10.5, "note": "x"})
    (outside,) = compare_measured(one, {"iteration_s": 12.5})
    assert (inside.inside, outside.inside) == (True, False)
    assert outside.error == pytest.approx(10.0 / 12.5 - 1.0)
    assert compare_measured(one, {}) == ()
