"""Tokens that are sent to a client together: where that has no meaning the spec says so."""

from __future__ import annotations

import pytest
from serving_questions import spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import make_plan

EMBEDS = {"model": "bge-m3", "workload": {"task": "embed", "input_length": 500, "request_rate_per_s": 1}, "slo": {}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"slo": {"itl_p95_s": 0.05}, "fixed": {"stream_interval": 8}},
            "fixed.stream_interval: 8: .* itl_p95_s has no",
        ),
        (
            {"slo": {"itl_p95_s": 0.05}, "fixed": {"decode": {"stream_interval": 8}}},
            "fixed.decode.stream_interval: 8: .* itl_p95_s has no",
        ),
        (
            {"constraints": {"target": "llama.cpp"}, "fixed": {"stream_interval": 8}},
            "llama.cpp has no flag for it and sends every token by itself",
        ),
        ({**EMBEDS, "fixed": {"stream_interval": 8}}, "embed streams no tokens"),
        ({"fixed": {"stream_interval": 0}}, "must be at least 1"),
        ({"fixed": {"api_servers": 0}}, "must be at least 1"),
        (
            {"constraints": {"target": "sglang"}, "fixed": {"prefill": {"api_servers": 2}}},
            "fixed.prefill.api_servers: 2: sglang has no flag",
        ),
    ],
)
def test_it_is_refused_where_it_has_no_meaning(catalog: Catalog, change: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        make_plan(spec(**change), catalog)


def test_an_api_server_that_falls_behind_carries_more_with_it(catalog: Catalog) -> None:
    """Llama-3.2-1B on one H100: the closed loop's rate is that of its API server until tokens are sent together."""
    asked = spec(
        model="llama-3.2-1b",
        slo={},
        workload={"input_length": 200, "output_length": 400, "concurrency": 512},
        constraints={"max_devices": 1},
    )
    rates = [
        make_plan({**asked, "fixed": {"stream_interval": tokens}}, catalog).predicted["requests_per_s"].value
        for tokens in (1, 10)
    ]
    assert rates[0] == pytest.approx(1.0 / (400 * 34e-6 + 6.2e-3), rel=0.03)
    assert rates[1] > 1.2 * rates[0]
    assert make_plan(asked, catalog).predicted["requests_per_s"].value == pytest.approx(rates[0])


@pytest.mark.parametrize("servers", [2, 3])
def test_more_api_servers_let_more_pass(catalog: Catalog, servers: int) -> None:
    """Each as many as one, until the GPU decides; no more servers are ever slower."""
    asked = spec(
        model="llama-3.2-1b",
        slo={},
        workload={"input_length": 200, "output_length": 1600, "concurrency": 64 * servers},
        constraints={"max_devices": 1},
    )
    plans = [make_plan({**asked, "fixed": {"api_servers": n}}, catalog) for n in (1, servers, 8 * servers)]
    passed = [plan.answer["most_passed_on_per_s"] for plan in plans]
    assert passed == pytest.approx([n / (1600 * 34e-6 + 6.2e-3) for n in (1, servers, 8 * servers)])
    rates = [plan.predicted["requests_per_s"].value for plan in plans]
    assert rates[0] <= rates[1] * 1.001 <= rates[2] * 1.002
    assert plans[1].config["pools"][0]["limits"]["api_servers"] == servers
