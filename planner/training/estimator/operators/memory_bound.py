"""Memory traffic of a layer's memory-bound operators, fused or eager, and of per-row quantisation scales.

Counted from the operators' definitions, 16-bit activations:

- norm, of the stream of residuals or of queries and keys: one read and one write fused (of queries and keys none under
  torch.compile, which joins it to the rotation); in PyTorch eager ``torch.nn.RMSNorm`` is cast 2+4, square 4+4, mean 4,
  scale 4+4, cast 4+2, weight 2+2 = 36 bytes per element;
- residual addition: 2+2+2 bytes either way;
- rotary embedding: 2+2 fused; eager in complex fp32: cast 2+4, product 4+4, cast 4+2 = 20 bytes;
- gated activation: two reads and a write fused; eager 2+2 for the function and 2+2+2 for the product;
- loss, forward and backward: 16-bit logits, their fp32 copy, softmax, gradient; eager: cast 2+4, log-softmax 4+4, its
  gradient 4+4, cast 4+2.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.core.constants import BYTES_16_BIT

# Matrices of an MLP with a gate.
GATED_MATRICES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTraffic:
    """Elements or bytes read and written in a layer's forward.

    Args:
        norm: elements per normalised element.
        residual: elements per hidden element of a residual addition.
        rotary: elements per rotated element.
        gated_activation: elements per element of MLP width, with a gate.
        loss_bytes: bytes per logit, forward and backward.
    """

    norm: float
    residual: float
    rotary: float
    gated_activation: float
    loss_bytes: float

    def activation(self, mlp_matrices: int) -> float:
        """Elements that the MLP's activation moves per element of its width; without a gate one read and one write."""
        return self.gated_activation if mlp_matrices == GATED_MATRICES else float(mlp_matrices)


FUSED = OperatorTraffic(norm=2.0, residual=3.0, rotary=2.0, gated_activation=3.0, loss_bytes=20.0)
EAGER = OperatorTraffic(
    norm=36 / BYTES_16_BIT,
    residual=6 / BYTES_16_BIT,
    rotary=20 / BYTES_16_BIT,
    gated_activation=(4 + 6) / BYTES_16_BIT,
    loss_bytes=28.0,
)
# Bytes per element by which quantisation with per-row scales exceeds that with one scale per tensor: both operands of
# every product are quantised along both of their dimensions. Measured: Llama-3-8B on 8 H100 (96 GB, 2.4 TB/s), 8,192
# tokens per device, 6,412 instead of 7,186 tokens/s (torchtitan commit 7a04053, January 2025), so 4.3 ms per layer over
# the 1.0e9 elements of its products (every second one computed again) at 0.7 of the bandwidth. It includes the
# difference between the row-scaled kernel (CUTLASS) and the faster one (cuBLAS).
ROW_SCALING_EXTRA_BYTES = 7.2
