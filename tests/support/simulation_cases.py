"""Costs and requests for tests of the serving simulator."""

from __future__ import annotations

import math

import numpy as np

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.requests import Requests


def linear_cost(
    *,
    most_seqs: int = 256,
    most_tokens: int = 8192,
    concurrent_batches: int = 1,
    pipeline_parallel: int = 1,
    tokens_per_step: float = 1.0,
    verified_tokens: int = 1,
    fixed_s: float = 8e-3,
    token_s: float = 2e-5,
    context_s: float = 5e-8,
    pair_s: float = 1e-9,
    least_s: float = 0.0,
    admission_steps: float = 0.0,
) -> StepCost:
    """Every table a straight line: roughly a 70B model on eight devices."""
    return StepCost(
        concurrent_batches=concurrent_batches,
        pipeline_parallel=pipeline_parallel,
        dense_s=[fixed_s + token_s * m for m in range(most_tokens + verified_tokens)],
        experts_s=[
            0.3 * token_s * m for m in range((most_tokens + most_seqs) * concurrent_batches * verified_tokens + 1)
        ],
        outputs_s=[1e-4 + 1e-6 * m for m in range(most_seqs + 1)],
        decode_fixed_s=[1e-5 * math.sqrt(n) for n in range(most_seqs + 1)],
        decode_context_s=[context_s * (1.0 + 1.0 / (n + 1)) for n in range(most_seqs + 1)],
        prefill_fixed_s=1e-4,
        prefill_pair_s=pair_s,
        prefill_least_s=least_s,
        admission_steps=admission_steps,
        tokens_per_step=tokens_per_step,
        verified_tokens=verified_tokens,
    )


def random_requests(
    seed: int,
    num: int,
    *,
    longest_input: int = 200,
    shortest_output: int = 1,
    longest_output: int = 60,
    rate_per_s: float = 20.0,
    concurrency: int | None = None,
    ramp_s: float = 0.0,
    think_s: float = 0.0,
    num_priorities: int = 1,
    cached: bool = False,
) -> Requests:
    """Requests of any length from one token on; Poisson arrivals, or a closed loop with ``think_s`` on average."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, longest_input + 1, num)
    shares = np.random.default_rng(seed).uniform(0.5, 1.5, num)
    return Requests(
        arrival_s=np.arange(num) * ramp_s if concurrency else np.cumsum(rng.exponential(1.0 / rate_per_s, num)),
        input_length=inputs,
        output_length=rng.integers(shortest_output, longest_output + 1, num),
        concurrency=concurrency,
        think_s=think_s * shares,
        cached_tokens=rng.integers(0, inputs + 1) if cached else None,
        priority=rng.integers(0, num_priorities, num) if num_priorities > 1 else None,
    )
