"""Steady state of a worker in closed form, by the number of running requests: an estimate, not a bound.

With n running requests of p prompt and o output tokens each, every iteration advances all of them, and for each
completion one prompt must be prefilled. With d(n) the time of a decode iteration at the mean context and F(n) the time
that one prompt adds::

    tpot(n) = d(n)/s + (n/(o − 1))·F(n)
    rate(n) = n / ((o − 1)·tpot(n) + F(n))

(s tokens gained per iteration). Prompts are spread over all concurrent batches, no block of the cache is wasted and
nothing waits; each prompt has an iteration of its own. Attention data-parallel ranks prefill one prompt each at
once: no split is faster, and a simulation, where some have several prompts and others none, is slower. An engine puts
several short ones into one iteration, so that a simulation may be faster: what nothing exceeds is in
:mod:`~meshplan.planner.serving.estimator.bounds.rate_bound`.
Tables by load, power, and the number of requests that a deployment is configured for are taken from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import Role

# Every number of running requests below ALL_BELOW is priced; the cost of a prefill chunk at MOST_SAMPLED of them.
ALL_BELOW, MOST_SAMPLED = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Steady states of one worker at N numbers of running requests: all up to 32, then sixteen per doubling.

    Args:
        num_seqs: [N] n, rising.
        tpot_s: [N] mean time per output token.
        prefill_s: [N] time that one prompt adds to the worker's (at n = 1 without load: its time to the first token).
        rate_per_s: [N] completed requests per second.
    """

    num_seqs: NDArray[np.int64]
    tpot_s: FloatArray
    prefill_s: FloatArray
    rate_per_s: FloatArray


def prompt_chunks(prompt: float, cached: float, budget: int) -> list[tuple[int, float]]:
    """(new tokens, attended pairs) of each iteration that prefills a prompt within a token budget.

    Args:
        prompt: prompt tokens.
        cached: prompt tokens found in the prefix cache.
        budget: most new tokens of one iteration.
    """
    done, left = cached, max(round(prompt - cached), 1)
    chunks = []
    while left > 0:
        new = min(left, max(budget, 1))
        chunks.append((new, new * (done + (new + 1) / 2.0)))
        done, left = done + new, left - new
    return chunks


def prefill_s(cost: StepCost, prompt: float, *, cached: float = 0.0, budget: int, spread: int = 1) -> float:
    """Time for one prompt on an otherwise idle worker, where ``spread`` identical prompts run in as many batches."""
    return (
        sum(
            cost.step_s(0, 0.0, spread, spread * new, spread * pairs)
            for new, pairs in prompt_chunks(prompt, cached, budget)
        )
        / spread
    )


def steady_state(
    cost: StepCost,
    *,
    role: Role,
    prompt: float,
    output: float,
    cached: float,
    budget: int,
    most: int,
) -> SteadyState:
    """Steady states of a worker.

    Args:
        cost: its iteration times.
        role: a decode worker prefills nothing.
        prompt: p, tokens.
        output: o, tokens; the first comes from the prefill.
        cached: prompt tokens found in the prefix cache.
        budget: new tokens of one iteration.
        most: most requests that run at once.
    """
    counts = running_counts(most)
    context = counts * (prompt + output / 2.0)
    decode = np.array(
        [cost.decode_s(int(n)) + cost.decode_context_s[int(n)] * c for n, c in zip(counts, context, strict=True)]
    )
    decode = decode / cost.tokens_per_step
    added = np.zeros_like(decode)
    if role is not Role.DECODE:
        chunks = prompt_chunks(prompt, cached, budget)
        sampled = counts[_some(len(counts))]
        sums = np.array([sum(_added_s(cost, int(n), *chunk) for chunk in chunks) for n in sampled])
        added = np.interp(counts, sampled, sums)
    steps = max(output - 1.0, 0.0)
    if role is Role.PREFILL or steps == 0.0:
        each = np.maximum(added, 1e-12)
        return SteadyState(
            num_seqs=counts, tpot_s=np.zeros_like(each), prefill_s=each, rate_per_s=np.minimum(counts, 1.0) / each
        )
    tpot = decode + counts / steps * added
    request_s = np.maximum((steps * tpot + added) / counts, cost.request_s)
    return SteadyState(num_seqs=counts, tpot_s=tpot, prefill_s=added, rate_per_s=1.0 / request_s)


def _added_s(cost: StepCost, num_seqs: int, new: int, pairs: float) -> float:
    """Time per prompt that a chunk adds to an iteration of ``num_seqs`` decodes when all batches prefill at once."""
    spread = min(cost.concurrent_batches, max(num_seqs, 1))
    mixed = cost.step_s(num_seqs, 0.0, spread, spread * new, spread * pairs)
    return (mixed - cost.step_s(num_seqs, 0.0, 0, 0, 0.0)) / spread


def running_counts(most: int) -> NDArray[np.int64]:
    """Numbers of running requests that are priced: all of the first, then sixteen per doubling, up to ``most``."""
    octaves = np.arange(np.log2(ALL_BELOW), np.log2(max(most, ALL_BELOW)) + 1 / 16, 1 / 16)
    counts = np.concatenate([np.arange(1, ALL_BELOW), np.round(2.0**octaves)])
    return np.unique(np.minimum(counts, max(most, 1))).astype(np.int64)


def _some(length: int) -> NDArray[np.int64]:
    """A few positions among ``length``: the time that a chunk adds hardly depends on n."""
    return np.unique(np.linspace(0, length - 1, min(length, MOST_SAMPLED)).round().astype(np.int64))
