"""From a pool of a configuration to what a simulation runs: the tables of its iterations and its scheduler's limits."""

from __future__ import annotations

from dataclasses import replace

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.problem.requests import Admission, EngineLimits, Pool, ServingWorkload, Speculation


def scheduled(pool: Pool, recipe: EngineRecipe, workload: ServingWorkload) -> EngineLimits:
    """The limits as the engine's scheduler applies them.

    Engines that prefill between decode iterations count as unchunked; those that never cut a prompt, but mix it with
    decodes all the same, get a budget that holds one beside every running request.
    """
    lanes = pool.layout.attention_data_parallel
    longest = workload.input_length if workload.trace is None else float(workload.trace.input_length.max())
    each = -(-pool.limits.max_num_seqs // lanes)
    budget = pool.limits.max_batched_tokens
    if recipe.whole_prompts:
        budget = max(budget, int(longest) + each)
    shares = recipe.whole_prompts or pool.limits.chunked_prefill
    admission = Admission(
        receive_interval=recipe.receive_interval,
        batch_wait_steps=recipe.batch_wait_steps,
        batch_wait_share=recipe.batch_wait_share,
        balance_wait_steps=recipe.balance_wait_steps if lanes > 1 else 0,
    )
    chunked = shares and not recipe.exclusive_prefill
    return replace(pool.limits, max_batched_tokens=budget, chunked_prefill=chunked, admission=admission)


def pool_worker(
    shape: ModelShape,
    machine: Machine,
    pool: Pool,
    *,
    recipe: EngineRecipe,
    constants: ServingConstants,
    workload: ServingWorkload,
    speculation: Speculation | None = None,
) -> Worker:
    """One worker of a pool as the estimator prices it, attention made linear over the contexts of the workload."""
    mean = (1.0 + workload.length_ratio) / 2.0
    prompt, output = mean * workload.input_length, mean * workload.output_length
    return Worker(
        shape=shape,
        machine=machine,
        engine=recipe.engine,
        all_reduce=recipe.all_reduce,
        layout=pool.layout,
        limits=scheduled(pool, recipe, workload),
        quantization=pool.quantization,
        constants=constants,
        contexts=ContextRange(prompt=prompt, least=prompt, most=prompt + max(output, 1.0)),
        role=pool.role,
        speculation=speculation,
    )
