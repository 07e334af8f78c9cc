"""A kind of question of the tests' own: tossing a coin."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from meshplan.planner.core.kinds import KINDS, Kind, Question
from meshplan.planner.core.plan import Plan, plan_identity

SPEC = {"kind": "coin", "name": "toss", "sides": 2}


def toss(question: Question) -> Plan:
    answer = {"side": question.seed % question.document["sides"]}
    solution = {"status": "optimal", "solver": "a coin", "objective": 1.0, "bound": 1.0, "gap": 0.0}
    identity = plan_identity(question.document, {})
    return Plan(**identity, config={}, predicted={}, solution=solution, answer=answer, provenance={})


def register_coin(monkeypatch: pytest.MonkeyPatch, **abilities: Any) -> Kind:
    """For the time of one test; ``abilities`` are further functions of its service."""
    service = SimpleNamespace(plan=toss, **abilities)
    monkeypatch.setitem(sys.modules, "coin_service", service)
    kind = Kind(name="coin", service="coin_service")
    monkeypatch.setitem(KINDS, "coin", kind)
    return kind
