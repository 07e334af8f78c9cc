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


@pytest.mark.parametrize(("release", "share"), [("0.15.1", 0.9), ("0.20.0", 0.9), ("0.21.0", 0.92), ("0.28.0", 0.92)])
def test_vllm_takes_more_of_the_memory_since_graphs_count_in_it(release: str, share: float) -> None:
    """By the message that its servers print, "default since v0.21.0"."""
    found = engine_observed_as("vLLM", release, source="")
    assert found is not None
    assert (found.memory_fraction, found.constants_name) == (share, "vllm")


def test_rows_without_a_release_that_are_older_take_what_was_left_free_then() -> None:
    """Rows of 2025 and of April 2026, whose images are nightly ones or not said."""
    found = engine_observed_as("vLLM", None, source="aiconfigurator silicon_sample.csv (real e2e measurements)")
    assert found is not None
    assert found.memory_fraction == 0.9
