"""Kimi delta attention (Kimi Linear, arXiv:2510.26692): a gated delta rule whose decay is per channel.

As :mod:`.gated_delta` with as many key as value heads; decays and gates come from low-rank projections h → d → H·d.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.gated_delta import CHUNK, PROMPT_KERNELS
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """Sizes from ``linear_attn_config``: ``num_heads``, ``head_dim``, ``short_conv_kernel_size``.

    Queries, keys, values of H·d; a step of H; decay and gate of rank d; three convolutions; a norm of d. The modelling
    file was not read: with these the 48B model counts 49.12 billion parameters, as is published.
    """
    del hidden_size
    section = fields.config.get("linear_attn_config")
    inner = ConfigFields(section if isinstance(section, Mapping) else {}, {})
    heads, size = inner.required("num_attention_heads"), inner.required("head_dim")
    kernel = inner.with_default("convolution_kernel", 4)
    fields.problems += inner.problems
    width = heads * size
    scanned = 5 * CHUNK * size + 3 * size * size
    return RecurrentMixer(
        kind="kimi-delta",
        num_heads=heads,
        split_outputs=3 * width + heads,
        copied_outputs=2 * size,
        inner_weights=2 * size * width,
        inner_inputs=size,
        output_inputs=width,
        vector_parameters=3 * width * kernel + heads + width + size,
        state_elements=heads * size * size,
        convolution_elements=3 * width * (kernel - 1),
        scan_flops_per_token=2 * heads * scanned,
        streamed_elements=2 * 3 * width + 5 * width,
        prompt_kernels=PROMPT_KERNELS + 2,  # three convolutions for one
    )
