"""How each serving engine schedules, by release: the documented defaults behind predictions and calibrations.

They ship as ``seed/engines.yaml`` and are read from there, not stored: knowledge about software, not measurements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshplan.catalogs.constants.releases import release_numbers
from meshplan.catalogs.seed import SEED_FOLDER
from meshplan.catalogs.yaml_reader import load_yaml

ENGINE_FILE = SEED_FOLDER / "engines.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """One engine in the releases that behave alike.

    Args:
        name: of the entry, such as ``vllm-v0``.
        engine: emit target or other engine name.
        observed_as: names in published measurements.
        before: the release from which the engine's next entry holds; empty for the newest.
        in_source: parts of source titles that name no release but ran this one.
        max_num_seqs: most requests running in one worker.
        max_batched_tokens: token budget of one iteration.
        whole_prompts: the budget grows to hold one prompt and a token of every running request.
        prompt_margin_tokens: the budget is one prompt and so many tokens, whatever max_batched_tokens says; 0 for none.
        exclusive_prefill: prefill runs between decode iterations, not with them.
        memory_fraction: of device memory that the engine takes.
        memory_fraction_of: ``total``: weights, activations and KV cache together; ``static``: weights and KV cache;
            ``free``: KV cache, of what weights and activations leave.
        cuda_graphs: decode iterations are replayed from a graph, not launched kernel by kernel.
        reserves_output: a request is admitted only with room for its whole answer, so that none is ever thrown out.
        quantized_kv_cache: dtype of the KV cache where weights and activations are quantised and nothing else is said.
        receive_interval: decode iterations from one look at arrivals to the next.
        batch_wait_steps: most iterations for which prompts wait for others; 0 for none.
        batch_wait_share: share of the token budget at which that wait is over.
        balance_wait_steps: iterations from one chance of prompts to the next while not every attention-data rank has
            one; 0 for none.
        all_reduce: engine whose all-reduce kernels it calls; empty for its own.
        calibrated_as: entry whose constants it shares.
        source: citation.
    """

    name: str
    engine: str
    observed_as: tuple[str, ...]
    max_num_seqs: int
    max_batched_tokens: int
    memory_fraction: float
    source: str
    before: str = ""
    in_source: tuple[str, ...] = ()
    whole_prompts: bool = False
    prompt_margin_tokens: int = 0
    exclusive_prefill: bool = False
    memory_fraction_of: str = "total"
    cuda_graphs: bool = True
    reserves_output: bool = False
    quantized_kv_cache: str = "bf16"
    receive_interval: int = 1
    batch_wait_steps: int = 0
    batch_wait_share: float = 1.0
    balance_wait_steps: int = 0
    all_reduce: str = ""
    calibrated_as: str = ""

    @property
    def constants_name(self) -> str:
        """Under which its calibration is stored."""
        return self.calibrated_as or self.name

    def token_budget(self, input_length: float, num_seqs: int) -> int:
        """Tokens of one iteration for prompts of ``input_length`` beside ``num_seqs`` running requests."""
        if self.prompt_margin_tokens:
            return int(input_length) + self.prompt_margin_tokens
        if not self.whole_prompts:
            return self.max_batched_tokens
        return max(self.max_batched_tokens, int(input_length) + num_seqs)


@cache
def engine_recipes() -> Mapping[str, EngineRecipe]:
    """Every known entry by name, older releases of an engine first."""
    content = load_yaml(ENGINE_FILE.read_bytes())
    return {name: _recipe(name, entry) for name, entry in content["engines"].items()}


def _recipe(name: str, entry: Mapping[str, Any]) -> EngineRecipe:
    lists = {key: tuple(entry.get(key, ())) for key in ("observed_as", "in_source")}
    return EngineRecipe(**{**entry, **lists, "name": name})


def engine_observed_as(name: str, release: str | None, source: str) -> EngineRecipe | None:
    """The entry that a measurement means; None for an engine that is not known.

    Args:
        name: as the measurement calls the engine.
        release: None where it states none; a text that is no release number (``nightly-…``) counts as none.
        source: title of the measurement's source.
    """
    found = [recipe for recipe in engine_recipes().values() if name in recipe.observed_as]
    for recipe in found:
        if release is None or not re.match(r"\d+\.", release):
            if any(part in source for part in recipe.in_source):
                return recipe
        elif recipe.before and release_numbers(release) < release_numbers(recipe.before):
            return recipe
    return next((recipe for recipe in found if not recipe.before), None)
