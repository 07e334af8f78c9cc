"""What engines do by release, as their notes say."""

from __future__ import annotations

import pytest

from meshplan.catalogs.constants.engine_recipes import engine_observed_as


@pytest.mark.parametrize(
    ("name", "release", "roles"),
    [
        ("vLLM", "0.6.0", set()),
        ("vLLM", "0.13.0", set()),
        ("vLLM", "0.14.1", {"mixed", "prefill", "decode"}),  # release notes of 0.14.0: async scheduling by default
        ("vLLM", "0.19.0", {"mixed", "prefill", "decode"}),
        ("TensorRT-LLM", "0.14.0", set()),
        ("TensorRT-LLM", "1.0.0rc3", {"mixed", "decode"}),  # context servers disable the overlap scheduler
        ("SGLang", "0.3.5", set()),
        ("SGLang", "0.5.9", {"mixed", "prefill", "decode"}),
    ],
)
def test_releases_prepare_iterations_ahead_since_their_notes_say_so(name: str, release: str, roles: set[str]) -> None:
    found = engine_observed_as(name, release, source="")
    assert found is not None
    assert set(found.prepares_ahead) == roles
