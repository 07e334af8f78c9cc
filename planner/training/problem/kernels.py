"""Which kernels most of a training step runs in: the width of its products, and whether attention is fused.

Constants of a step are efficiencies of such kernels, so that what measured runs say of one kind holds less for another:
intervals depend on it (:mod:`meshplan.planner.training.measured.intervals`).
"""

from __future__ import annotations

from collections.abc import Mapping

# Precision of matrix products → bits of their operands. fp32 runs as TF32 where the device has it.
_OPERAND_BITS: Mapping[str, int] = {
    precision: bits
    for bits, precisions in {
        32: ("fp32", "tf32"),
        16: ("bf16", "fp16"),
        8: ("fp8", "mxfp8", "int8"),
        4: ("nvfp4", "mxfp4"),
    }.items()
    for precision in precisions
}


def kind_of_kernels(precision: str, *, fuses_attention: bool) -> str:
    """The kernels of a step in words; a precision that is not known by name is told apart by it.

    >>> kind_of_kernels("fp32", fuses_attention=False)
    '32-bit products and unfused attention'
    """
    bits = _OPERAND_BITS.get(precision)
    products = precision if bits is None else f"{bits}-bit"
    return f"{products} products and {'fused' if fuses_attention else 'unfused'} attention"
