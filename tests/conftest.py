"""What the whole suite shares: the option that rewrites goldens, and the suites that run on demand only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A developer's own kernel surfaces must not reach the tests.
os.environ["MESHPLAN_SURFACES"] = str(Path(__file__).parent / "no-surfaces")
GOLDEN = Path(__file__).parent / "golden"
# On a loaded machine examples come slowly, which says nothing about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden from what the code says now")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a target framework unless ``-m launchers`` asks for them."""
    if "launchers" in config.getoption("-m"):
        return
    on_demand = [item for item in items if "launchers" in item.keywords]
    if on_demand:
        config.hook.pytest_deselected(items=on_demand)
        items[:] = [item for item in items if item not in on_demand]


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """``golden(name, text)``: text must equal the file tests/golden/``name``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden {name}: run pytest --update-goldens and read the difference"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed: pytest --update-goldens, then git diff"

    return check
