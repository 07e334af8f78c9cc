"""The shape of a transformer: what an estimator needs to know of a model, and nothing else.

A shape is read from a Hugging Face ``config.json`` (:mod:`meshplan.catalogs.models.config`) or from the catalog. It
counts its own parameters; the counts include biases, norms and position embeddings, so that they can be compared
with the published totals.

Notation: h hidden size, a attention heads, k key/value heads, d head dimension, f MLP width, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshplan.catalogs.models.attention import AttentionKind, LatentAttention
from meshplan.catalogs.models.audio import AudioEntry
from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.layers.recurrent import LayerBlocks
from meshplan.catalogs.models.pooling import Pooling
from meshplan.catalogs.models.vision import VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """The expert part of a model.

    Args:
        num_experts: routed experts in each MoE layer.
        num_experts_per_token: routed experts that each token visits (top-k).
        expert_intermediate_size: MLP width of one routed expert.
        shared_intermediate_size: total MLP width of the shared experts, 0 where there are none.
        moe_layers: which layers are MoE layers, one flag per layer.
        expert_bias: experts and router carry biases (gpt-oss).
        shared_expert_gate: the shared experts are scaled by a learned gate of h parameters (Qwen-MoE).
        latent_size: width that tokens are brought to before they are sent to experts (Nemotron 3); None where experts
            work on h.
        num_expert_groups: equal groups, in order, that the routed experts lie in; 1 where the router knows none.
        num_groups_per_token: groups that the experts of one token lie in at most (node-limited routing).
    """

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    moe_layers: tuple[bool, ...]
    expert_bias: bool = False
    shared_expert_gate: bool = False
    latent_size: int | None = None
    num_expert_groups: int = 1
    num_groups_per_token: int = 1

    @property
    def limits_groups(self) -> bool:
        """The router keeps a token from some groups of experts."""
        return self.num_groups_per_token < self.num_expert_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only language model, one encoder, or the decoder of an encoder–decoder with its encoder.

    Args:
        slug: catalog name, such as ``llama-3.1-70b``.
        name: as its publisher writes it.
        family: Hugging Face ``model_type``.
        num_hidden_layers: transformer layers, without multi-token-prediction layers.
        hidden_size: h.
        intermediate_size: f of the dense MLP (unused where every layer is an MoE layer).
        gated_mlp: three matrices (SwiGLU, GeGLU) instead of two.
        num_attention_heads: a.
        num_key_value_heads: k; equals a for multi-head latent attention.
        head_dim: d, of queries and keys.
        vocab_size: V as configured; frameworks pad it.
        tie_word_embeddings: the LM head shares the embedding's matrix.
        attention: see :class:`AttentionKind`.
        latent: sizes of multi-head latent attention, else None.
        moe: the expert part, None for a dense model.
        sliding_windows: one entry per layer: attention window in tokens (of a bidirectional model on both sides
            together), None for full attention; empty when every layer is full.
        blocks: what each layer holds; None where every layer is softmax attention and an MLP or experts.
        num_position_embeddings: learned absolute positions (GPT-2, OPT), 0 with rotary or ALiBi.
        num_token_types: rows of a learned table of kinds of tokens (BERT), 0 without.
        bidirectional: tokens attend to all others of their text (encoders); such a model generates nothing.
        pooling: what stands in the place of an LM head (embedding models, rerankers); None: an LM head.
        max_sequence_length: longest trained context in tokens, None where unknown.
        attention_bias: biases on the query, key and value projections.
        key_bias: keys have a bias where queries and values have (Whisper's have none).
        attention_output_bias: bias on the output projection.
        attention_sinks: one learned softmax sink a head (gpt-oss).
        mlp_bias: biases on the dense MLP.
        lm_head_bias: bias on the output projection to the vocabulary (GPT-J, Phi-2).
        norm_weight: norms have a weight; False for the parameter-free LayerNorm of OLMo.
        norm_bias: norms have a bias (LayerNorm) or not (RMSNorm).
        norms_per_layer: norms over h in each layer (2; 4 in Gemma 2/3; 1 with a parallel attention-MLP block and
            one shared norm).
        num_outer_norms: norms over h outside the layers: 1 before the LM head; 2 with one after the embedding (BLOOM).
        qk_norm: queries and keys are normalised: per head (Qwen3, Gemma 3), which costs 2·d parameters a layer.
        qk_norm_full_width: that norm spans all heads together (OLMo 2, Command R+, MiniMax-M2): (a + k)·d parameters.
        word_embedding_size: width of the embedding and the LM head where two extra matrices map it to h and back
            (OPT-350M); None where it is h.
        num_nextn_predict_layers: multi-token-prediction layers (DeepSeek-V3); they train but do not count as layers.
        vision: the encoder of images in front; None without one that is read. It is no part of the counts here.
        position_bias_parameters: learned biases of scores by distance (T5), of all layers together; 0 without.
        audio: what makes vectors of sound in the place of an embedding (the encoder of Whisper).
        encoder: whose output each layer here attends to by a second attention (cross-attention); None without one.
            It has the same width, and no vocabulary of its own.
        source: citation of the configuration.
    """

    slug: str
    name: str
    family: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    gated_mlp: bool
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention: AttentionKind = AttentionKind.GROUPED_QUERY
    latent: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    sliding_windows: tuple[int | None, ...] = ()
    blocks: LayerBlocks | None = None
    num_position_embeddings: int = 0
    num_token_types: int = 0
    bidirectional: bool = False
    pooling: Pooling | None = None
    max_sequence_length: int | None = None
    attention_bias: bool = False
    key_bias: bool = True
    attention_output_bias: bool = False
    attention_sinks: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    norm_weight: bool = True
    norm_bias: bool = False
    norms_per_layer: int = 2
    num_outer_norms: int = 1
    qk_norm: bool = False
    qk_norm_full_width: bool = False
    word_embedding_size: int | None = None
    num_nextn_predict_layers: int = 0
    vision: VisionTower | None = None
    position_bias_parameters: int = 0
    audio: AudioEntry | None = None
    encoder: ModelShape | None = None
    source: str = ""

    # --- layers -------------------------------------------------------------------------------------------------

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) routes tokens to experts."""
        return self.moe is not None and self.moe.moe_layers[layer]

    @property
    def num_moe_layers(self) -> int:
        """How many layers route tokens to experts."""
        return 0 if self.moe is None else sum(self.moe.moe_layers)

    def window(self, layer: int) -> int | None:
        """Attention window of layer ``layer`` in tokens, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def has_attention(self, layer: int) -> bool:
        """Whether layer ``layer`` has softmax attention."""
        return self.blocks is None or self.blocks.has_attention(layer)

    def attention_form(self, layer: int) -> AttentionForm | None:
        """Attention of a layer whose sizes are not the model's common ones; None where they are, or without any."""
        return None if self.blocks is None else self.blocks.form(layer)

    @property
    def attention_forms(self) -> tuple[tuple[AttentionForm, int | None, int], ...]:
        """(form, window, number of layers) where layers have attention of several forms; else empty."""
        if self.blocks is None or not self.blocks.forms:
            return ()
        layers = range(self.num_hidden_layers)
        each = [(form, self.window(layer)) for layer in layers if (form := self.attention_form(layer)) is not None]
        return tuple((form, window, each.count((form, window))) for form, window in dict.fromkeys(each))

    def has_recurrent(self, layer: int) -> bool:
        """Whether layer ``layer`` has a recurrent mixer."""
        return self.blocks is not None and self.blocks.has_recurrent(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether layer ``layer`` has an MLP or experts."""
        return self.blocks is None or self.blocks.has_mlp[layer]

    @property
    def keeps_prompts_whole(self) -> bool:
        """No prompt is cut into chunks: its tokens attend to later ones, or an encoder reads before them."""
        return self.bidirectional or self.encoder is not None

    @property
    def num_attention_layers(self) -> int:
        """How many layers have softmax attention."""
        return self._count(self.has_attention)

    @property
    def num_recurrent_layers(self) -> int:
        """How many layers have a recurrent mixer."""
        return 0 if self.blocks is None else self._count(self.has_recurrent)

    @property
    def num_prompt_kernels(self) -> int:
        """Kernels that recurrent layers launch for a prompt beyond those of softmax attention."""
        recurrent = None if self.blocks is None else self.blocks.recurrent
        return 0 if recurrent is None else recurrent.prompt_kernels * self.num_recurrent_layers

    @property
    def num_indexed_layers(self) -> int:
        """How many layers have an indexer of their own."""
        blocks = self.blocks
        return 0 if blocks is None else self._count(blocks.has_indexer)

    @property
    def num_dense_layers(self) -> int:
        """How many layers have a dense MLP."""
        return self._count(self.has_mlp) - self.num_moe_layers

    @property
    def num_blocks(self) -> int:
        """Blocks with a residual connection: of each layer its mixers, side by side, its cross-attention, its MLP or
        experts.
        """
        mixed = self._count(lambda layer: self.has_attention(layer) or self.has_recurrent(layer))
        crossed = 0 if self.encoder is None else self.num_hidden_layers
        return mixed + crossed + self._count(self.has_mlp)

    def _count(self, holds: Callable[[int], bool]) -> int:
        return self.num_hidden_layers if self.blocks is None else sum(map(holds, range(self.num_hidden_layers)))

    # --- parameters ---------------------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of one softmax-attention block, output projection and indexer included.

        Grouped query: h·d·(2a + 2k), and h·d·a for an output gate. Latent: the low-rank factors of DeepSeek-V2 §2.1,
        with their norms. The mean over layers whose attention has several forms.
        """
        if forms := self.attention_forms:
            return round(sum(form.parameters * count for form, _, count in forms) / self.num_attention_layers)
        h, a = self.hidden_size, self.num_attention_heads
        if self.latent is not None:
            return self.latent.parameters(h, a) + self.indexer_parameters
        queries, keys = a * self.head_dim, self.num_key_value_heads * self.head_dim
        weights = h * ((2 + self.has_output_gate) * queries + 2 * keys)
        biases = self.attention_bias * (queries + (1 + self.key_bias) * keys) + self.attention_output_bias * h
        norms = queries + keys if self.qk_norm_full_width else 2 * self.head_dim
        return weights + biases + self.qk_norm * norms + self.attention_sinks * a + self.indexer_parameters

    @property
    def normed_elements(self) -> int:
        """Elements of queries and keys of one token that are normalised: (a + k)·d, or none."""
        normed = self.qk_norm and self.latent is None
        return normed * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim

    def layer_attention_parameters(self, layer: int) -> int:
        """Parameters of the softmax attention of one layer, with its own indexer; 0 without."""
        if not self.has_attention(layer):
            return 0
        if (form := self.attention_form(layer)) is not None:
            return form.parameters
        unindexed = self.blocks is not None and not self.blocks.has_indexer(layer)
        return self.attention_parameters - unindexed * self.indexer_parameters

    @property
    def cross_attention_parameters(self) -> int:
        """Parameters of the attention of one layer to the encoder's output, as large as that to its own tokens."""
        return 0 if self.encoder is None else self.attention_parameters

    @property
    def has_output_gate(self) -> bool:
        """Whether attention's output is scaled by a gate of its own width."""
        return self.blocks is not None and self.blocks.output_gate

    @property
    def indexer_parameters(self) -> int:
        """Parameters of sparse attention's indexer in one layer; 0 without."""
        indexer = None if self.blocks is None else self.blocks.indexer
        return 0 if indexer is None else indexer.parameters(self.hidden_size)

    @property
    def recurrent_parameters(self) -> int:
        """Parameters of one recurrent mixer; 0 where the model has none."""
        recurrent = None if self.blocks is None else self.blocks.recurrent
        return 0 if recurrent is None else recurrent.parameters(self.hidden_size)

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP: 3 when gated, else 2."""
        return 3 if self.gated_mlp else 2

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense MLP: matrices·h·f and biases."""
        width = self.intermediate_size
        biases = self.mlp_bias * ((self.mlp_matrices - 1) * width + self.hidden_size)
        return self.mlp_matrices * self.hidden_size * width + biases

    @property
    def expert_parameters(self) -> int:
        """Parameters of ONE routed expert; 0 for a dense model."""
        if self.moe is None:
            return 0
        width = self.moe.expert_intermediate_size
        biases = self.moe.expert_bias * ((self.mlp_matrices - 1) * width + self.expert_hidden_size)
        return self.mlp_matrices * self.expert_hidden_size * width + biases

    @property
    def expert_hidden_size(self) -> int:
        """Width of the tokens that experts receive and return: h, or the latent width."""
        return self.hidden_size if self.moe is None else self.moe.latent_size or self.hidden_size

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of the shared experts of one MoE layer together, and of their gate."""
        if self.moe is None:
            return 0
        width = self.mlp_matrices * self.moe.shared_intermediate_size + self.moe.shared_expert_gate
        return self.hidden_size * width

    @property
    def router_parameters(self) -> int:
        """Parameters of one router: h·E (and its bias), and of the projections to and from a latent width."""
        if self.moe is None:
            return 0
        projections = 2 * self.hidden_size * (self.moe.latent_size or 0)
        return self.hidden_size * self.moe.num_experts + self.moe.expert_bias * self.moe.num_experts + projections

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over h: weight and bias, as far as it has them."""
        return self.hidden_size * (self.norm_weight + self.norm_bias)

    @property
    def norm_parameters_per_layer(self) -> int:
        """Parameters of the norms over h in one layer."""
        return self.norms_per_layer * self.norm_parameters

    @property
    def norms_per_block(self) -> float:
        """Norms over h of one of a layer's two blocks, attention or MLP: one before it, in Gemma 2 and 3 one behind it.

        A norm that both blocks share is run once and read by both; a decoder's third norm is its cross-attention's.
        """
        return 1.0 if self.encoder is not None else max(self.norms_per_layer / 2.0, 1.0)

    def layer_parameters(self, layer: int) -> int:
        """All parameters of one layer, every expert included."""
        common = self.norm_parameters_per_layer + self.layer_attention_parameters(layer)
        common += self.has_recurrent(layer) * self.recurrent_parameters + self.cross_attention_parameters
        if self.moe is None or not self.is_moe_layer(layer):
            return common + self.has_mlp(layer) * self.dense_mlp_parameters
        experts = self.moe.num_experts * self.expert_parameters
        return common + experts + self.shared_expert_parameters + self.router_parameters

    @property
    def embedding_parameters(self) -> int:
        """Input embedding: V·h, learned positions and token types; V·e + e·h where it is e wide (OPT-350M); what reads
        sound in an encoder of audio.
        """
        positions = (self.num_position_embeddings + self.num_token_types) * self.hidden_size
        positions += 0 if self.audio is None else self.audio.parameters(self.hidden_size)
        if self.word_embedding_size is None:
            return self.vocab_size * self.hidden_size + positions
        return (self.vocab_size + self.hidden_size) * self.word_embedding_size + positions

    @property
    def lm_head_parameters(self) -> int:
        """Output projection V·h and its bias, without the matrix where it is tied; or the layers of a pooled answer."""
        if self.pooling is not None:
            return self.pooling.parameters(self.hidden_size)
        width = self.hidden_size if self.word_embedding_size is None else self.word_embedding_size
        narrowing = 0 if self.word_embedding_size is None else self.hidden_size * width
        matrix = 0 if self.tie_word_embeddings else self.vocab_size * width
        return matrix + narrowing + self.lm_head_bias * self.vocab_size

    @property
    def output_columns(self) -> int:
        """Columns of the last product of each answer: V of the LM head, or those of a pooled answer."""
        return self.vocab_size if self.pooling is None else self.pooling.columns(self.hidden_size)

    @property
    def num_parameters(self) -> int:
        """All parameters, the encoder's included, without multi-token-prediction layers (as publishers count)."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_hidden_layers))
        norms = self.num_outer_norms * self.norm_parameters + self.position_bias_parameters
        encoder = 0 if self.encoder is None else self.encoder.num_parameters
        return layers + self.embedding_parameters + self.lm_head_parameters + norms + encoder

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts it does not visit."""
        if self.moe is None:
            return self.num_parameters
        idle = (self.moe.num_experts - self.moe.num_experts_per_token) * self.expert_parameters
        return self.num_parameters - idle * self.num_moe_layers

    @property
    def nextn_layer_parameters(self) -> int:
        """Parameters of ONE multi-token-prediction layer, embedding and LM head shared with the model.

        :attr:`predicting_layers`, a projection of the concatenated (embedding, hidden state) from 2h to h, and three
        norms (DeepSeek-V3, arXiv:2412.19437, §2.2). 0 where the model has none.
        """
        if not self.num_nextn_predict_layers:
            return 0
        projection = 2 * self.hidden_size * self.hidden_size
        like = sum(self.layer_parameters(layer) for layer in self.predicting_layers)
        return like + projection + 3 * self.norm_parameters

    @property
    def predicting_layers(self) -> tuple[int, ...]:
        """The layers that one multi-token-prediction layer is like: the last one; where layers are single blocks, the
        last of attention and the last of experts or an MLP (Nemotron 3, ``mtp_layers_block_type`` in its config).
        """
        blocks, last = self.blocks, self.num_hidden_layers - 1
        if blocks is None:
            return (last,)
        mixes = [blocks.has_attention(at) or blocks.has_recurrent(at) for at in range(last + 1)]
        attention = [at for at in range(last + 1) if blocks.has_attention(at) and not blocks.has_mlp[at]]
        feed_forward = [at for at in range(last + 1) if blocks.has_mlp[at] and not mixes[at]]
        return (*attention[-1:], *feed_forward[-1:]) or (last,)
