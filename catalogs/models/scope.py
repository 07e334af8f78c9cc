"""Which configurations meshplan reads: those of decoder-only transformers, found also inside multimodal models, of
text encoders, and of the encoder-decoders of :mod:`.encoder_decoder`.

Vision and speech encoders, other encoder-decoders, diffusion models and models without any attention are rejected by
name, and so are transformers with parts that :class:`meshplan.catalogs.models.shapes.ModelShape` cannot represent
faithfully: an estimate of them would be wrong without a sign of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.encoder_decoder import FAMILIES as ENCODER_DECODERS
from meshplan.catalogs.models.families.encoders import ENCODERS
from meshplan.catalogs.models.fields import FIELDS, shorten

TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which multimodal configurations keep their language model (Gemma 3, Llama 4; InternVL; DeepSeek-VL2)."""

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")

_OTHER_MODELS: Mapping[str, tuple[str, ...]] = {
    f"a text encoder of a family that is not read yet (read are {', '.join(ENCODERS)})": (
        *("albert", "bert-generation", "big_bird", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "esm", "longformer", "megatron-bert", "mpnet", "reformer", "rembert", "roberta-prelayernorm"),
        *("roc_bert", "roformer", "xlm", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    f"an encoder-decoder of a family that is not read yet (read are {', '.join(ENCODER_DECODERS)})": (
        *("bart", "bigbird_pegasus", "blenderbot", "led", "m2m_100", "marian", "mbart", "mvp", "pegasus"),
        *("speech_to_text", "t5gemma", "trocr", "vision-encoder-decoder"),
    ),
    "a vision, audio or image-text encoder": (
        *("beit", "blip", "clap", "clip", "convnext", "convnextv2", "deit", "detr", "dinov2", "encodec", "hubert"),
        *("mobilenet_v1", "mobilenet_v2", "regnet", "resnet", "sam", "segformer", "siglip", "swin", "swinv2", "vit"),
        *("timm_wrapper", "wav2vec2", "yolos"),
    ),
    "a state-space or recurrent model": (
        *("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"),
    ),
    "a hybrid of attention with recurrent layers that share or repeat their weights, not supported yet": (
        *("bailing_hybrid", "zamba", "zamba2"),
    ),
    "not supported yet: its layers hold more than attention and one MLP or MoE block": (
        *("arctic", "blt", "doge", "gemma3n", "hrm_text", "jetmoe", "longcat_flash", "mllama", "moshi"),
    ),
}
_REASONS = {model_type: reason for reason, types in _OTHER_MODELS.items() for model_type in types}

_FAMILY_PARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention that compresses several tokens into one entry": (
        ("compress_ratios", "compress_rates"),
        ("deepseek_v4",),
    ),
    "heads that differ between full attention and windows": (
        ("global_head_dim", "swa_num_key_value_heads", "swa_head_dim"),
        ("gemma4", "mimo_v2_flash"),
    ),
}
"""Parts that only some families' readers know: in another family's configuration nothing would count them."""

_FOREIGN_PARTS: Mapping[str, tuple[str, ...]] = {
    "state-space layers without heads (Mamba alone)": ("ssm_cfg", "state_size"),
    "recurrent layers of Griffin (RG-LRU)": ("block_types", "lru_width"),
    "experts without weights (LongCat)": ("zero_expert_num",),
    "cross-attention layers": ("cross_attention_layers",),
    "inputs of their own for each layer (Gemma 3n, Gemma 4 E2B and E4B)": ("hidden_size_per_layer_input",),
    "layers that share the keys of others": ("num_kv_shared_layers",),
    "layers of unlike widths, one by one (Nemotron NAS)": ("block_configs",),
    "attention over the outputs of earlier layers (Kimi K3)": ("attn_res_block_size",),
    "numbers of heads that differ by layer (Step 3.5, 3.7)": (
        "num_attention_heads_per_layer",
        "attention_other_setting",
    ),
}


UNREAD_CHECKPOINTS: Mapping[str, str] = {
    "google/gemma-3n": "inputs of their own for each layer",
    "google/gemma-4-e": "inputs of their own for each layer",
    "meta-llama/llama-3.2-11b-vision": "cross-attention layers",
    "meta-llama/llama-3.2-90b-vision": "cross-attention layers",
    "moonshotai/kimi-k3": "attention over the outputs of earlier layers",
    "nvidia/llama-3_1-nemotron-ultra": "layers of unlike widths, one by one",
    "nvidia/llama-3_3-nemotron-super": "layers of unlike widths, one by one",
    "stepfun-ai/step-3": "numbers of heads that differ by layer",
}
"""Beginnings of Hugging Face ids, lower case, whose configurations are refused, and the part that no shape holds."""


def why_unread(model: str) -> str:
    """The part of a well-known checkpoint that is not supported yet; empty where the id is of none.

    >>> why_unread("moonshotai/Kimi-K3")
    'attention over the outputs of earlier layers'
    """
    written = model.lower()
    return next((part for start, part in UNREAD_CHECKPOINTS.items() if written.startswith(start)), "")


def language_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a configuration that describes the language model: itself, or the section that holds it.

    ``model_type`` and ``tie_word_embeddings`` are taken from outside where the section does not say.
    """
    section = config
    for _ in range(len(TEXT_SECTIONS)):
        nested = next((part for key in TEXT_SECTIONS if isinstance(part := section.get(key), Mapping)), None)
        if nested is None or (_states_sizes(section) and not _states_sizes(nested)):
            break
        outer = {key: section[key] for key in ("model_type", "tie_word_embeddings") if section.get(key) is not None}
        section = outer | {str(key): value for key, value in nested.items()}
    return section


def scope_problems(config: Mapping[str, object], section: Mapping[str, object]) -> Iterator[Problem]:
    """Why a configuration is not that of a decoder-only transformer or text encoder that a shape can represent.

    Args:
        config: the whole configuration.
        section: its :func:`language_section`.
    """
    if "_diffusers_version" in config or "_class_name" in config:
        yield Problem(path="", message=f"a diffusers component ({shorten(config.get('_class_name'))})")
    stated = (part.get("model_type") for part in (config, section))
    for model_type in dict.fromkeys(name for name in stated if isinstance(name, str)):
        reason = _REASONS.get(model_type.removesuffix("_model").removesuffix("_text"))
        if reason is not None:
            yield Problem(path="model_type", message=f"{shorten(model_type)} is {reason}")
    architectures = config.get("architectures")
    if (
        str(section.get("model_type")) not in ENCODERS
        and isinstance(architectures, list)
        and any(isinstance(name, str) and name.endswith("ForMaskedLM") for name in architectures)
    ):
        yield Problem(path="architectures", message=f"a masked language model (read are {', '.join(ENCODERS)})")
    if "image_size" in section and not _states(section, "vocab_size"):
        yield Problem(path="image_size", message="a vision model: it has no vocabulary")
    if config.get("is_encoder_decoder") is True:
        yield Problem(path="is_encoder_decoder", message="true: an encoder-decoder")
    if not any(_states(section, name) for name in _SIZES):
        seen = ", ".join(sorted(str(key) for key in config)[:8]) or "none"
        yield Problem(path="", message=f"states none of {', '.join(_SIZES)} (keys seen: {seen})")
    yield from _part_problems(section)


def _part_problems(section: Mapping[str, object]) -> Iterator[Problem]:
    """Parts that no shape holds, or that only other families' readers know."""
    for part, keys in _FOREIGN_PARTS.items():
        present = [key for key in keys if section.get(key) not in (None, False, 0, [], {}, "")]
        if present:
            yield Problem(path=present[0], message=f"not supported yet: {part}")
    family = str(section.get("model_type", "")).removesuffix("_text")
    for part, (keys, readers) in _FAMILY_PARTS.items():
        present = [key for key in keys if section.get(key) not in (None, [], {})]
        if present and family not in readers:
            yield Problem(
                path=present[0],
                message=f"{part} are read for {', '.join(readers)} only; model_type is {shorten(family)}",
            )


def _states_sizes(config: Mapping[str, object]) -> bool:
    return any(_states(config, name) for name in _SIZES)


def _states(config: Mapping[str, object], name: str) -> bool:
    return any(config.get(key) is not None for key in FIELDS[name].keys)
