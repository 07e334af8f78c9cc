"""Gated short convolutions (LFM2, arXiv:2511.23404): y = out(C ⊙ conv(B ⊙ x)) with B, C and x projected from h.

There is no recurrent state beyond the last kernel − 1 inputs of the convolution.
"""

from __future__ import annotations

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """Sizes from ``conv_L_cache`` (the kernel) and ``conv_bias``."""
    kernel = fields.with_default("convolution_kernel", 3)
    biases = 5 * hidden_size if fields.config.get("conv_bias") is True else 0
    return RecurrentMixer(
        kind="short-convolution",
        num_heads=hidden_size,
        split_outputs=3 * hidden_size,
        output_inputs=hidden_size,
        vector_parameters=hidden_size * kernel + biases,
        state_elements=0,
        convolution_elements=hidden_size * (kernel - 1),
        scan_flops_per_token=2 * hidden_size * kernel,
        multiplies_matrices=False,
        streamed_elements=6 * hidden_size,
    )
