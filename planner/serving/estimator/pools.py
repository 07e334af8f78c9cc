"""From a pool of a configuration to what a simulation runs: a priced worker, its scheduler's limits and its memory."""

from __future__ import annotations

import math
from dataclasses import replace

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.planner.serving.estimator.draft_memory import draft_memory
from meshplan.planner.serving.estimator.encoders.sound import windows_of_an_iteration
from meshplan.planner.serving.estimator.encoders.vision import encoder_bytes
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END, FrontEnd
from meshplan.planner.serving.estimator.host.graphs import Graphs
from meshplan.planner.serving.estimator.instances import in_share
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.estimator.memory import WorkerMemory, worker_memory
from meshplan.planner.serving.estimator.power.cap import capped
from meshplan.planner.serving.estimator.sampling import sampling_cost
from meshplan.planner.serving.problem.config import Admission, EngineLimits, Pool, Role, Speculation
from meshplan.planner.serving.problem.engines.table import expert_padding
from meshplan.planner.serving.problem.problem import Site
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload


def scheduled(pool: Pool, recipe: EngineRecipe, workload: ServingWorkload) -> EngineLimits:
    """The limits as the engine's scheduler applies them.

    Engines that prefill between decode iterations count as unchunked. Engines that never cut a prompt, but mix it with
    decodes all the same, get a budget that holds one prompt (after an encoder the prompts of as many windows as one
    iteration encodes) and every running request.
    """
    ranks = pool.layout.attention_data_parallel
    longest = workload.input_length if workload.trace is None else float(workload.trace.input_length.max())
    each = -(-pool.limits.max_num_seqs // ranks)
    budget = pool.limits.max_batched_tokens
    if recipe.whole_prompts:
        budget = max(budget, int(longest) + each)
    if workload.sound_frames:
        budget = windows_of_an_iteration(workload.sound_frames, budget) * int(longest) + each
    shares = recipe.whole_prompts or bool(workload.sound_frames) or pool.limits.chunked_prefill
    admission = Admission(
        receive_interval=recipe.receive_interval,
        batch_wait_steps=recipe.batch_wait_steps,
        batch_wait_share=recipe.batch_wait_share,
        balance_wait_steps=recipe.balance_wait_steps if ranks > 1 else 0,
    )
    chunked = shares and not recipe.exclusive_prefill
    return replace(pool.limits, max_batched_tokens=budget, chunked_prefill=chunked, admission=admission)


def pool_worker(site: Site, pool: Pool, workload: ServingWorkload, speculation: Speculation | None = None) -> Worker:
    """One worker of a pool, priced at the context lengths of the workload."""
    prompt, output = workload.mean_lengths
    first, device = prompt + workload.shared_history, site.machines[pool.node_type].device
    raises = pool.role is not Role.PREFILL and speculation is None
    worker = Worker(
        shape=site.shape,
        machine=site.machine(pool),
        engine=site.recipe.engine,
        all_reduce=site.recipe.all_reduce,
        graphs=Graphs.of(site.recipe, site.shape, device, raises=raises),
        prepares_ahead=pool.role.value in site.recipe.prepares_ahead,
        hides_host=site.recipe.hides_host and pool.role.value in site.recipe.prepares_ahead,
        remote_step_s=site.recipe.remote_step_s if pool.layout.num_devices > 1 else 0.0,
        remote_s_per_seq=site.recipe.remote_s_per_seq if pool.layout.num_devices > 1 else 0.0,
        pads_ranks=site.recipe.pads_ranks,
        one_batch=site.recipe.one_batch,
        host_s_per_cache_group=site.recipe.host_s_per_cache_group,
        front_end=front_end(site, pool, workload),
        layout=pool.layout,
        limits=scheduled(pool, site.recipe, workload),
        quantization=pool.quantization,
        constants=site.constants[pool.node_type],
        contexts=ContextRange(
            prompt=prompt, least=first, most=first + max(output, 1.0), shortest=workload.shortest_prompt
        ),
        shared_history=workload.shared_history,
        role=pool.role,
        speculation=speculation,
        experts=site.experts,
        state_updates_per_s=_state_updates_per_s(site, pool),
        expert_kernels=site.recipe.expert_kernels,
        expert_block_rows=site.recipe.expert_block_rows,
        block_flops_per_s=site.recipe.block_flops_per_s.get(device.architecture, math.inf),
        gathers_tokens=site.recipe.gathers_tokens,
        sends_to_whole_experts=site.recipe.sends_to_whole_experts,
        images=workload.images,
        sampling=sampling_cost(site.recipe, workload.sampling),
    )
    if site.tiering is not None:
        worker = site.tiering.worker(worker, pool)
    if site.separation is not None:
        worker = site.separation.worker(worker, pool)
    if pool.share is not None:
        worker = in_share(worker)
    return worker if pool.power_cap_w is None else capped(worker, pool.power_cap_w, site.power)


def front_end(site: Site, pool: Pool, workload: ServingWorkload) -> FrontEnd:
    """The API servers of one worker of a pool."""
    if not workload.has_front_end or not site.recipe.has_api_server:
        return NO_FRONT_END
    own = pool.layout.attention_data_parallel if site.recipe.front_end_per_rank else 1
    return FrontEnd(
        processes=pool.limits.api_servers or own,
        interval=max(site.recipe.stream_interval, pool.limits.stream_interval),
        parses=site.recipe.parses_requests,
        at_once=(workload.num_requests or 1) if workload.arrival is Arrival.ALL_AT_ONCE else 0,
    )


def _state_updates_per_s(site: Site, pool: Pool) -> float:
    """Elements of Mamba-2's states that the engine's kernel updates a second at most on a device of the pool."""
    recurrent = None if site.shape.blocks is None else site.shape.blocks.recurrent
    if recurrent is None or recurrent.kind != "mamba-2":
        return math.inf
    architecture = site.machine(pool).device.architecture
    return site.recipe.most_state_updates_per_s(architecture, recurrent.state_elements // recurrent.num_heads)


def pool_memory(site: Site, pool: Pool, workload: ServingWorkload) -> WorkerMemory:
    """Memory of one worker of a pool; requests hold their prompt and half of their output on average."""
    memory = worker_memory(
        site.shape,
        site.machine(pool).device,
        pool.layout,
        pool.limits,
        pool.quantization,
        context=workload.input_length + workload.output_length / 2.0,
        experts=site.experts,
        encoder_bytes=encoder_bytes(site.shape, workload.images, pool.layout),
        padding=expert_padding(site.recipe.engine, pool.quantization, site.machine(pool).device),
        drafts=draft_memory(site.drafter, site.shape, pool.quantization, pool.layout),
    )
    if site.separation is not None:
        memory = site.separation.memory(memory, site.shape, pool)
    return memory if site.tiering is None else site.tiering.memory(memory, site.shape, pool)
