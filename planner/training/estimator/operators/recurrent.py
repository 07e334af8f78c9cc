"""What a module for training does around a recurrence that an inference kernel does not: copies, and more launches.

Counted in megatron-core's modules (NVIDIA/Megatron-LM, megatron/core/ssm: gated_delta_net.py at 00caa53, mamba_mixer.py
with mamba_split_conv1d_scan_combined), forward, C elements of a token that are convolved, K of a query and of a key
over all key heads, V of a value:

- *Gated delta rule.* Copied whole: what is convolved, transposed for it (2·C); gate and values (2·V each); queries and
  keys (2·K each). Repeated for the value heads: queries and keys (K + V each), which the kernel then reads at V instead
  of K. The norm is a pass of its own before its gate (2·V). In sum 2·C + 4·K + 10·V.
- *Mamba-2.* Convolution, scan and gate are one function that reads the projection as it lies: no copies.

*Launches* of a mixer with its norm and residual addition. Softmax attention: norm and product, two norms of queries and
keys, two rotations, attention, product, addition: 10. Mamba-2: norm and product, transpose, two for the decay,
convolution, five of the scan, gated norm, transpose, product, addition: 15. Gated delta rule: norm and product,
transpose, convolution, copies and norms of queries and keys (4), repeats (2), copies of values, gate, steps and decays
(4), seven for decay and step, seven of the rule, norm and gate (2), product, addition: 32.
"""

from __future__ import annotations

from meshplan.catalogs.models.layers import gated_delta
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

GATED_DELTA = "gated-delta"
ATTENTION_LAUNCHES = 10.0
# Kinds whose module was read; others are taken to launch as much as attention, and to copy nothing.
LAUNCHES = {"mamba-2": 15.0, GATED_DELTA: 32.0}


def launches_ratio(mixer: RecurrentMixer) -> float:
    """Kernel launches of the mixer over those of softmax attention."""
    return LAUNCHES.get(mixer.kind, ATTENTION_LAUNCHES) / ATTENTION_LAUNCHES


def copied_elements(mixer: RecurrentMixer) -> int:
    """Elements per token that the module reads and writes beside :attr:`RecurrentMixer.streamed_elements`, forward."""
    if mixer.kind != GATED_DELTA:
        return 0
    sizes, values = gated_delta.sizes(mixer), mixer.output_inputs
    keys = sizes.num_key_heads * sizes.key_head_dim
    return 2 * (2 * keys + values) + 4 * keys + 10 * values
