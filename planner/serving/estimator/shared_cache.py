"""Iteration times of several engine instances that share one KV cache.

Infinite-LLM (arXiv:2401.02669) lets a request's KV cache lie on other instances: each computes attention over the part
that it holds; queries and partial results go over the network. The instances are modelled as concurrent batches of one
worker: each has its own weights and share of the requests, and all of them admit against one cache. With W instances
and the table of one of them::

    decode_fixed'[n] = decode_fixed[⌈n/W⌉] + borrow_s,    decode_context'[n] = decode_context[⌈n/W⌉]/W

Neglected: the bytes of the queries (kilobytes per layer), and that instances need not step together.
"""

from __future__ import annotations

from dataclasses import replace

from meshplan.planner.serving.estimator.step_cost import StepCost


def pooled(cost: StepCost, num_instances: int, *, borrow_s: float) -> StepCost:
    """Tables of ``num_instances`` such workers with one KV cache.

    Args:
        cost: tables of one instance.
        num_instances: W.
        borrow_s: wait of an iteration for attention on other instances: one round trip per layer, s.
    """
    if num_instances == 1:
        return cost
    of_one = [-(-n // num_instances) for n in range(num_instances * cost.max_num_seqs + 1)]
    return replace(
        cost,
        concurrent_batches=num_instances * cost.concurrent_batches,
        pipeline_parallel=num_instances * cost.pipeline_parallel,  # experts process the tokens of their own instance
        decode_fixed_s=[cost.decode_fixed_s[n] + (borrow_s if n else 0.0) for n in of_one],
        decode_context_s=[cost.decode_context_s[n] / num_instances for n in of_one],
    )
