"""Iteration times of a decode worker whose MLPs or experts lie on FFN devices.

n requests run on A attention devices: R ranks of t tensor-parallel devices each, with requests and KV cache of their
own. Their batch is cut into m micro-batches, each of ⌈n/(R·m)⌉ requests of every rank, which alternate between the
attention devices and F FFN devices (:mod:`~meshplan.planner.serving.attention_ffn.pipeline`)::

    a    attention of a layer: projections, router, cache, all-reduce over t; kernels and factor of the attention device
    f    mixture of experts: routed experts spread over F for N = n/m tokens, shared experts and dense layers on N/F
         tokens of each device; dense model: the MLP split over F, gathered and reduced by one all-reduce
    s, b rows of hidden states to the FFN devices in the activations' bytes, and back in 16 bits

A token goes once to every node that holds one of its k experts, and from there over the node's own links to their
devices, as DeepEP does: of D nodes D·(1 − (1 − 1/D)^k). Each side moves its share of the rows over its NICs, at the
rate of the slower side. Where all devices are one scale-up domain, its links take the place of the network.

The tables of a simulation are linear in the context C that a batch reads. The time above is convex in C, so the line
through its values at the least and the largest context of a request is never below it between them: an iteration is
priced at most (a(most) − a(least))/4 a layer too long where the slowest stage changes between them, exactly elsewhere.

Not counted: time of the hosts to keep two sides in step beyond the engine's own of an iteration. No run was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.experts import distinct_experts
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.attention_ffn.pipeline import Stages, layers_s
from meshplan.planner.serving.estimator.exchange.collectives import COLLECTIVE_S, inside_copies
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.operators import peak_flops_per_s
from meshplan.planner.serving.estimator.power.work import request_work
from meshplan.planner.serving.estimator.step_cost import StepCost, beside_the_host
from meshplan.planner.serving.estimator.table import Table, token_knots
from meshplan.planner.serving.problem.quantization import SCHEMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between attention and FFN devices.

    Args:
        bytes_per_s: of one device and direction on the slower side, as attained.
        peak_bytes_per_s: the same by data sheets.
        latency_s: of one message.
        nodes: of the FFN devices, to each of which a token goes at most once; their devices where one domain holds all.
    """

    bytes_per_s: float
    peak_bytes_per_s: float
    latency_s: float
    nodes: int


@dataclass(frozen=True, kw_only=True)
class SeparatedWorker(Worker):
    """A decode worker: what a :class:`Worker` is describes its attention devices.

    Args:
        ffn: the FFN devices as a worker of the same model: kernels, links and constants of their device.
        link: between the two.
        alternating: m, micro-batches.
    """

    ffn: Worker
    link: Link
    alternating: int

    @property
    def num_ffn(self) -> int:
        """F, FFN devices."""
        return self.ffn.layout.num_devices

    # --- stages -------------------------------------------------------------------------------------------------------

    def _attention_s(self, own: FloatArray, contexts: Sequence[FloatArray]) -> list[FloatArray]:
        """a: attention devices, one layer, ``own`` requests of each rank that hold so many tokens; for each context."""
        shape, moe = self.shape, self.shape.moe
        linear = self.attention_linear_s(own) + self.all_reduce_s(own)
        if moe is not None:
            routed = shape.num_moe_layers / shape.num_hidden_layers
            linear = linear + routed * self.operators.gemm_s("bf16", own, moe.num_experts, shape.hidden_size)
        linear, factor = self.scale(own) * linear, self.constants.decode_factor / shape.num_hidden_layers
        return [np.asarray(linear + factor * self.decode_attention_s(own, held)) for held in contexts]

    def _ffn_s(self, tokens: FloatArray) -> Iterator[tuple[int, int, FloatArray]]:
        """(layers, experts that a token visits, f) of dense layers and of those with experts."""
        shape, moe, number = self.shape, self.shape.moe, self.num_ffn
        each = np.maximum(tokens / number, 1.0)
        if moe is None:
            split = self.ffn.mlp_s(tokens, shape.intermediate_size / number) + self.ffn.all_reduce_s(tokens)
            yield shape.num_hidden_layers, 1, np.asarray(self.ffn.scale(tokens) * split)
            return
        if shape.num_dense_layers:
            whole = self.ffn.mlp_s(each, shape.intermediate_size)
            yield shape.num_dense_layers, 1, np.asarray(self.ffn.scale(each) * whole)
        routed = self.ffn.routed_s(tokens)
        if moe.shared_intermediate_size:
            routed = routed + self.ffn.mlp_s(each, moe.shared_intermediate_size)
        yield shape.num_moe_layers, moe.num_experts_per_token, np.asarray(self.ffn.scale(each) * routed)

    def _way_s(self, tokens: FloatArray, visits: int, row_bytes: float) -> FloatArray:
        """One direction of the link: rows of ``tokens`` over the devices of the smaller side, and inside FFN nodes."""
        fewest = min(self.layout.num_devices, self.num_ffn)
        rows = inside_copies(visits, self.link.nodes) * tokens * row_bytes / (fewest * self.link.bytes_per_s)
        inside = inside_copies(visits, self.num_ffn) * tokens * row_bytes / self.num_ffn
        spread = inside / self.ffn.exchange.scale_up_bytes_per_s if visits > 1 else np.zeros_like(tokens)
        return COLLECTIVE_S + self.link.latency_s + np.maximum(rows, spread)

    def stages(
        self, running: FloatArray, contexts: Sequence[FloatArray]
    ) -> Iterator[tuple[int, FloatArray, list[Stages]]]:
        """(layers, micro-batches, stages by context) of each kind of layer.

        A batch of fewer requests than ranks × micro-batches has fewer micro-batches.

        Args:
            running: [N] requests.
            contexts: each [N], tokens that every one of them holds.
        """
        ranks = self.layout.attention_data_parallel
        micro = np.clip(np.ceil(running / ranks), 1.0, self.alternating)
        tokens, own = running / micro, np.ceil(running / (ranks * micro))
        attention = self._attention_s(own, contexts)
        width = self.shape.expert_hidden_size
        there = width * SCHEMES[self.quantization.experts].activation_bytes
        for count, visits, ffn in self._ffn_s(tokens):
            sent, back = (self._way_s(tokens, visits, row) for row in (there, width * BYTES_16_BIT))
            yield count, micro, [Stages(attention=each, sent=sent, ffn=ffn, back=back) for each in attention]

    def traversals_s(self, running: FloatArray, *contexts: FloatArray) -> FloatArray:
        """[contexts, N] all layers of one decode iteration; arguments as for :meth:`stages`."""
        kinds = self.stages(running, contexts)
        return np.asarray(sum(np.array([layers_s(one, count, micro) for one in each]) for count, micro, each in kinds))

    # --- what others ask ----------------------------------------------------------------------------------------------

    def step_cost(self, constants: ServingConstants | None = None) -> StepCost:
        """The tables; see :class:`StepCost`. All of a decode iteration but host and outputs is in its line over C.

        A prompt that is computed anew after a preemption takes one traversal of its tokens.
        """
        use, ranks = constants or self.constants, self.layout.attention_data_parallel
        counts, prompt = token_knots(self.limits.max_num_seqs), max(self.contexts.prompt, 1.0)
        least, most = self.contexts.ends
        ends = (np.append(np.full_like(counts, held), 1.0) for held in (least, most))  # and a prompt, each token alone
        low, high = self.traversals_s(np.append(counts, prompt), *ends)
        fixed, slope = _line(counts, (least, np.maximum.accumulate(low[:-1])), (most, np.maximum.accumulate(high[:-1])))
        every = np.arange(1, self.limits.max_num_seqs + 1)
        seqs = token_knots(-(-self.limits.max_num_seqs // ranks) + 1)
        tokens = self.limits.max_batched_tokens + self.limits.max_num_seqs
        first_last = np.array([1.0, float(tokens)])
        cost = StepCost(
            concurrent_batches=ranks,
            pipeline_parallel=1,
            dense_s=Table(first_last, np.full(2, use.host_step_s), tokens),
            experts_s=Table(first_last, np.zeros(2), tokens),
            outputs_s=Table(seqs, self.head_s(seqs) + use.host_s_per_seq * seqs, int(seqs[-1])),
            decode_fixed_s=[0.0, *np.interp(every, counts, fixed).tolist()],
            decode_context_s=[0.0, *np.interp(every, counts, slope).tolist()],
            prefill_fixed_s=float(low[-1]),
            prefill_pair_s=use.prefill_factor * self._prefill_line()[0],
            prefill_least_s=use.host_step_s + self.launch_s(use, has_prompts=True),
            graphed_tokens=self.captured_tokens,
            admission_steps=use.first_token_steps if self.prepares_ahead else 0.0,
        )
        launched = (cost.prefill_least_s, cost.prefill_least_s)
        if not self.limits.cuda_graphs:
            cost = beside_the_host(cost, launched, (least, most))
        return self.beside_clients(cost)

    def own_resources(self, running: FloatArray) -> dict[str, FloatArray]:
        """Resource → [N] seconds that a request takes it, each at its peak rate; see ``overlap_bound``.

        Weights are read once in an iteration, by however many micro-batches; of rows one copy in each direction counts.
        """
        steps = self.contexts.most - self.contexts.least - 1.0
        bare = Worker(**{name: getattr(self, name) for name in Worker.__dataclass_fields__})
        attention = request_work(replace(bare, shape=without_ffn(self.shape)), running)
        device, shape, formats = self.ffn.machine.device, self.shape, self.quantization
        mlp, experts = SCHEMES[formats.mlp], SCHEMES[formats.experts]
        # Of dense layers and shared experts each token's part is computed once; their weights are read by some device.
        often = shape.num_dense_layers * shape.dense_mlp_parameters
        often += shape.num_moe_layers * shape.shared_expert_parameters
        read = np.full_like(running, mlp.weight_bytes * often)
        compute = 2.0 * often / peak_flops_per_s(device, mlp.peak_dtype)
        if shape.moe is not None:
            held, top_k = shape.num_moe_layers * shape.expert_parameters, shape.moe.num_experts_per_token
            hit = distinct_experts(running, top_k=top_k, num_experts=shape.moe.num_experts)
            read = read + experts.weight_bytes * held * hit
            compute += 2.0 * top_k * held / peak_flops_per_s(device, experts.peak_dtype)
        fewest = min(self.layout.num_devices, self.num_ffn)
        rows = shape.num_hidden_layers * shape.expert_hidden_size * BYTES_16_BIT / fewest
        return {
            "compute of the attention devices": attention.compute_s,
            "memory of the attention devices": attention.wide_s + attention.narrow_s,
            "compute of the FFN devices": np.full_like(running, steps * compute / self.num_ffn),
            "memory of the FFN devices": steps / running * read / self.num_ffn / device.memory_bandwidth_bytes_per_s,
            "links": np.full_like(running, steps * rows / self.link.peak_bytes_per_s),
        }


def without_ffn(shape: ModelShape) -> ModelShape:
    """The model without MLPs and experts: what lies on attention devices, but for routers."""
    return replace(shape, moe=None, intermediate_size=0)


def _line(
    counts: FloatArray, low: tuple[float, FloatArray], high: tuple[float, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """The chord of a convex function of the context: its value at no context, and its growth per token of the batch.

    Args:
        counts: [N] requests.
        low: least context of a request, and [N] seconds there.
        high: largest context, and seconds there.

    A chord that would be negative at no context gives way to the line through nothing and the upper end, which is above
    the function too, and above the lower end.
    """
    (least, short), (most, long) = low, high
    slope = np.maximum((long - short) / ((most - least) * counts), 0.0)
    fixed = short - slope * counts * least
    return np.maximum(fixed, 0.0), np.where(fixed < 0.0, long / (most * counts), slope)
