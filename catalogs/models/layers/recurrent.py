"""What estimators need to know of a token mixer whose state has a fixed size.

State-space, linear-attention and convolution layers differ in their equations and look alike to a machine: matrices
applied to every token, a recurrence that is computed in chunks over a prompt and step by step in a decode, a state of
so many elements a sequence, and passes over the activations in between. One file of this folder describes each kind
in these numbers; estimators read the numbers and know no kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshplan.catalogs.models.layers.attention_form import AttentionForm

STATE_BYTES = 4.0
"""Bytes of one element of a recurrent state: fp32, the default of ``mamba_ssm_cache_dtype`` in Nemotron-H's
configuration (transformers 5.16.1). Assumed for the other kinds and for all engines: one that keeps 16 bits holds more
requests."""


class Mixer(Enum):
    """What mixes the tokens of a layer."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    BOTH = "both"  # side by side on the same input (Falcon-H1)
    NONE = "none"  # a layer that is one MLP or expert block (Nemotron-H)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer:
    """One recurrent mixer of a model with hidden size h.

    Parameters: h·(split_outputs + copied_outputs + output_inputs) + inner_weights + vector_parameters.

    Args:
        kind: name of the kind, a key of :data:`meshplan.catalogs.models.layers.registry.KINDS`.
        num_heads: heads, which tensor parallelism divides.
        split_outputs: outputs of the projections from h that tensor parallelism divides.
        copied_outputs: outputs of those that every tensor-parallel device computes.
        inner_weights: elements of the matrices between input and output projections.
        inner_inputs: inputs of those matrices.
        output_inputs: inputs of the output projection.
        vector_parameters: convolution kernels, gates, decays, norms and biases.
        state_elements: recurrent state of one sequence in one layer.
        convolution_elements: last inputs of the short convolution that a sequence keeps in one layer.
        scan_flops_per_token: FLOPs of the recurrence per token, forward, computed in chunks.
        multiplies_matrices: the recurrence runs on the matrix units; else on the vector units.
        streamed_elements: activations that convolution, gate and norm read and write per token, forward; the recurrence
            too where no kernel of it was timed, whose time holds its own reads and writes.
        prompt_kernels: kernels that a layer launches for a prompt beyond those of softmax attention, in chunks; 0 where
            none were counted.
    """

    kind: str
    num_heads: int
    split_outputs: int
    output_inputs: int
    vector_parameters: int
    state_elements: int
    convolution_elements: int
    scan_flops_per_token: int
    streamed_elements: int
    copied_outputs: int = 0
    inner_weights: int = 0
    inner_inputs: int = 0
    multiplies_matrices: bool = True
    prompt_kernels: int = 0

    def parameters(self, hidden_size: int) -> int:
        """All parameters of one mixer."""
        matrices = hidden_size * (self.split_outputs + self.copied_outputs + self.output_inputs)
        return matrices + self.inner_weights + self.vector_parameters

    @property
    def kept_elements(self) -> int:
        """Activations per token that a backward pass needs: outputs of the products, of convolution and recurrence.

        Assumes that nothing is fused: the projected input before and after its convolution, the output before and after
        its gated norm. No framework was read or measured for it.
        """
        return 2 * (self.split_outputs + self.copied_outputs) + 2 * self.output_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexer:
    """The indexer of sparse attention: it scores every cached token and lets attention see the best ``top_k``.

    DeepSeek-V3.2 (report of 2025-09, eq. 1–2): I(t, s) = Σ_j w_j·ReLU(q_j·k_s) over ``num_heads`` heads with one
    shared key of ``head_dim`` a token, which a second cache keeps in fp8.

    Args:
        num_heads: indexer heads.
        head_dim: size of a head and of the cached key.
        top_k: tokens that attention sees.
        query_inputs: inputs of the query projection (the rank of latent queries, or h).
    """

    num_heads: int
    head_dim: int
    top_k: int
    query_inputs: int

    def parameters(self, hidden_size: int) -> int:
        """Query, key and head-weight projections, and the LayerNorm of the keys."""
        width = self.num_heads * self.head_dim
        return self.query_inputs * width + hidden_size * (self.head_dim + self.num_heads) + 2 * self.head_dim

    @property
    def cache_bytes_per_token(self) -> float:
        """Cached key in fp8 and its fp32 scale, one a token and layer; assumed."""
        return self.head_dim + 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """What each layer of a model holds, where they are not all softmax attention and an MLP or experts.

    Args:
        mixers: one per layer.
        has_mlp: one per layer: an MLP or experts follow the mixer.
        recurrent: sizes of the recurrent mixers; None where no layer has one.
        indexer: of sparse attention; None where attention sees all tokens (or a window).
        output_gate: attention's output is scaled by a gate of its own width, projected with the queries (Qwen3-Next).
        indexed: one per layer: it has an indexer of its own; others attend to all, or to what the layer before chose
            (GLM-5.2). Empty: every layer with attention has one.
        forms: softmax attention where the layers have it in several forms; empty where all have the model's sizes.
        form_of: one per layer: its place in ``forms``.
    """

    mixers: tuple[Mixer, ...]
    has_mlp: tuple[bool, ...]
    recurrent: RecurrentMixer | None = None
    indexer: SparseIndexer | None = None
    output_gate: bool = False
    indexed: tuple[bool, ...] = ()
    forms: tuple[AttentionForm, ...] = ()
    form_of: tuple[int, ...] = ()

    @property
    def recurrent_state_bytes(self) -> float:
        """State of one sequence in one recurrent layer: fp32 recurrence, convolution inputs in 16 bits."""
        if self.recurrent is None:
            return 0.0
        return STATE_BYTES * self.recurrent.state_elements + 2.0 * self.recurrent.convolution_elements

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has softmax attention."""
        return self.mixers[layer] in (Mixer.ATTENTION, Mixer.BOTH)

    def has_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent mixer."""
        return self.mixers[layer] in (Mixer.RECURRENT, Mixer.BOTH)

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer has an indexer of its own."""
        return self.indexer is not None and (self.indexed[layer] if self.indexed else self.has_attention(layer))

    def form(self, layer: int) -> AttentionForm | None:
        """Attention of a layer; None where it has none, or the model's common one."""
        return self.forms[self.form_of[layer]] if self.forms and self.has_attention(layer) else None
