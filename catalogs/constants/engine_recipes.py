"""How each serving engine schedules, by release: the documented defaults behind predictions and calibrations.

They ship as ``seed/engines.yaml``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from meshplan.catalogs.constants.entries import read_entry, seed_content
from meshplan.catalogs.constants.releases import release_numbers

ENGINE_FILE = "engines.yaml"


# From which memory on, but for every A100, vLLM starts with more requests and tokens (engine/arg_utils.py,
# get_batch_defaults).
LARGE_BOARD_BYTES = 70 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """One engine in those of its releases that behave alike.

    Args:
        name: the entry's, such as ``vllm-v0``.
        engine: emit target or other engine name.
        observed_as: names in published measurements.
        before: the release from which the engine's next entry holds; empty for the newest.
        in_source: parts of source titles that name no release but ran this one.
        max_num_seqs: most requests running in one worker.
        max_batched_tokens: token budget of one iteration.
        whole_prompts: the budget grows to hold one prompt and a token of every running request.
        prompt_margin_tokens: the budget is one prompt and so many tokens, whatever max_batched_tokens says; 0 for none.
        margin_holds_running: that budget holds a token of every running request besides.
        exclusive_prefill: prefill runs between decode iterations, not with them.
        memory_fraction: share of device memory that the engine takes.
        memory_fraction_of: ``total``: weights, activations and KV cache together; ``static``: weights and KV cache;
            ``free``: KV cache, of what weights and activations leave.
        cuda_graphs: decode iterations are replayed from a graph, not launched kernel by kernel.
        reserves_output: a request is admitted only with room for its whole answer, so that none is ever preempted.
        quantized_kv_cache: dtype of the KV cache where weights and activations are quantised and no other is
            configured.
        graphed_tokens: iterations with prompts are replayed from graphs, too, where they have at most so many tokens
            and at most two for each request that may run; 0 where all of them are launched kernel by kernel.
        graphed_tokens_on: part of a device's name → the same there.
        graphed_tokens_of: family of models → the same for these, whatever the requests that may run.
        fixed_graphs: that size was set, and holds whatever the requests that may run.
        graphs_prompts: iterations of prompts alone are replayed from graphs of any size, but over stages
            (:meth:`~meshplan.planner.serving.estimator.host.graphs.Graphs.most_with_prompts`).
        largest_decode_graph: decodes of at most so many requests of a rank run from graphs, where launch files set
            that; 0: of as many as ``graphed_tokens`` says.
        raises_graphs_to: most tokens up to which launch files have graphs captured, where more requests of a rank may
            decode than ``graphed_tokens``; 0: they set nothing.
        prepares_ahead: roles of the workers that prepare an iteration while the one before runs, so that a request that
            arrives meanwhile is in neither; the others prepare none.
        hides_host: what it prepares ahead takes no time but where that is longer than the iteration that runs; else it
            is counted beside the devices' time.
        pads_ranks: every attention data-parallel rank computes as many tokens as the one with most of them.
        gathers_tokens: attention data-parallel ranks gather all tokens and reduce and scatter the results of experts;
            else they send each token to the devices of its experts where that is cheaper.
        sends_to_whole_experts: launch files have tokens sent where experts are whole and attention is data parallel,
            and kernels then multiply what a device was sent, not every token of the group.
        receive_interval: decode iterations between two looks for new requests.
        batch_wait_steps: most iterations for which prompts wait for others; 0 for none.
        batch_wait_share: share of the token budget at which that wait is over.
        balance_wait_steps: iterations for which prompts wait while some attention-data-parallel rank has none; 0 for
            none.
        one_batch: one batch passes all pipeline stages before the next starts, so that stages wait for each other.
        host_s_per_cache_group: that the host takes in each iteration for every group of layers with blocks of cache of
            their own, after the first; 0 where it is hidden by the iteration before.
        has_api_server: clients ask a server for answers; else a script runs the engine in its own process.
        front_end_per_rank: each attention data-parallel rank has an API server of its own; else a worker has one.
        stream_interval: iterations whose tokens are sent to a client at once.
        parses_requests: API servers parse what clients send; else a front end of another program does it before them.
        all_reduce: engine whose all-reduce kernels it calls, or ``nccl``; empty for its own.
        remote_step_s: host's time of each iteration to reach workers on other devices, where a worker has several.
        remote_s_per_seq: growth of that with each request of the iteration.
        state_updates_per_s: generation of devices → elements of Mamba-2's states that a device updates a second where
            the kernel's launch shape allows fewer than the memory does; others are bound by memory.
        tuned_state_elements: elements of one head's state for which launch shapes were tuned, so that memory binds.
        expert_kernels: framework of the surfaces of fused experts that were timed with a release of these; empty: none.
        expert_block_rows: rows of a block of the grouped products in which experts in fp8 blocks are multiplied, over
            as many rows as there could be at most; 0 where kernels compute what there is.
        block_flops_per_s: generation of devices → FLOP/s of products with weights in fp8 blocks, once operands are
            read, where the library that is called is slower than the one that was timed.
        small_board: fields that a board of less than :data:`LARGE_BOARD_BYTES`, or an A100, takes instead.
        sorted_logits_per_s: logits that top-p sorts a second, where the engine sorts the whole vocabulary for it.
        penalty_bytes: that penalties on repeated tokens move for each logit of a sequence.
        penalty_host_s_per_token: that the host takes in each iteration for every token generated so far, to hand it to
            the penalties.
        calibrated_as: name of the constants that it takes, where they are not its own.
        core: name of the program that schedules and prepares, where another release's is another program; empty: the
            engine's.
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
    margin_holds_running: bool = False
    exclusive_prefill: bool = False
    memory_fraction_of: str = "total"
    cuda_graphs: bool = True
    reserves_output: bool = False
    quantized_kv_cache: str = "bf16"
    graphed_tokens: int = 0
    graphed_tokens_on: Mapping[str, int] = field(default_factory=dict)
    graphed_tokens_of: Mapping[str, int] = field(default_factory=dict)
    fixed_graphs: bool = False
    graphs_prompts: bool = False
    largest_decode_graph: int = 0
    raises_graphs_to: int = 0
    prepares_ahead: tuple[str, ...] = ()
    hides_host: bool = False
    pads_ranks: bool = False
    gathers_tokens: bool = False
    sends_to_whole_experts: bool = False
    receive_interval: int = 1
    batch_wait_steps: int = 0
    batch_wait_share: float = 1.0
    balance_wait_steps: int = 0
    one_batch: bool = False
    host_s_per_cache_group: float = 0.0
    has_api_server: bool = True
    front_end_per_rank: bool = False
    stream_interval: int = 1
    parses_requests: bool = True
    all_reduce: str = ""
    remote_step_s: float = 0.0
    remote_s_per_seq: float = 0.0
    state_updates_per_s: Mapping[str, float] = field(default_factory=dict)
    tuned_state_elements: tuple[int, ...] = ()
    expert_kernels: str = ""
    expert_block_rows: int = 0
    block_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    small_board: Mapping[str, Any] = field(default_factory=dict)
    sorted_logits_per_s: float | None = None
    penalty_bytes: float = 12.0
    penalty_host_s_per_token: float = 0.0
    calibrated_as: str = ""
    core: str = ""

    @property
    def constants_name(self) -> str:
        """Name under which the calibration is stored."""
        return self.calibrated_as or self.name

    def most_state_updates_per_s(self, architecture: str, head_elements: int) -> float:
        """Elements of Mamba-2's states that the kernel updates a second at most, whatever the memory allows; inf where
        nothing is known to limit it.

        >>> vllm = engine_recipes()["vllm"]
        >>> vllm.most_state_updates_per_s("hopper", 64 * 128), vllm.most_state_updates_per_s("hopper", 80 * 128)
        (inf, 357000000000.0)
        """
        if head_elements in self.tuned_state_elements:
            return math.inf
        return float(self.state_updates_per_s.get(architecture, math.inf))

    def graphs_on(self, slug: str, family: str) -> int:
        """``graphed_tokens`` of a family of models on a device.

        >>> [engine_recipes()["vllm"].graphs_on(slug, "llama") for slug in ("h100-sxm-80gb", "gb200", "rtx-pro-6000")]
        [512, 1024, 512]
        """
        if self.fixed_graphs:
            return self.graphed_tokens
        if family in self.graphed_tokens_of:
            return self.graphed_tokens_of[family]
        return next((tokens for part, tokens in self.graphed_tokens_on.items() if part in slug), self.graphed_tokens)

    def fixes_graphs(self, family: str) -> bool:
        """Whether that holds whatever the requests that may run."""
        return self.fixed_graphs or family in self.graphed_tokens_of

    def on_board(self, slug: str, memory_bytes: float) -> EngineRecipe:
        """The entry with the limits that the engine gives a board.

        >>> vllm = engine_recipes()["vllm"]
        >>> [vllm.on_board(slug, 80e9).max_batched_tokens for slug in ("h100-sxm-80gb", "a100-sxm-80gb")]
        [8192, 2048]
        """
        is_large = memory_bytes >= LARGE_BOARD_BYTES and "a100" not in slug
        return self if is_large or not self.small_board else replace(self, **self.small_board)

    def token_budget(self, input_length: float, num_seqs: int) -> int:
        """Tokens of one iteration for prompts of ``input_length`` in addition to ``num_seqs`` running requests."""
        if self.prompt_margin_tokens:
            return int(input_length) + self.prompt_margin_tokens + self.margin_holds_running * num_seqs
        if not self.whole_prompts:
            return self.max_batched_tokens
        return max(self.max_batched_tokens, int(input_length) + num_seqs)


@cache
def engine_recipes() -> Mapping[str, EngineRecipe]:
    """Every known entry by name, older releases of an engine first."""
    entries = seed_content(ENGINE_FILE)["engines"]
    return {name: read_entry(EngineRecipe, entry, name=name) for name, entry in entries.items()}


def engine_of_constants(name: str) -> str:
    """The engine whose releases take the constants of a name; the name itself where no entry does.

    >>> engine_of_constants("trtllm-2024"), engine_of_constants("mine")
    ('trtllm', 'mine')
    """
    return next((recipe.engine for recipe in engine_recipes().values() if recipe.constants_name == name), name)


def core_of_constants(name: str) -> str:
    """The program whose releases take the constants of a name; the name itself where no entry does.

    >>> core_of_constants("vllm-2023"), core_of_constants("vllm"), core_of_constants("mine")
    ('vllm-v0', 'vllm', 'mine')
    """
    found = next((recipe for recipe in engine_recipes().values() if recipe.constants_name == name), None)
    return name if found is None else found.core or found.engine


# Engines that schedule as another one does, by what their documentation says of their batching: the nearest known.
NEAREST_ENGINE: Mapping[str, str] = {"lmdeploy": "vLLM", "neuron": "vLLM", "tgi": "vLLM", "nim": "TensorRT-LLM"}


def is_exactly_known(name: str) -> bool:
    """Whether measurements call an engine exactly so; otherwise the nearest one stands for it."""
    return any(name in recipe.observed_as for recipe in engine_recipes().values())


def _engine_inside(name: str, known: Iterable[str]) -> str:
    """The known engine that a name begins with or names as a word, such as ``vLLM with the Mooncake connector``."""
    words = re.findall(r"[a-z0-9]+(?:[-.][a-z0-9]+)*", name.lower())
    for engine in sorted(known, key=len, reverse=True):
        wanted = engine.lower().split()
        if any(words[start : start + len(wanted)] == wanted for start in range(len(words))):
            return engine
    return next((NEAREST_ENGINE[word] for word in words if word in NEAREST_ENGINE), name)


def engine_observed_as(name: str, release: str | None, source: str) -> EngineRecipe | None:
    """The entry for the engine that a measurement names; None for an unknown engine.

    Args:
        name: as the measurement calls the engine.
        release: None where it states none; a text that is no release number (``nightly-…``) counts as none.
        source: title of the measurement's source.
    """
    known = {shown for recipe in engine_recipes().values() for shown in recipe.observed_as}
    name = name if name in known else _engine_inside(name, known)
    found = [recipe for recipe in engine_recipes().values() if name in recipe.observed_as]
    for recipe in found:
        if release is None or not re.match(r"\d+\.", release):
            if any(part in source for part in recipe.in_source):
                return recipe
        elif recipe.before and release_numbers(release) < release_numbers(recipe.before):
            return recipe
    return next((recipe for recipe in found if not recipe.before), None)
