"""Requests of a measured run that its row describes in more than two nominal lengths and a rate.

*Lengths*: fixed, or drawn from what the source prints of them: a histogram, or quantiles. Draws are stratified, one
from each of n equal shares of the distribution in shuffled order, so that means and tails are those of the source in
every run. *Rate stages*: a Poisson process at each rate for its time, one after the other; a row of one stage measures
its requests alone, on a server that has served the stages before it. *Shared prefixes*: each request begins with one of
a number of system prompts, chosen at random, that a worker may still hold. *Repeated prompts*: where a load generator
draws so many prompts and sends them in turn until its time is up, a worker may still hold all of a prompt that came
before. Blocks of the cache are shared whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from meshplan.catalogs.constants.serving_benchmarks import PromptPool
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.problem.requests import Arrival, Requests
from meshplan.planner.serving.problem.workload.described import staged_arrivals
from meshplan.planner.serving.problem.workload.lengths import histogram_lengths, lengths_at
from meshplan.planner.serving.simulation.arrivals import open_arrivals
from meshplan.planner.serving.simulation.engine import KV_BLOCK_TOKENS
from meshplan.planner.validation.fields import Section

SEED = 0
MOST_REQUESTS = 1_000_000  # of one stage: more say nothing more
ALL_STAGES = "all"
# New prompt tokens of benchmarks whose rows print none, one mean for all rows of a set of prompts: chat turns,
# questions with choices, code around a gap. From rates and gaps of the ML.ENERGY leaderboard v3.0. Chat: of 100, 200,
# 300 and 400, each with the spread below, 300 errs least on rates and p99 gaps of three dense models together
# (Llama-3.1-8B and -70B, Qwen3-32B on H100), whatever the host's time for each request and whether or not turns
# before are attended to. Where the cache was full, 691 requests of Llama-3.1-8B shared what an H100 holds, 639 tokens
# each of which some 400 were answers. Code: mean and spread together, of 1,000 to 2,000 tokens and 0.2 to 1.36, err
# least so on rates and p99 gaps of Qwen3-Coder-30B on H100 (5.2 and 8.3 %; as spread as Azure's code, 1,000 tokens
# did best with 7.2 and 29.1 %); its runs on B200 and those of 480B were left out of the choice. Questions: the
# publisher's mean (ml.energy/blog, Reading the ML.ENERGY Leaderboard v3.0, 2026-01-13).
UNPRINTED_PROMPTS: Mapping[str, int] = {"lm-arena-chat": 300, "gpqa": 224, "sourcegraph-fim": 1250}
# The same with what the turns before have left: chat prompts with their history have a mean of 634 tokens (the same
# page). The benchmark sends all turns of a conversation one after the other (ml-energy/benchmark, mlenergy/llm/
# datasets.py, 0773868) to servers with vLLM's defaults, which hold what they have in common once and find it there.
WHOLE_PROMPTS: Mapping[str, int] = {**UNPRINTED_PROMPTS, "lm-arena-chat": 634}
# Standard deviation of the logarithm of such lengths. Chat: that of prompts of conversations in the Azure LLM inference
# traces 2023 (AzurePublicDataset, CC-BY 4.0; Patel et al., ISCA 2024), 19,366 requests. Code: as above; why its
# prompts differ so little nobody prints. Questions with choices are taken as equally long.
PROMPT_SPREAD: Mapping[str, float] = {"lm-arena-chat": 0.985, "sourcegraph-fim": 0.3}
MOST_OF_SPREAD = 0.98  # share of such lengths that is drawn, without the longest and the shortest
# Quantiles that sources print of a distribution of lengths.
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
# How a row may give a length: ``input_length``, ``input_length_mean`` and so on.
LENGTH_FORMS = ("", "_mean", "_histogram", "_distribution")


def is_described(asked: Section) -> bool:
    """Whether a row needs more than nominal lengths, a rate and a number of requests."""
    has_lengths = asked.states("input_length") and asked.states("output_length")
    return not has_lengths or asked.states("stages") or asked.states("shared_prefix_tokens")


def drawn_requests(
    asked: Section, arrival: Arrival, pool: PromptPool | None = None, *, caches_prefixes: bool = True
) -> Requests:
    """The requests that a row describes.

    Args:
        asked: its ``workload``.
        arrival: open, or all at once.
        pool: the prompts that were really drawn, where the benchmark is known to depart from what its rows say.
        caches_prefixes: the server keeps what prompts have in common, so that unprinted ones count as what is new.

    Raises:
        UnsupportedError: it does not say how long they are, or how many.
    """
    rng = np.random.default_rng(SEED)
    arrivals = _arrivals(asked, arrival, rng)
    num = len(arrivals)
    unprinted = UNPRINTED_PROMPTS if caches_prefixes else WHOLE_PROMPTS
    inputs, outputs = (_lengths(asked, name, num, rng, unprinted) for name in ("input_length", "output_length"))
    cached = prefix = None
    if asked.states("shared_prefix_tokens") and asked.flag("prefix_caching", default=True):
        groups = pool.groups if pool is not None else asked.whole("num_shared_prefixes", 1)
        if asked.states("users_per_prefix"):
            each = pool.prompts_per_group if pool is not None else asked.whole("users_per_prefix")
            cached, prefix = _whole_blocks(inputs), np.arange(num) % (groups * each)
        else:
            shared = np.full(num, asked.whole("shared_prefix_tokens"), dtype=np.int64)
            cached, prefix = _whole_blocks(np.minimum(shared, inputs)), rng.integers(0, groups, num)
    return Requests(arrival_s=arrivals, input_length=inputs, output_length=outputs, cached_tokens=cached, prefix=prefix)


def attended_history(asked: Section, *, caches_prefixes: bool = True) -> float:
    """Tokens of turns before that each request attends to, on average, though other requests in flight hold them."""
    prompts = str(asked.values.get("prompt_set") or "")
    is_printed = any(asked.states(f"input_length{form}") for form in LENGTH_FORMS)
    if not caches_prefixes or is_printed or prompts not in UNPRINTED_PROMPTS:
        return 0.0
    return float(WHOLE_PROMPTS[prompts] - UNPRINTED_PROMPTS[prompts])


def _whole_blocks(tokens: IntArray) -> IntArray:
    return tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS


def num_before(asked: Section) -> int:
    """Requests of the stages before the one that a row measures."""
    stages = _stages(asked) if asked.states("stages") else []
    return sum(num for _, num in stages[:-1]) if asked.values.get("stage", ALL_STAGES) != ALL_STAGES else 0


def _arrivals(asked: Section, arrival: Arrival, rng: np.random.Generator) -> FloatArray:
    if not asked.states("stages"):
        num = asked.whole("num_requests")
        if arrival is Arrival.ALL_AT_ONCE:
            return np.zeros(num)
        return open_arrivals(rng, num, asked.number("request_rate_per_s"), burstiness=1.0)
    return staged_arrivals(rng, [(num, duration) for duration, num in _stages(asked)])


def _stages(asked: Section) -> list[tuple[float, int]]:
    """Duration, s, and requests of the stages up to the one that a row measures."""
    stages, chosen = asked.values["stages"], asked.values.get("stage", ALL_STAGES)
    if not isinstance(stages, Sequence) or not all(isinstance(stage, Mapping) for stage in stages):
        raise asked.wrong("stages", "a list of stages with rate_per_s and duration_s")
    if chosen != ALL_STAGES:
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(stages):
            raise asked.wrong("stage", f"{ALL_STAGES}, or a number below {len(stages)}")
        stages = stages[: chosen + 1]
    found = []
    for stage in stages:
        section = Section({"stage": stage}, "stage")
        rate, duration = section.number("rate_per_s"), section.number("duration_s")
        found.append((duration, max(round(min(rate * duration, MOST_REQUESTS)), 1)))
    return found


def _lengths(asked: Section, name: str, num: int, rng: np.random.Generator, unprinted: Mapping[str, int]) -> IntArray:
    """[num] tokens: as stated, else by histogram, by quantiles, by the mean, else what stands for unprinted prompts."""
    if asked.states(name):
        return np.full(num, asked.whole(name), dtype=np.int64)
    shares = (rng.permutation(num) + 0.5) / num
    if asked.states(f"{name}_histogram"):
        drawn = _from_histogram(Section(asked.values, f"{name}_histogram"), shares)
    elif asked.states(f"{name}_distribution"):
        printed = Section(asked.values, f"{name}_distribution")
        known = {share: printed.number(key) for key, share in QUANTILES.items() if printed.states(key)}
        drawn = lengths_at(known).between(shares)
    elif asked.states(f"{name}_mean"):
        drawn = np.full(num, asked.number(f"{name}_mean"))
    else:
        prompts = str(asked.values.get("prompt_set") or "")
        if name != "input_length" or prompts not in unprinted:
            return np.full(num, asked.whole(name), dtype=np.int64)  # refused: nothing says how long
        drawn = _log_normal(float(unprinted[prompts]), PROMPT_SPREAD.get(prompts, 0.0), shares)
    if asked.states(f"{name}_mean"):
        drawn = drawn * (asked.number(f"{name}_mean") / float(np.mean(drawn)))
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _log_normal(mean: float, spread: float, shares: FloatArray) -> FloatArray:
    """Draws whose logarithm is normal with the standard deviation ``spread``, scaled to their mean."""
    quantile = NormalDist(sigma=spread).inv_cdf if spread else (lambda _: 0.0)
    inner = 0.5 + MOST_OF_SPREAD * (shares - 0.5)
    drawn = np.exp([quantile(share) for share in inner])
    return np.asarray(drawn * (mean / drawn.mean()))


def _from_histogram(printed: Section, shares: FloatArray) -> FloatArray:
    """Draws from a histogram of bins of one width, uniform inside each."""
    low, high = printed.number("from", or_zero=True), printed.number("to")
    counts: Any = printed.values.get("counts")
    usable = isinstance(counts, Sequence) and len(counts) > 0 and all(_is_count(count) for count in counts)
    if not usable or not sum(counts) > 0 or not high > low:
        raise printed.wrong("counts", "numbers of requests in bins of one width between from and to")
    return histogram_lengths(counts, least=low, most=high).between(shares)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
