"""Fused attention in training: what the kernels of a library reach on a generation of devices.

One library is far from another on the same device, and the same library far from itself on another: FlashAttention-2
reaches 60 % of an A100's peak and 31 % of an H100's, whose asynchronous products it does not use. The rates are those
of kernels timed alone, so that one constant – ``attention_kernel_efficiency`` – says for all of them how much of it is
left inside a step. They ship as ``seed/attention_kernels.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.constants.entries import read_entry, seed_content

# Heads from here on count as wide; of twice the width, as widest.
WIDE_HEAD = 128
WIDEST_HEAD = 256
# Keys, beside those that a token attends to, that cost as much as they do: tiles on the diagonal are computed whole and
# short sequences fill the device badly. From FlashAttention-3, arXiv:2407.08608, figure 5 (causal, heads of 128): at
# 512, 1,024 and 2,048 tokens FlashAttention-2 and cuDNN reach 57 to 58, 76 to 78 and 89 to 90 % of their rate at
# 16,384, as a mean context of half the sequence and 150 keys more does (63, 77 and 87 %).
TILE_KEYS = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """Rates of fused causal attention, as shares of the dense 16-bit peak, with heads of 128 or more.

    Args:
        forward_share: of the forward pass: two products.
        backward_share: of the backward pass: five products, the scores computed again.
        narrow_heads: rates with heads of 64 over these; in between in proportion.
        widest_backward: rate of the backward pass with heads of 256 over this; in between in proportion.
    """

    forward_share: float
    backward_share: float
    narrow_heads: float = 1.0
    widest_backward: float = 1.0

    def of_heads(self, head_dim: int) -> AttentionKernel:
        """The rates with heads of ``head_dim``, as if they were wide.

        >>> wide = AttentionKernel(forward_share=0.5, backward_share=0.4, narrow_heads=0.8)
        >>> round(wide.of_heads(96).forward_share, 3)
        0.45
        >>> from dataclasses import replace
        >>> round(replace(wide, widest_backward=0.5).of_heads(192).backward_share, 3)
        0.3
        """
        width = _between(head_dim, WIDE_HEAD / 2, WIDE_HEAD)
        share = self.narrow_heads + width * (1.0 - self.narrow_heads)
        excess = _between(head_dim, WIDE_HEAD, WIDEST_HEAD)
        backward = self.backward_share * (1.0 - excess * (1.0 - self.widest_backward))
        return AttentionKernel(forward_share=share * self.forward_share, backward_share=share * backward)


def _between(value: float, low: float, high: float) -> float:
    """Where a value lies from ``low`` (0) to ``high`` (1), and outside at the nearer end."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


# A library on a generation where nobody timed it. Steps of published runs left fused attention 0.18 to 0.5 of the peak,
# 0.35 in the middle (fits of 2026-11-20, one share for all kernels); of a kernel alone a step leaves about 0.9.
UNTIMED = AttentionKernel(forward_share=0.4, backward_share=0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    library: str
    generations: tuple[str, ...]
    forward_share: float
    backward_share: float
    narrow_heads: float
    source: str
    widest_backward: float = 1.0


@cache
def _kernels() -> Mapping[tuple[str, str], AttentionKernel]:
    entries = [read_entry(_Entry, entry) for entry in seed_content("attention_kernels.yaml")["kernels"]]
    return {
        (entry.library, generation): AttentionKernel(
            forward_share=entry.forward_share,
            backward_share=entry.backward_share,
            narrow_heads=entry.narrow_heads,
            widest_backward=entry.widest_backward,
        )
        for entry in entries
        for generation in entry.generations
    }


def attention_libraries() -> frozenset[str]:
    """Every library with a kernel that somebody timed."""
    return frozenset(library for library, _ in _kernels())


def attention_kernel(library: str, generation: str) -> AttentionKernel:
    """The kernel of a library on a generation of devices, :data:`UNTIMED` where nobody timed it."""
    return _kernels().get((library, generation), UNTIMED)
