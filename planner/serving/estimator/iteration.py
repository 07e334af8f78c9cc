"""Iteration times of one worker: from the times of its parts to the tables of a :class:`StepCost`.

The parts are those of :mod:`~meshplan.planner.serving.estimator.parts`, at the knots of the tables; attention is linear
in the context between the lengths that requests have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.encoders.sound import frames
from meshplan.planner.serving.estimator.encoders.vision import encode_s
from meshplan.planner.serving.estimator.host.cache_groups import num_cache_groups
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END, FrontEnd
from meshplan.planner.serving.estimator.host.graphs import NO_LIMIT, Graphs
from meshplan.planner.serving.estimator.mixing.attention import attended_pairs
from meshplan.planner.serving.estimator.parts import WorkerParts
from meshplan.planner.serving.estimator.step_cost import (
    Slowdown,
    StepCost,
    beside_the_front_end,
    beside_the_host,
    with_draft,
)
from meshplan.planner.serving.estimator.table import Table, token_knots
from meshplan.planner.serving.problem.config import Role, Speculation
from meshplan.planner.serving.problem.requests import Images

# Tokens of an iteration at which work turns from memory-bound to compute-bound: ridge points of A100 to B200 in 8 and
# 16 bits lie between 150 and 600 tokens.
MEMORY_BOUND_TOKENS, COMPUTE_BOUND_TOKENS = 256.0, 2048.0
# Processor's time of the forward of one torch.nn.Linear on a DGX H100 (Xeon 8480C), s (NVIDIA/TransformerEngine, issue
# 2053): constants are fitted to hosts like that one, so that others launch in proportion to what they took there.
EAGER_LAUNCH_S = 13.48e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRange:
    """Context lengths between which attention time is linearised, tokens.

    Args:
        prompt: prompt tokens of a request.
        least: context of a decoding request at its first token.
        most: context at its last token.
        shortest: tokens of its own that any request has at its first token.
    """

    prompt: float
    least: float
    most: float
    shortest: float = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """The shortest and the longest, at least one token and not the same."""
        least = max(self.least, 1.0)
        return least, max(self.most, least + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Device seconds of one traversal of all stages, at the knots of the tables.

    Args:
        knots: [K] tokens of one batch.
        dense_s: [K] weights, norms, tensor-parallel collectives.
        together: [G] tokens of all ranks of a stage.
        experts_s: [G] routed experts and their exchange.
        seqs: [N] requests of one batch.
        head_s: [N] LM head and sampling.
        decode_fixed_s: [N] decode attention at no context.
        decode_context_s: [N] its growth per cached token of the batch.
        prefill_pair_s: prefill attention per attended pair.
        prefill_fixed_s: prefill attention at no attended pair.
    """

    knots: FloatArray
    dense_s: FloatArray
    together: FloatArray
    experts_s: FloatArray
    seqs: FloatArray
    head_s: FloatArray
    decode_fixed_s: FloatArray
    decode_context_s: FloatArray
    prefill_pair_s: float
    prefill_fixed_s: float


@dataclass(frozen=True, kw_only=True)
class Worker(WorkerParts):
    """One worker: every method returns seconds.

    Args:
        constants: calibrated.
        contexts: context lengths of the workload.
        role: prefill workers run no decodes.
        speculation: None without a draft.
        slowdown: under a power limit; None at full clocks.
        graphs: what its engine replays from graphs.
        prepares_ahead: the engine prepares iterations while others run.
        hides_host: that takes no time but where it takes longer than they do.
        remote_step_s: host's time of an iteration to reach workers on other devices.
        remote_s_per_seq: growth of that with each of its requests.
        pads_ranks: every attention data-parallel rank computes as many tokens as the one with most of them.
        one_batch: stages are passed by one batch at a time, not by a batch each.
        host_s_per_cache_group: that each group of layers after the first takes of the host in an iteration.
        front_end: its API servers.
        shared_history: tokens that each decoding request attends to beside those that it holds.
        images: of each prompt; None: text alone.
    """

    constants: ServingConstants
    contexts: ContextRange
    role: Role = Role.MIXED
    speculation: Speculation | None = None
    slowdown: Slowdown | None = None
    graphs: Graphs = NO_LIMIT
    prepares_ahead: bool = False
    hides_host: bool = False
    remote_step_s: float = 0.0
    remote_s_per_seq: float = 0.0
    pads_ranks: bool = False
    one_batch: bool = False
    host_s_per_cache_group: float = 0.0
    front_end: FrontEnd = NO_FRONT_END
    shared_history: float = 0.0
    images: Images | None = None

    @property
    def micro_batches(self) -> int:
        """Parts into which an iteration is split so that every stage has one at work."""
        return 1 if self.one_batch else self.layout.pipeline_parallel

    @property
    def concurrent_batches(self) -> int:
        """Batches in flight at once."""
        return self.micro_batches * self.layout.attention_data_parallel

    def host_s(self, tokens: FloatArray) -> FloatArray:
        """Time of an iteration of ``tokens`` on what lies beside the devices, at peak rates; here: none."""
        return np.zeros_like(tokens)

    def own_resources(self, running: FloatArray) -> dict[str, FloatArray] | None:
        """Resource → [N] seconds that a request takes it where they are not those of one of its devices; here: None."""
        return None

    # --- tables -------------------------------------------------------------------------------------------------------

    def scale(self, tokens: FloatArray) -> FloatArray:
        """Factor on device time at ``tokens`` per batch: calibrated, see :func:`scale`, and of the clocks."""
        return scale(self.constants, tokens) * self.slower(tokens)

    def slower(self, tokens: FloatArray) -> FloatArray:
        """Device time at ``tokens`` per batch over that at full clocks."""
        return np.ones_like(tokens) if self.slowdown is None else self.slowdown.at(tokens)

    @property
    def _verified_tokens(self) -> int:
        return 1 if self.speculation is None else self.speculation.verified_tokens

    @cached_property
    def encode_s(self) -> float:
        """Time of the images of one prompt on the first stage, or of its window of sound; 0 for text alone."""
        if self.shape.encoder is not None:
            encoder, read = replace(self, shape=self.shape.encoder), np.array([float(frames(self.shape))])
            layers = sum(encoder.dense_parts_s(read).values()) + encoder.attention.prefill_s(read)
            return float((layers + self.cross.around_encoder_s(read))[0])
        if self.images is None or self.shape.vision is None:
            return 0.0
        return encode_s(
            self.shape.vision,
            self.images,
            operators=self.operators,
            exchange=self.exchange,
            tensor_parallel=self.layout.tensor_parallel,
        )

    @cached_property
    def device_times(self) -> DeviceTimes:
        """Times from kernels and links alone, before calibration."""
        batch_seqs = -(-self.limits.max_num_seqs // self.concurrent_batches)
        most = self.limits.max_batched_tokens + batch_seqs * self._verified_tokens
        knots = token_knots(most)
        together = token_knots(most * self.layout.attention_data_parallel)
        routed = self.shape.num_moe_layers * (self.routed_s(together) + self.expert_exchange_s(together))
        seqs = token_knots(batch_seqs + 1)
        fixed, slope = self._decode_line(seqs)
        pair_s, prefill_fixed_s = self._prefill_line()
        return DeviceTimes(
            knots=knots,
            dense_s=np.asarray(sum(self.dense_parts_s(knots).values())),
            together=together,
            experts_s=np.broadcast_to(routed, together.shape),
            seqs=seqs,
            head_s=self.head_s(seqs),
            decode_fixed_s=fixed,
            decode_context_s=slope,
            prefill_pair_s=pair_s + self._encode_pair_s(),
            prefill_fixed_s=prefill_fixed_s,
        )

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest batch with prompts that is replayed from graphs."""
        return self.graphs.most_with_prompts(self.shape, self.layout, self.limits, self.machine.device)

    @property
    def graphed_decodes(self) -> float:
        """Tokens of the largest batch without prompts that is replayed from a graph."""
        return self.graphs.most_without(self.layout, self.limits, self._verified_tokens)

    @property
    def _most_in_batch(self) -> float:
        """Tokens of the largest batch of decodes."""
        return math.ceil(self.limits.max_num_seqs / self.concurrent_batches) * self._verified_tokens

    def step_cost(self, constants: ServingConstants | None = None) -> StepCost:
        """The tables; see :class:`StepCost`.

        Args:
            constants: replace the worker's own in fits, so that kernels are priced only once.
        """
        use, times, batches = constants or self.constants, self.device_times, self.concurrent_batches
        host, per_seq = (0.0, 0.0) if self.hides_host else self.host_times(use)
        ranks, prefill = self.layout.attention_data_parallel, use.prefill_factor * float(self.slower(times.knots)[-1])

        def factor(tokens: FloatArray) -> FloatArray:
            return scale(use, tokens) * self.slower(tokens)

        dense = host + factor(times.knots) * times.dense_s
        experts = factor(times.together / ranks) * times.experts_s
        if self.pads_ranks and ranks > 1:  # experts see the tokens of the fullest rank from each, whatever these hold
            dense = dense + np.interp(times.knots * ranks, times.together, experts)
            experts = np.zeros_like(experts)
        decodes = self.slower(times.seqs * self._verified_tokens)
        fixed, slope = (
            self._by_request(times.seqs, use.decode_factor * decodes * values)
            for values in (times.decode_fixed_s, times.decode_context_s / batches)
        )
        if self.sampling is not None and self.sampling.host_s_per_token:
            slope = self._beside_the_host(dense - host, experts, fixed, slope)
        cost = StepCost(
            concurrent_batches=batches,
            pipeline_parallel=self.micro_batches,
            dense_s=Table(times.knots, dense, int(times.knots[-1])),
            experts_s=Table(times.together, experts, int(times.together[-1])),
            outputs_s=Table(times.seqs, decodes * times.head_s + per_seq * times.seqs, int(times.seqs[-1])),
            decode_fixed_s=fixed,
            decode_context_s=slope,
            prefill_fixed_s=prefill * times.prefill_fixed_s,
            prefill_pair_s=prefill * times.prefill_pair_s,
            prefill_least_s=self.host_times(use)[0] + self.launch_s(use, has_prompts=True),
            graphed_tokens=self.captured_tokens,
            launches_ahead=self.hides_host,
            admission_steps=use.first_token_steps if self.prepares_ahead else 0.0,
            tokens_per_step=1.0 if self.speculation is None else self.speculation.tokens_per_step,
            verified_tokens=self._verified_tokens,
        )
        if self.hides_host or not self.limits.cuda_graphs or self._most_in_batch > self.graphed_decodes:
            batch = np.ceil(np.arange(1.0, cost.max_num_seqs + 1.0) / batches)
            first, last = (self.beside_s(use, batch, held) for held in self.contexts.ends)
            cost = beside_the_host(cost, (first, last), self.contexts.ends)
        cost = cost.attending_to(self.shared_history)
        if self.speculation is not None:
            cost = with_draft(cost, self.speculation)
        return self.beside_clients(cost)

    def beside_clients(self, cost: StepCost) -> StepCost:
        """The tables where a front end hands tokens on to clients while iterations run."""
        own, last = (max(held - self.shared_history, 1.0) for held in self.contexts.ends)
        ends = own, max(last, own + 1.0)
        beside = beside_the_front_end(cost, self.front_end_s, ends, shortest=self.contexts.shortest)
        return replace(beside, request_s=self.front_end.request_s(self.messages))

    @property
    def front_end_s(self) -> float:
        """What the API servers do for each decoding request of an iteration, s."""
        return 0.0 if self.role is Role.PREFILL else self.front_end.each_s

    @property
    def messages(self) -> float:
        """Iterations in which a request gains tokens."""
        if self.role is Role.PREFILL:
            return 0.0
        gained = 1.0 if self.speculation is None else self.speculation.tokens_per_step
        return max((self.contexts.most - self.contexts.least) / gained, 1.0)

    def host_times(self, use: ServingConstants) -> tuple[float, float]:
        """Host's time to prepare an iteration, and its growth with each request."""
        groups = num_cache_groups(self.shape) - 1 if self.host_s_per_cache_group else 0
        step_s = use.host_step_s + self.remote_step_s + self.host_s_per_cache_group * groups
        return step_s, use.host_s_per_seq + self.remote_s_per_seq

    def launch_s(self, use: ServingConstants, *, has_prompts: bool) -> float:
        """Time to launch the kernels of all layers one by one; without graphs as this host runs eager PyTorch."""
        each_s = None if self.limits.cuda_graphs else self.machine.device.eager_launch_s
        slower = 1.0 if each_s is None else each_s / EAGER_LAUNCH_S
        return layers_launch_s(use, self.shape, has_prompts=has_prompts) * slower

    def beside_s(self, use: ServingConstants, batch: FloatArray, context: float) -> FloatArray:
        """What the host of a batch does while its decodes run, [N].

        It prepares the next iteration, where that is hidden, and launches all kernels, where it has no graphs or the
        batch is larger than any (vLLM: "cudagraph will not be used", config/vllm.py, _set_cudagraph_sizes). Where
        answers are copied for penalties, the same thread waits for the tokens of the iteration before, copies them,
        and then prepares (vLLM 0.11.1: ``update_async_output_token_ids`` in v1/worker/gpu_input_batch.py).

        Args:
            use: constants.
            batch: [N] its requests.
            context: tokens that each of them has in the cache.
        """
        step_s, per_seq = self.host_times(use)
        is_launched = batch * self._verified_tokens > self.graphed_decodes
        launches = np.where(is_launched, step_s + self.launch_s(use, has_prompts=False), 0.0)
        if not self.hides_host:
            return np.asarray(launches)
        first, last = self.contexts.ends
        copied = self.copy_s(batch) * (context - first) / (last - first)
        return np.asarray(np.maximum(launches, step_s + per_seq * batch + copied))

    def _beside_the_host(
        self, dense_s: FloatArray, experts_s: FloatArray, fixed_s: Sequence[float], slope_s: Sequence[float]
    ) -> list[float]:
        """Growth with each cached token of decode attention and of what the layers wait for the copy of answers.

        With answers of mean length a step takes the longer of the two; what it waits grows with the context, from
        nothing without one.

        Args:
            dense_s: [N] by the tokens of a batch, without the host's time.
            experts_s: [M] by those of one micro-batch over all ranks.
            fixed_s: decode attention at no context, by requests of the worker.
            slope_s: its growth with each cached token, by these.
        """
        times, verified, counts = self.device_times, self._verified_tokens, np.arange(len(slope_s), dtype=np.float64)
        batch, held = np.ceil(counts / self.concurrent_batches), counts * self.contexts.most
        layers = np.interp(batch * verified, times.knots, dense_s) + np.array(fixed_s) + np.array(slope_s) * held
        layers = layers + np.interp(np.ceil(counts * verified / self.micro_batches), times.together, experts_s)
        return (np.array(slope_s) + np.maximum(self.copy_s(batch) - layers, 0.0) / np.maximum(held, 1.0)).tolist()

    def copy_s(self, sequences: FloatArray) -> FloatArray:
        """Time in which the host copies the answers of a batch, of mean length, for penalties."""
        each = 0.0 if self.sampling is None else self.sampling.host_s_per_token
        return each * sequences * (self.contexts.most - self.contexts.least)

    def _by_request(self, batch_seqs: FloatArray, values: FloatArray) -> list[float]:
        """Values by requests of one batch as a list by requests of the whole worker; 0 for none."""
        counts = np.arange(1, self.limits.max_num_seqs + 1)
        return [0.0, *np.interp(-(-counts // self.concurrent_batches), batch_seqs, values).tolist()]

    def _decode_line(self, seqs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Attention for the n decodes of a batch: its value at no context and its growth per cached token."""
        least, most = (np.full_like(seqs, held) for held in self.contexts.ends)
        low, high = (np.maximum.accumulate(self.decode_attention_s(seqs, held)) for held in (least, most))
        per_token = np.maximum((high - low) / ((most - least) * seqs), 0.0)
        return np.maximum(low - per_token * seqs * least, 0.0), per_token

    def _encode_pair_s(self) -> float:
        """Time of a prompt's images, spread over the pairs that the whole prompt attends to: however it is cut into
        chunks, these add up to p·(p + 1)/2. The first stage encodes all prompts, whose pairs are split over the stages.
        """
        pairs = float(attended_pairs(np.array([self.contexts.prompt]), None)[0])
        return self.layout.pipeline_parallel * self.encode_s / max(pairs, 1.0)

    def _prefill_line(self) -> tuple[float, float]:
        """Prefill attention per attended pair, and its value at no pair."""
        prompt = np.array([max(self.contexts.prompt / 2.0, 1.0), max(self.contexts.prompt, 2.0)])
        seconds, pairs = self.prefill_attention_s(prompt), attended_pairs(prompt, None)
        slope = max(float((seconds[1] - seconds[0]) / (pairs[1] - pairs[0])), 0.0)
        return slope, max(float(seconds[1] - slope * pairs[1]), 0.0)


# Constant of launches → how many of them an iteration has that is launched kernel by kernel.
LAUNCHES: Mapping[str, Callable[[ModelShape], int]] = {
    "launch_s_per_layer": lambda shape: shape.num_hidden_layers if shape.latent is None else 0,
    "launch_s_per_latent_layer": lambda shape: 0 if shape.latent is None else shape.num_hidden_layers,
    "launch_s_of_experts": lambda shape: shape.num_moe_layers,
    "launch_s_per_prompt_kernel": lambda shape: shape.num_prompt_kernels,
}
OF_PROMPTS_ALONE = frozenset({"launch_s_per_prompt_kernel"})


def layers_launch_s(constants: ServingConstants, shape: ModelShape, *, has_prompts: bool) -> float:
    """Time to launch the kernels of all layers one by one: of each layer, and what experts and recurrent layers add.

    Args:
        constants: times of launches.
        shape: the model.
        has_prompts: of an iteration with prompts, which recurrent layers compute in chunks, by more kernels.
    """
    names = [name for name in LAUNCHES if has_prompts or name not in OF_PROMPTS_ALONE]
    return float(sum(getattr(constants, name) * LAUNCHES[name](shape) for name in names))


def scale(constants: ServingConstants, tokens: FloatArray) -> FloatArray:
    """Calibrated factor on device time: of decode for few tokens, of prefill for many, log-linear between."""
    span = np.log(COMPUTE_BOUND_TOKENS / MEMORY_BOUND_TOKENS)
    share = np.clip(np.log(np.maximum(tokens, 1.0) / MEMORY_BOUND_TOKENS) / span, 0.0, 1.0)
    return np.asarray(constants.decode_factor ** (1.0 - share) * constants.prefill_factor**share)
