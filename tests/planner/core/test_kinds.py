"""A kind is one registry entry and its own module: a toy kind goes through planning and comparing."""

from __future__ import annotations

import pytest
from toy_kind import SPEC, register_coin

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.compare import compare_plans
from meshplan.planner.core.kinds import KINDS, Kind, kind_of, offered
from meshplan.planner.service import emit_plan, estimate_plan, explain_instead, make_plan, plan_target


@pytest.fixture
def coin(monkeypatch: pytest.MonkeyPatch) -> Kind:
    return register_coin(monkeypatch)


def test_a_new_kind_is_planned_and_compared(coin: Kind, catalog: Catalog) -> None:
    plans = [make_plan(SPEC, catalog, seed=seed) for seed in (0, 1)]
    assert [plan.answer for plan in plans] == [{"side": 0}, {"side": 1}]
    assert [row.field for row in compare_plans(plans).choices] == ["side"]
    assert kind_of(SPEC) is coin


def test_a_new_kind_says_what_it_has_not(coin: Kind, catalog: Catalog) -> None:
    plan = make_plan(SPEC, catalog)
    assert plan_target(plan) is None
    with pytest.raises(EmitError, match=rf"of the kind '{coin.name}' has no configuration to launch"):
        emit_plan(plan, "megatron", catalog)
    with pytest.raises(
        SpecError, match="coin has no single configuration to price; kinds that have: training, serving"
    ):
        estimate_plan(SPEC, catalog)
    with pytest.raises(SpecError, match=r"\(coin, optimal\) has no choices to change"):
        explain_instead(plan, {"sides": 3}, catalog)
    with pytest.raises(SpecError, match="has no mapping to draw"):
        offered(plan, "mapping_view", "mapping to draw")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_its_modules(name: str) -> None:
    kind = KINDS[name]
    assert callable(kind.offers("plan"))
    launcher = kind.launcher()
    assert launcher is None or (callable(launcher.target) and callable(launcher.files))
    report = __import__(kind.report, fromlist=["report"])
    assert all(
        callable(getattr(report, part)) for part in ("report", "top_rows", "top_columns", "next_commands", "describe")
    )


def test_an_unknown_kind_gets_the_closest() -> None:
    with pytest.raises(SpecError, match="serving"):
        kind_of({"kind": "servng"})
