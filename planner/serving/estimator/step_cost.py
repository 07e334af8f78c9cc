"""What one iteration of an engine costs, by what is in its batch: the tables that searches and simulations read.

An iteration of a worker holds n decoding requests that read C tokens of KV cache between them, and q prompts of which
p tokens are prefilled, with P attended (query, key) pairs. The worker's devices form w = pipeline × attention-data
*lanes*; requests are dealt to lanes evenly, and a stage's lanes meet in the experts. One traversal of all stages::

    t = host + dense[v·⌈n/w⌉ + ⌈p/min(q, w)⌉] + experts[(v·n + p)/pipeline] + outputs[⌈(n + q)/w⌉]
        + decode_fixed[n] + decode_context[n]·C              where n > 0
        + prefill_fixed + prefill_pair·P/min(q, w)           where p > 0

and where p > 0 joined with prefill_least, the time to launch its kernels one by one, by the smooth maximum
(t⁴ + least⁴)^¼: host and device overlap but for what one waits for the other where both take about as long. Here
v tokens are verified per decoding request (1 without speculation), of which it gains ``tokens_per_step``. The terms in
n alone are one table, so that K iterations of an unchanged decode batch, over which C grows by n·tokens_per_step each,
sum in closed form::

    Σ = K·(decode[n] + decode_context[n]·C) + decode_context[n]·n·tokens_per_step·K·(K − 1)/2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Power of the smooth maximum of device and launch time: 19 % above either where they are equal, 1.5 % where one is
# twice the other. A plain maximum would hide the launch time from a fit that starts below it.
OVERLAP_POWER = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Tables of one worker; see the module's text.

    Args:
        lanes: w, pipeline × attention-data ranks.
        pipeline_parallel: stages, among which an iteration's tokens are dealt in micro-batches.
        dense_s: by tokens of one lane: all stages' weights, norms, tensor-parallel collectives, host time.
        experts_s: by tokens of one micro-batch over all attention-data ranks: routed experts and their exchange.
        outputs_s: by sequences of one lane that leave a token: LM head, sampling, scheduler.
        decode_fixed_s: by n: attention of the decodes at no context.
        decode_context_s: by n: growth per token of KV cache that the whole worker reads.
        prefill_fixed_s: attention of an iteration with prefill, apart from its pairs.
        prefill_pair_s: per attended pair of one lane.
        prefill_least_s: time to launch the kernels of an iteration with prompt tokens one by one.
        admission_steps: iterations that start before one can hold an arrived request: engines prepare them ahead.
        tokens_per_step: tokens that a decoding request gains in one iteration: 1, or more with speculation.
        verified_tokens: v, tokens of a decoding request in one iteration: 1, or drafted + 1.
    """

    lanes: int
    pipeline_parallel: int
    dense_s: Sequence[float]
    experts_s: Sequence[float]
    outputs_s: Sequence[float]
    decode_fixed_s: Sequence[float]
    decode_context_s: Sequence[float]
    prefill_fixed_s: float
    prefill_pair_s: float
    prefill_least_s: float = 0.0
    admission_steps: float = 0.0
    tokens_per_step: float = 1.0
    verified_tokens: int = 1

    @property
    def max_num_seqs(self) -> int:
        """Most decoding requests that the tables cover."""
        return len(self.decode_fixed_s) - 1

    def decode_s(self, num_seqs: int) -> float:
        """A decode-only iteration of ``num_seqs`` requests, apart from what grows with their context."""
        lane, verified = -(-num_seqs // self.lanes), self.verified_tokens
        together = -(-num_seqs * verified // self.pipeline_parallel)
        seconds = self.dense_s[lane * verified] + self.experts_s[together] + self.outputs_s[lane]
        return seconds + self.decode_fixed_s[num_seqs]

    def decode_steps_s(self, num_seqs: int, context: float, steps: int) -> float:
        """``steps`` decode-only iterations; ``context`` is C before the first."""
        slope = self.decode_context_s[num_seqs]
        grown = num_seqs * self.tokens_per_step * steps * (steps - 1) / 2
        return steps * (self.decode_s(num_seqs) + slope * context) + slope * grown

    def step_s(self, num_seqs: int, context: float, num_prompts: int, prompt_tokens: int, pairs: float) -> float:
        """One iteration with any composition.

        Args:
            num_seqs: n, decoding requests.
            context: C, tokens of KV cache that they read.
            num_prompts: q, prompts in prefill.
            prompt_tokens: p, their tokens in this iteration.
            pairs: P, Σ new·(already cached + (new + 1)/2) over the prompts.
        """
        if not num_prompts:
            return self.decode_s(num_seqs) + self.decode_context_s[num_seqs] * context
        spread = min(num_prompts, self.lanes)
        lane = -(-num_seqs // self.lanes) * self.verified_tokens + -(-prompt_tokens // spread)
        together = -(-(num_seqs * self.verified_tokens + prompt_tokens) // self.pipeline_parallel)
        outputs = -(-(num_seqs + num_prompts) // self.lanes)
        seconds = self.dense_s[lane] + self.experts_s[together] + self.outputs_s[outputs]
        seconds += self.prefill_fixed_s + self.prefill_pair_s * pairs / spread
        if num_seqs:
            seconds += self.decode_fixed_s[num_seqs] + self.decode_context_s[num_seqs] * context
        if not self.prefill_least_s:
            return seconds
        return float((seconds**OVERLAP_POWER + self.prefill_least_s**OVERLAP_POWER) ** (1.0 / OVERLAP_POWER))
