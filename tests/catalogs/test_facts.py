"""Which of several facts counts, and which facts are refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.facts import FIELDS, LEVEL_RANK, Fact, dimension_of, fact_problems, format_value, ruling_fact
from meshplan.catalogs.hardware import Evidence, EvidenceLevel
from meshplan.catalogs.units import Dimension


def fact(level: EvidenceLevel, date: str, *, order: int = 0, value: float = 1.0) -> Fact:
    evidence = Evidence(level=level, source="a citation", date=date)
    return Fact(field="tdp_w", value=value, evidence=evidence, order=order)


def test_a_measurement_beats_a_newer_datasheet() -> None:
    measured = fact(EvidenceLevel.MEASURED, "2020-01-01")
    assert ruling_fact([fact(EvidenceLevel.DATASHEET, "2026-01-01"), measured]) is measured


def test_within_a_level_the_newest_rules_and_within_a_day_the_last() -> None:
    newest = fact(EvidenceLevel.IMPORTED, "2026-02-01", order=1)
    assert ruling_fact([newest, fact(EvidenceLevel.IMPORTED, "2026-01-01", order=9)]) is newest
    last = fact(EvidenceLevel.IMPORTED, "2026-02-01", order=2)
    assert ruling_fact([last, newest]) is last


@given(
    st.lists(
        st.tuples(st.sampled_from(EvidenceLevel), st.dates().map(lambda day: day.isoformat())), min_size=1, max_size=8
    ),
    st.randoms(use_true_random=False),
)
def test_the_rule_does_not_depend_on_the_order_of_reading(
    kinds: list[tuple[EvidenceLevel, str]], shuffler: random.Random
) -> None:
    facts = [fact(level, date, order=order) for order, (level, date) in enumerate(kinds)]
    shuffled = list(facts)
    shuffler.shuffle(shuffled)
    ruling = ruling_fact(facts)
    assert ruling_fact(shuffled) is ruling
    assert LEVEL_RANK[ruling.evidence.level.value] == min(LEVEL_RANK[level.value] for level, _ in kinds)


def test_the_order_of_levels_is_the_declared_one() -> None:
    assert list(LEVEL_RANK) == [
        "measured here",
        "measured elsewhere",
        "fitted to published measurements",
        "datasheet",
        "assumed",
    ]


def test_every_field_has_the_dimension_of_its_name() -> None:
    counts = {"num_hosts", "devices_per_host", "nics_per_host"}
    counts |= {field.name for field in FIELDS["node_type"] if field.name.startswith(("links_per_pair", "pair_links."))}
    ratios = ("gemm_inner_saturation.", "operator_time_scale.")
    counts |= {field.name for field in FIELDS["device"] if field.name.startswith(ratios)}
    for fields in FIELDS.values():
        for field in fields:
            assert (dimension_of(field.name) is None) == (field.name in counts), field.name
    assert dimension_of("memory_bandwidth_bytes_per_s") is Dimension.BYTES_PER_S
    assert dimension_of("latency_s") is Dimension.S
    assert dimension_of("tdp_w") is Dimension.W


def test_values_read_well() -> None:
    assert format_value("latency_s", 5.3e-6) == "5.3 us"
    assert format_value("peak_flops_per_s.fp8", 1.979e15) == "2.0 PFLOP/s"
    assert format_value("tdp_w", 700.0) == "700 W"
    assert format_value("bandwidth_bytes_per_s", 50e9) == "50.0 GB/s"


def row(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "field": "memory_bandwidth_bytes_per_s",
        "value": 3.35e12,
        "level": "datasheet",
        "source": "https://example.org",
        "date": "2026-11-21",
    }
    return good | changes


def test_a_good_fact_has_no_problem() -> None:
    assert list(fact_problems("device", row(low=3.0e12, high=3.4e12, num_samples=3))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"field": "memory_bandwith_bytes_per_s"}, "did you mean 'memory_bandwidth_bytes_per_s'"),
        ({"value": 3350}, "wrong prefix"),
        ({"value": float("nan")}, "finite number"),
        ({"value": "3.35 TB/s"}, "SI units"),
        ({"value": True}, "finite number"),
        ({"field": "memory_bytes", "value": 80e9 + 0.5}, "whole number"),
        ({"low": 3.4e12}, "not between"),
        ({"high": "much"}, "finite number or absent"),
        ({"num_samples": -1}, "num_samples"),
        ({"level": "rumour"}, "evidence level 'rumour'"),
        ({"source": " "}, "citation"),
        ({"date": "21.11.2026"}, "2026-11-21"),
        ({"date": "2026-02-30"}, "must be a day"),
    ],
)
def test_bad_facts_name_what_is_wrong(changes: dict[str, object], words: str) -> None:
    problems = list(fact_problems("device", row(**changes)))
    assert len(problems) == 1
    assert words in problems[0]
