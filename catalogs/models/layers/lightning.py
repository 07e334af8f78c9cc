"""Lightning attention (arXiv:2401.04658), linear attention with a fixed decay per head: MiniMax-Text-01, MiniMax-M1.

S_t = λ·S_{t−1} + k_t·v_tᵀ, o_t = q_tᵀ·S_t, with one d × d state a head. In blocks of C tokens: Q·Kᵀ and its product
with V inside a block, Q·S and Kᵀ·V between blocks: 2·C·d + 2·d² multiply-adds per token and head.
"""

from __future__ import annotations

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

CHUNK = 256  # tokens; assumed, kernels choose it


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """As many heads of the same size as attention has: queries, keys, values, an output gate and a norm of a·d."""
    heads = fields.required("num_attention_heads")
    size = fields.optional("head_dim") or (hidden_size // heads if heads else 0)
    width = heads * size
    return RecurrentMixer(
        kind="lightning",
        num_heads=heads,
        split_outputs=4 * width,
        output_inputs=width,
        vector_parameters=width,
        state_elements=heads * size * size,
        convolution_elements=0,
        scan_flops_per_token=2 * heads * (2 * CHUNK * size + 2 * size * size),
        streamed_elements=4 * width + 5 * width,
    )
