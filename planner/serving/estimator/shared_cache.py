"""Several engine instances that share one KV cache: what an iteration of all of them costs together.

Infinite-LLM (arXiv:2401.02669) lets a request's KV cache lie on other instances: each computes attention over the part
that it holds, queries and partial results go over the network. The instances are taken as lanes of one worker: each has
its own weights and share of the batch, and all of them admit against one cache. With W instances and a table of one::

    decode_fixed'[n] = decode_fixed[⌈n/W⌉] + borrow_s,    decode_context'[n] = decode_context[⌈n/W⌉]/W

Left out: the bytes of borrowed queries (kilobytes a layer), and that instances need not step together.
"""

from __future__ import annotations

from dataclasses import replace

from meshplan.planner.serving.estimator.step_cost import StepCost


def pooled(cost: StepCost, num_instances: int, *, borrow_s: float) -> StepCost:
    """Tables of ``num_instances`` such workers with one KV cache.

    Args:
        cost: of one instance.
        num_instances: W.
        borrow_s: what every iteration waits for attention elsewhere: a message to and fro in each layer, s.
    """
    if num_instances == 1:
        return cost
    of_one = [-(-n // num_instances) for n in range(num_instances * cost.max_num_seqs + 1)]
    return replace(
        cost,
        lanes=num_instances * cost.lanes,
        pipeline_parallel=num_instances * cost.pipeline_parallel,  # experts see the tokens of their own instance
        decode_fixed_s=[cost.decode_fixed_s[n] + (borrow_s if n else 0.0) for n in of_one],
        decode_context_s=[cost.decode_context_s[n] / num_instances for n in of_one],
    )
