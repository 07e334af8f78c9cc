"""Selective state space (Mamba, arXiv:2312.00752): Jamba.

h_t = exp(Δ_t·A)·h_{t−1} + Δ_t·B_t·x_t, y_t = C_tᵀ·h_t + D·x_t, with N states for each of the expansion·h channels. The
scan multiplies no matrices: about nine operations per channel, state and token (§D: decay, input, sum, output), done
by the vector units while the activations pass through memory, which bounds it.
"""

from __future__ import annotations

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """Sizes from ``mamba_d_state``, ``mamba_d_conv``, ``mamba_expand``, ``mamba_dt_rank``.

    Projections: gate and input (2·I); from the input the step of rank r, B and C (r + 2·N), and the step's expansion
    (r → I, with bias); a convolution with bias; A (I·N), D (I); norms of step, B and C.
    """
    inner = fields.with_default("mamba_expand", 2) * hidden_size
    state = fields.with_default("ssm_state_size", 16)
    rank = fields.optional("mamba_dt_rank") or -(-hidden_size // 16)
    kernel = fields.with_default("convolution_kernel", 4)
    biases = inner if fields.config.get("mamba_conv_bias", True) is not False else 0
    if fields.config.get("mamba_proj_bias") is True:
        biases += 2 * inner + hidden_size
    return RecurrentMixer(
        kind="mamba-1",
        num_heads=inner,
        split_outputs=2 * inner,
        inner_weights=inner * (2 * rank + 2 * state),
        inner_inputs=inner,
        output_inputs=inner,
        vector_parameters=inner * (kernel + state + 2) + biases + rank + 2 * state,
        state_elements=inner * state,
        convolution_elements=inner * (kernel - 1),
        scan_flops_per_token=9 * inner * state,
        multiplies_matrices=False,
        streamed_elements=10 * inner + 2 * state,
    )
