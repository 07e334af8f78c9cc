"""Tests that share something made once stay on one worker, as far as pytest and pytest-xdist understand each other."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("told")
def test_workers_are_told_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """With pytest 9.2 and pytest-xdist 3.8.0 nobody was: every worker made what a file shares, and its own servers."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("without --dist loadgroup there are no groups to be told")
    assert request.node.nodeid.endswith("@told"), "pip install 'pytest<9.2'"
