"""State-space duality (Mamba-2, arXiv:2405.21060): Nemotron-H, Granite 4, Bamba, Falcon-H1.

h_t = a_t·h_{t−1} + B_t·x_tᵀ, y_t = C_tᵀ·h_t + D·x_t, with one N × P state a head, B and C shared by the heads of a
group. In chunks of Q tokens (§6): C·Bᵀ per group, its product with X, the chunk's state and its output:
G·Q·N + H·(Q·P + 2·N·P) multiply-adds per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

CHUNK = 256  # tokens; assumed, kernels choose it


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSizes:
    """H heads of size P, states N of a channel, G groups, and the convolution's kernel."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int


def sizes(mixer: RecurrentMixer) -> StateSpaceSizes:
    """The sizes of which :func:`read` made a mixer, back from its totals."""
    heads, inner = mixer.num_heads, mixer.output_inputs
    state = mixer.state_elements // inner
    convolved = mixer.split_outputs - inner - heads
    return StateSpaceSizes(
        num_heads=heads,
        head_dim=inner // heads,
        state_size=state,
        num_groups=(convolved - inner) // (2 * state),
        kernel=mixer.convolution_elements // convolved + 1,
    )


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """Sizes from ``mamba_num_heads`` (``mamba_n_heads``), head size, state size, groups, kernel.

    Projections: gate and input (2·H·P), B and C (2·G·N), step (H); a convolution with bias over input, B and C;
    decay, skip and step bias of H; a gated norm of H·P.
    """
    heads = fields.required("mamba_num_heads")
    size = fields.optional("mamba_head_dim") or _head_size(fields, hidden_size, heads)
    state, groups = fields.required("ssm_state_size"), fields.with_default("ssm_groups", 1)
    kernel = fields.with_default("convolution_kernel", 4)
    inner = heads * size
    convolved = inner + 2 * groups * state
    biases = (fields.config.get("mamba_conv_bias", fields.config.get("use_conv_bias", True)) is not False) * convolved
    outputs = inner + convolved + heads
    if fields.config.get("mamba_proj_bias") is True:
        biases += outputs + hidden_size
    norm = inner if fields.config.get("mamba_rms_norm", True) is not False else 0
    scanned = groups * CHUNK * state + heads * (CHUNK * size + 2 * state * size)
    return RecurrentMixer(
        kind="mamba-2",
        num_heads=heads,
        split_outputs=outputs,
        output_inputs=inner,
        vector_parameters=convolved * kernel + biases + 3 * heads + norm,
        state_elements=heads * size * state,
        convolution_elements=convolved * (kernel - 1),
        scan_flops_per_token=2 * scanned,
        streamed_elements=2 * convolved + 3 * inner,
    )


def _head_size(fields: ConfigFields, hidden_size: int, heads: int) -> int:
    """P where it is not stated: expansion·h / H."""
    return fields.with_default("mamba_expand", 2) * hidden_size // heads if heads else 0
