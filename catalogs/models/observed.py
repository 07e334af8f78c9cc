"""Reads the ``model`` object of a published measurement into a shape.

Measurements state a model by a few Hugging Face keys and seldom by its ``model_type``. What they leave open follows
from the one thing that they all state: a gated MLP means Llama's rules (no biases, RMSNorm, untied), a plain one
means those of Megatron's GPT (biases, LayerNorm, tied embedding). gpt-oss is known by its name, as are the groups of
experts of DeepSeek's models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.config import build_shape, config_error
from meshplan.catalogs.models.families.facts import PLAIN
from meshplan.catalogs.models.families.registry import FAMILIES, GENERIC
from meshplan.catalogs.models.fields import FIELDS, shorten
from meshplan.catalogs.models.scope import language_section, scope_problems
from meshplan.catalogs.models.shapes import ModelShape

ASSUMED_VOCAB_SIZE = 32_000
"""Where a measurement states none (Zero Bubble, arXiv:2401.10241, Table 3): with one matrix of that many rows the four
models count 1.5, 6.2, 14.6 and 28.3 billion parameters, as they are named; with 51,200 rows the last three do not."""

# Groups of experts and how many of them a token visits, by name and published number of experts: ``n_group`` and
# ``topk_group`` of config.json, as NeMo's, Megatron-Bridge's and AutoModel's runs of these models take them.
_EXPERT_GROUPS = {("deepseekv2", 160): (8, 3), ("deepseekv3", 256): (8, 4), ("deepseekr1", 256): (8, 4)}

_MAX_LAYERS = FIELDS["num_hidden_layers"].at_most
_GATED = dataclasses.replace(GENERIC, gated_mlp=True)
_PLAIN = dataclasses.replace(PLAIN, mlp_ratio=4)


def shape_from_observation(model: Mapping[str, object]) -> ModelShape:
    """The shape of an observed model.

    Args:
        model: ``name``, Hugging Face keys, ``gated_mlp``, and where they apply ``attention_type`` = ``mla``,
            ``layer_type_counts`` (kind of layer → number, evenly mixed) and ``num_parameters``.

    Raises:
        ModelConfigError: with every problem found, among them layers that a shape cannot represent.
    """
    name = str(model.get("name") or "observed model")
    gated = model.get("gated_mlp", True)
    problems = list(scope_problems(model, language_section(model)))
    if not isinstance(gated, bool):
        problems.append(Problem(path="gated_mlp", message=f"must be true or false, is {shorten(gated)}"))
    if model.get("attention_type") not in (None, "mla", "mha", "gqa", "mqa"):
        problems.append(
            Problem(path="attention_type", message=f"{shorten(model['attention_type'])} is not supported yet")
        )
    if problems:
        raise config_error(name, problems)
    config = {"vocab_size": ASSUMED_VOCAB_SIZE} | {key: value for key, value in model.items() if value is not None}
    config = _known_groups(config, name) | config
    if "layer_type_counts" in config:
        config["layer_types"] = _mixed_layers(config["layer_type_counts"], name)
    slug = name.lower().replace(" ", "-")
    family_name = _family_name(config, slug)
    family = FAMILIES[family_name] if family_name else _GATED if gated else _PLAIN
    shape = build_shape(
        config,
        family,
        family_name=family_name,
        slug=slug,
        name=name,
        source=str(model.get("architecture_source", "")),
    )
    return _with_stated_parameters(shape, model.get("num_parameters"))


def _known_groups(config: Mapping[str, object], name: str) -> dict[str, object]:
    """``n_group`` and ``topk_group`` of a model that has its published number of experts.

    >>> _known_groups({"num_experts": 256}, "deepseek-ai/DeepSeek-V3 (w/o MTP)")
    {'n_group': 8, 'topk_group': 4}
    """
    letters = name.lower().replace("-", "").replace(" ", "")
    experts = next((config[key] for key in FIELDS["num_experts"].keys if key in config), None)
    for (known, number), (groups, chosen) in _EXPERT_GROUPS.items():
        if known in letters and experts == number:
            return {"n_group": groups, "topk_group": chosen}
    return {}


def _family_name(config: Mapping[str, object], slug: str) -> str:
    """The family whose facts stand in no key of a measurement, known by name or by its keys; else empty."""
    if "gpt-oss" in slug:  # experts with biases, attention sinks
        return "gpt_oss"
    if "linear_num_value_heads" in config:  # output gate, norms of queries and keys
        return "qwen3_next"
    return "nemotron_h" if "mamba_num_heads" in config else ""  # one norm and one block a layer


def _mixed_layers(counts: object, name: str) -> list[str]:
    """``layer_types`` from ``{kind: number}``: each kind spread evenly, the rarest (full attention) last in its group.

    >>> _mixed_layers({"full_attention": 1, "sliding_attention": 3}, "gemma")
    ['sliding_attention', 'sliding_attention', 'sliding_attention', 'full_attention']
    """
    if not isinstance(counts, Mapping) or not all(
        isinstance(number, int) and 0 <= number <= _MAX_LAYERS for number in counts.values()
    ):
        message = f"must map each kind of layer to a number of layers, is {shorten(counts)}"
        raise config_error(name, [Problem(path="layer_type_counts", message=message)])
    # The i-th of m layers of a kind takes the place (i + 1) / m, so that all kinds end together and fill up evenly.
    places = [
        ((index + 1) / number, -number, kind == "full_attention", str(kind))
        for kind, number in counts.items()
        for index in range(number)
    ]
    return [kind for *_, kind in sorted(places)]


def _with_stated_parameters(shape: ModelShape, num_parameters: object) -> ModelShape:
    """A GPT shape with the learned positions that its stated parameter count implies.

    Positions are the only part that measurements do not state and that adds whole rows of h; llm-foundry makes one a
    token of context, 29 % of MPT-125M at 65,536 tokens.
    """
    if shape.gated_mlp or isinstance(num_parameters, bool) or not isinstance(num_parameters, int):
        return shape
    rows, remainder = divmod(num_parameters - shape.num_parameters, shape.hidden_size)
    if remainder or not 0 < rows <= FIELDS["num_position_embeddings"].at_most:
        return shape
    return dataclasses.replace(shape, num_position_embeddings=rows)
