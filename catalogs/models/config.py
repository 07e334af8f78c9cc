"""Reads a Hugging Face ``config.json`` into a :class:`~meshplan.catalogs.models.shapes.ModelShape`.

Order of reading: the language model's section (:mod:`.scope`), the facts and spelling of its family
(:mod:`.families`), the values (:mod:`.fields`), and then what must hold between them. Unknown
keys are ignored, an unknown ``model_type`` is read by Llama's rules, and every problem is in one
:class:`~meshplan.catalogs.errors.ModelConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshplan.catalogs.errors import ModelConfigError, Problem, why
from meshplan.catalogs.models.attention import AttentionKind, LatentAttention
from meshplan.catalogs.models.encoder_decoder import is_encoder_decoder, read_encoder_decoder
from meshplan.catalogs.models.families.facts import Family, Switch
from meshplan.catalogs.models.families.registry import family_of
from meshplan.catalogs.models.fields import FIELDS, ConfigFields, shorten
from meshplan.catalogs.models.layers.assignment import moe_layers, sliding_windows
from meshplan.catalogs.models.layers.blocks import ATTENTION_WORDS, layer_blocks, layer_words
from meshplan.catalogs.models.pooling import pooled
from meshplan.catalogs.models.scope import language_section, scope_problems
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.catalogs.models.vision import vision_tower
from meshplan.catalogs.untrusted.documents import parse

if TYPE_CHECKING:
    from meshplan.catalogs.models.stored_formats import StoredFormats

CONFIG_FILE, QUANTIZATION_FILE = "config.json", "hf_quant_config.json"
MAX_CONFIG_BYTES = 8 * 2**20  # published configurations stay below 1 MiB, those with quantisation tables included

_LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TWO_MATRIX_ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "relu", "relu2", "xielu")


def read_config(path: Path, *, name: str = "") -> ModelShape:
    """The shape described by a ``config.json``, or by the folder that holds one.

    Args:
        path: the file or the folder.
        name: of the model; empty: the folder's (the file's, where it is not called ``config.json``).

    Raises:
        ModelConfigError: the file is missing, too large, not JSON, or not that of a decoder-only transformer.
    """
    file, content = _read_bounded(path)
    name = name or (file.resolve().parent.name if file.name == CONFIG_FILE else file.stem)
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"
    return shape_from_config(parse_config(file, content), slug=slug, name=name, source=str(path))


def read_formats(path: Path, shape: ModelShape, problems: list[Problem]) -> StoredFormats | None:
    """The formats in which the checkpoint of a ``config.json`` (or of its folder) is stored; None where it says none.

    They stand in its ``quantization_config``, or in an ``hf_quant_config.json`` beside it (modelopt).

    Raises:
        ModelConfigError: a file cannot be read.
    """
    # start-up: most models are planned in the format that the question states
    from meshplan.catalogs.models.stored_formats import stored_formats

    file, content = _read_bounded(path)
    stated = stored_formats(parse_config(file, content), shape, problems)
    beside = file.with_name(QUANTIZATION_FILE)
    if stated is not None or problems or not beside.is_file():
        return stated
    return stored_formats(parse_config(*_read_bounded(beside)), shape, problems)


def _read_bounded(path: Path) -> tuple[Path, bytes]:
    """The configuration file that a path means, and its content."""
    try:
        file = path / CONFIG_FILE if path.is_dir() else path
        if not file.is_file():  # also refuses pipes and devices, which may never end
            raise ModelConfigError(
                f"no model configuration at {file}: give a {CONFIG_FILE} or the folder that holds it"
            )
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise ModelConfigError(f"cannot read {str(path)!r}: {why(error)}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes: not a model configuration")
    return file, content


def parse_config(file: Path, content: bytes) -> Mapping[str, object]:
    """The JSON object that a configuration file or an answer holds.

    Raises:
        ModelConfigError: it is none.
    """
    try:
        config = parse(content.decode("utf-8-sig"), is_json=True, name=str(file), reads_infinity=True)
    except ValueError as error:
        raise ModelConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file} must hold a JSON object, holds {shorten(config)}")
    return config


def shape_from_config(config: Mapping[str, object], *, slug: str, name: str = "", source: str = "") -> ModelShape:
    """The shape of a Hugging Face configuration.

    Args:
        config: the parsed ``config.json``; keys that do not matter may be left out.
        slug: catalog name.
        name: as the publisher writes it; the slug where empty.
        source: citation of the configuration.

    Raises:
        ModelConfigError: with every problem found.
    """
    if is_encoder_decoder(config):
        found, fields = read_encoder_decoder(config, slug=slug, name=name, source=source)
        if fields.problems:
            raise config_error(slug, fields.problems)
        return found
    section = language_section(config)
    problems = list(scope_problems(config, section))
    if problems:
        raise config_error(slug, problems)
    model_type = section.get("model_type", "")
    if not isinstance(model_type, str):
        raise config_error(slug, [Problem(path="model_type", message=f"must be text, is {shorten(model_type)}")])
    shape = build_shape(section, family_of(model_type), family_name=model_type, slug=slug, name=name, source=source)
    vision = vision_tower(config, shape.hidden_size, problems)
    if problems:
        raise config_error(slug, problems)
    return shape if vision is None else replace(shape, vision=vision)


def config_error(slug: str, problems: list[Problem]) -> ModelConfigError:
    """One error that lists every problem of a configuration, each once (two sizes may come from one key)."""
    lines = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
    return ModelConfigError(
        f"model configuration {slug!r} does not describe a transformer that can be planned:\n{lines}"
    )


def build_shape(
    config: Mapping[str, object], family: Family, *, family_name: str, slug: str, name: str, source: str
) -> ModelShape:
    """The shape of a language model's section, read by the rules of ``family``.

    Raises:
        ModelConfigError: with every problem found.
    """
    fields = ConfigFields(family.dialect(config), family.defaults)
    num_layers, hidden = fields.required("num_hidden_layers"), fields.required("hidden_size")
    num_heads, vocab_size = fields.required("num_attention_heads"), fields.required("vocab_size")
    latent = _latent_attention(fields)
    words = layer_words(fields, family, num_layers)
    moe = _mixture_of_experts(fields, family, num_layers, words)
    num_kv_heads = num_heads if latent else fields.with_default("num_key_value_heads", num_heads)
    context = fields.optional("max_sequence_length")
    shape = ModelShape(
        slug=slug,
        name=name or slug,
        family=family_name,
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_dense_width(fields, family, moe, hidden),
        gated_mlp=_gated_mlp(fields, family),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(fields, family, latent, hidden, num_heads),
        vocab_size=vocab_size,
        tie_word_embeddings=_tied(fields, family),
        attention=AttentionKind.MULTI_HEAD_LATENT if latent else AttentionKind.GROUPED_QUERY,
        latent=latent,
        moe=moe,
        blocks=layer_blocks(fields, family, words or (ATTENTION_WORDS[0],) * num_layers, hidden),
        sliding_windows=sliding_windows(fields, family.sliding, num_layers, words),
        num_position_embeddings=_learned_positions(fields, family, context),
        max_sequence_length=context,
        attention_bias=fields.switch(family.query_bias),
        attention_output_bias=fields.switch(family.output_bias),
        attention_sinks=family.attention_sinks,
        mlp_bias=fields.switch(family.mlp_bias),
        lm_head_bias=fields.switch(family.lm_head_bias),
        norm_weight=family.norm_weight,
        norm_bias=fields.switch(family.norm_bias),
        norms_per_layer=fields.with_default("norms_per_layer", family.norms_per_layer),
        num_outer_norms=fields.with_default("num_outer_norms", family.num_outer_norms),
        qk_norm=fields.switch(family.qk_norm),
        qk_norm_full_width=family.qk_norm_full_width,
        num_token_types=fields.with_default("num_token_types", 0) if family.is_encoder else 0,
        bidirectional=fields.switch(family.bidirectional),
        pooling=pooled(config, is_encoder=family.is_encoder, has_pooler=family.has_pooler),
        word_embedding_size=fields.optional("word_embedding_size"),
        num_nextn_predict_layers=fields.with_default("num_nextn_predict_layers", 0),
        source=source,
    )
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        fields.report(
            FIELDS["num_key_value_heads"].keys[0], f"{num_kv_heads} does not divide {num_heads} attention heads"
        )
    if fields.problems:
        raise config_error(slug, fields.problems)
    return shape


def _tied(fields: ConfigFields, family: Family) -> bool:
    return fields.switch(Switch(default=family.tie_word_embeddings, key="tie_word_embeddings"))


def _gated_mlp(fields: ConfigFields, family: Family) -> bool:
    """Family's rule; for an unknown family, that of its activation (SiLU gates, GELU and ReLU do not)."""
    if family.gated_mlp is not None:
        return family.gated_mlp
    return fields.config.get("hidden_act") not in _TWO_MATRIX_ACTIVATIONS


def _learned_positions(fields: ConfigFields, family: Family, context: int | None) -> int:
    """Rows of a learned position table: the context and the family's offset (OPT keeps 2 for padding)."""
    stated = fields.optional("num_position_embeddings")
    if stated is not None or family.position_offset is None:
        return stated or 0
    if context is None:
        fields.report("max_position_embeddings", "missing (its positions are learned, one row a token of context)")
        return 0
    return context + family.position_offset


def _head_dim(fields: ConfigFields, family: Family, latent: LatentAttention | None, hidden: int, num_heads: int) -> int:
    """d: stated, the family's, or h / a."""
    if latent is not None:
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim
    stated = fields.optional("head_dim") or family.head_dim
    if stated is not None:
        return stated
    if num_heads and hidden % num_heads:
        fields.report(
            "hidden_size", f"{hidden} is not divisible by {num_heads} attention heads, and no head_dim is given"
        )
    return hidden // num_heads if num_heads else 0


def _latent_attention(fields: ConfigFields) -> LatentAttention | None:
    """Multi-head latent attention, where the configuration states a key/value rank."""
    if fields.optional("kv_lora_rank") is None:
        return None
    sizes = {name: fields.required(name) for name in _LATENT_FIELDS}
    return LatentAttention(q_lora_rank=fields.optional("q_lora_rank"), **sizes)


def _dense_width(fields: ConfigFields, family: Family, moe: MixtureOfExperts | None, hidden: int) -> int:
    """Width of the dense MLP: required unless the family has a ratio or every layer routes to experts."""
    if family.mlp_ratio is not None:
        return fields.with_default("intermediate_size", family.mlp_ratio * hidden)
    if moe is not None and all(moe.moe_layers):
        return fields.with_default("intermediate_size", 0)
    return fields.required("intermediate_size")


def _mixture_of_experts(
    fields: ConfigFields, family: Family, num_layers: int, words: tuple[str, ...]
) -> MixtureOfExperts | None:
    """The expert part; None where the configuration states no experts, or a single one."""
    num_experts = fields.with_default("num_experts", 0)
    if num_experts <= 1:
        return None
    top_k = fields.required("num_experts_per_tok")
    if top_k > num_experts:
        fields.report(
            FIELDS["num_experts_per_tok"].keys[0], f"{top_k} is more than the {num_experts} experts there are"
        )
    groups, groups_per_token = _expert_groups(fields, num_experts, top_k)
    width = fields.optional("moe_intermediate_size") or fields.required("intermediate_size")
    shared = fields.optional("shared_intermediate_size")
    if shared is None:
        shared = fields.with_default("n_shared_experts", 0) * width
    return MixtureOfExperts(
        num_experts=num_experts,
        num_experts_per_token=top_k,
        expert_intermediate_size=width,
        shared_intermediate_size=shared,
        moe_layers=moe_layers(fields, num_layers, words),
        expert_bias=family.expert_bias,
        shared_expert_gate=family.shared_expert_gate and shared > 0,
        latent_size=fields.optional("moe_latent_size"),
        num_expert_groups=groups,
        num_groups_per_token=groups_per_token,
    )


def _expert_groups(fields: ConfigFields, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may visit; 1 and 1 where its choice is free.

    DeepSeek-V2 says by ``topk_method`` whether the groups count (``greedy``: no); later models have no other router.
    """
    groups = fields.with_default("expert_groups", 1)
    chosen = fields.with_default("groups_per_token", groups)
    if groups == chosen or fields.config.get("topk_method") == "greedy":
        return 1, 1
    if chosen > groups:
        fields.report("topk_group", f"{chosen} is more than the {groups} groups of experts there are")
    elif num_experts % groups:
        fields.report("n_group", f"{num_experts} experts are not divisible into {groups} equal groups")
    elif top_k > chosen * (num_experts // groups):
        fields.report(
            "topk_group",
            f"{chosen} groups of {num_experts // groups} experts are fewer than the {top_k} a token visits",
        )
    return groups, chosen
