"""Which format each part of a checkpoint is stored in, from its ``quantization_config``.

Tools write it in their own ways (AWQ, GPTQ, compressed-tensors, fp8 with blocks, mxfp4, modelopt): one format for all
linear layers, a list of exceptions, groups of layers, or a format for each layer. All are read into rules "names that
match → format", and a checkpoint's parts are asked by the names of their matrices, layer by layer. Modules are named
unlike in every family; names are compared from ``layers.`` on, with the words of :data:`_SAME`.

A part whose matrices differ (a first layer left in 16 bits) has the format of most of its parameters, and says what
share of them differs.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.fields import shorten
from meshplan.catalogs.models.shapes import ModelShape

WIDE = "bf16"
MOST_RULES = 200_000  # a rule for each expert's matrices of the largest published checkpoint are 45,000
MOST_PATTERN, MOST_REPEATS = 300, 4  # published ones have fewer than 100 characters and two repetitions
FOUR_BITS, EIGHT_BITS = 4, 8

Matches = Callable[[str], bool]

# Names that publishers give the parts of a layer → the common ones. Nemotron-H calls all of them mixer.
_SAME = (
    (re.compile(r"\.(linear_attn|attn|attention|temporal_block)\b"), ".self_attn"),
    (re.compile(r"\.(ffn|feed_forward|block_sparse_moe|moe)\b"), ".mlp"),
    (re.compile(r"\.mlp\.shared_expert\b"), ".mlp.shared_experts"),
    (re.compile(r"\.mixer\.(experts|shared_experts|up_proj|down_proj)\b"), r".mlp.\1"),
    (re.compile(r"\.mixer\b"), ".self_attn"),
    (re.compile(r"\.w1\b"), ".gate_proj"),
    (re.compile(r"\.w2\b"), ".down_proj"),
    (re.compile(r"\.w3\b"), ".up_proj"),
)
_MX_GROUP = 32  # values that share a scale in the formats of OCP Microscaling 1.0
_WEIGHT_ONLY = ("awq", "gptq", "auto-round", "intel/auto-round", "gptq_marlin", "awq_marlin")
# modelopt's algorithms, as its releases write them into quantization_config and hf_quant_config.json.
_MODELOPT: Mapping[str, str] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "w4a16",
    "W4A16_AWQ": "w4a16",
    "W4A8_AWQ": "w4a16",
    "W8A16": "w8a16",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "MXFP4": "mxfp4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormats:
    """Formats of a checkpoint, by the names that a serving spec gives them.

    Args:
        method: ``quant_method`` or the tool that wrote the configuration.
        attention: of attention projections and recurrent mixers.
        mlp: of dense MLPs and shared experts.
        experts: of routed experts.
        exceptions: part → share of its parameters whose format is another.
    """

    method: str
    attention: str
    mlp: str
    experts: str
    exceptions: Mapping[str, float] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """What it says, in a line."""
        parts = f"attention {self.attention}, MLP {self.mlp}, experts {self.experts}"
        differ = ", ".join(f"{share:.1%} of {part}" for part, share in self.exceptions.items())
        return f"{self.method}: {parts}" + (f"; in other formats: {differ}" if differ else "")


@dataclass(frozen=True, slots=True)
class _Rule:
    matches: Matches
    scheme: str


def stored_formats(config: Mapping[str, object], shape: ModelShape, problems: list[Problem]) -> StoredFormats | None:
    """The formats that a configuration states; None where it states none, or after adding a problem.

    Args:
        config: the whole ``config.json``, or an ``hf_quant_config.json``.
        shape: the model, whose layers are asked.
        problems: what cannot be read is added, with its path.
    """
    section, path = _section(config)
    if section is None:
        return None
    before = len(problems)
    rules = list(_rules(section, path, problems))
    if len(problems) > before:
        return None
    is_uniform = not any(key in section for key in ("config_groups", "quantized_layers", "quant_algo"))
    if is_uniform and config.get("expert_dtype", section.get("expert_dtype")) == "fp4":
        rules.insert(0, _Rule(_matcher("re:mlp.experts"), "mxfp4"))  # DeepSeek-V4: apart from its fp8 section
    parts, exceptions = {}, {}
    for part, matrices in _asked(shape).items():
        found: Counter[str] = Counter()
        for name, parameters in matrices:
            found[_scheme_of(name, rules)] += parameters
        parts[part] = found.most_common(1)[0][0] if found else WIDE
        if differing := found.total() - found[parts[part]]:
            exceptions[part] = differing / found.total()
    method = section.get("quant_method") or _producer(config, section)
    return StoredFormats(
        method=str(method),
        attention=parts["attention"],
        mlp=parts.get("mlp", parts["attention"]),
        experts=parts.get("experts", parts.get("mlp", WIDE)),
        exceptions=exceptions,
    )


def _section(config: Mapping[str, object]) -> tuple[Mapping[str, object] | None, str]:
    """Where the formats are stated, and its path."""
    for key in ("quantization_config", "quantization", "compression_config"):
        if isinstance(section := config.get(key), Mapping) and section:
            return section, key
    text = config.get("text_config")
    if isinstance(text, Mapping) and isinstance(section := text.get("quantization_config"), Mapping) and section:
        return section, "text_config.quantization_config"
    return None, ""


def _producer(config: Mapping[str, object], section: Mapping[str, object]) -> object:
    producer = config.get("producer", section.get("producer"))
    return producer.get("name", "unknown") if isinstance(producer, Mapping) else "unknown"


# --- names ------------------------------------------------------------------------------------------------------------


def _asked(shape: ModelShape) -> dict[str, list[tuple[str, int]]]:
    """Names and parameters of the matrices of each part, layer by layer."""
    asked: dict[str, list[tuple[str, int]]] = {"attention": []}
    experts = "experts" if shape.family.startswith("gemma4") else "mlp.experts"  # beside the MLP there
    for layer in range(shape.num_hidden_layers):
        at = f"layers.{layer}"
        if shape.has_attention(layer):
            asked["attention"] += [(f"{at}.self_attn.{name}", size) for name, size in _attention(shape)]
        if shape.has_recurrent(layer):
            asked["attention"].append((f"{at}.self_attn.out_proj", shape.recurrent_parameters))
        if shape.moe is not None and shape.is_moe_layer(layer):
            routed = shape.moe.num_experts * shape.expert_parameters
            asked.setdefault("experts", []).append((f"{at}.{experts}.0.down_proj", routed))
            if shape.moe.shared_intermediate_size:
                name = "mlp" if shape.family.startswith("gemma4") else "mlp.shared_experts"
                asked.setdefault("mlp", []).append((f"{at}.{name}.down_proj", shape.shared_expert_parameters))
        elif shape.has_mlp(layer):
            asked.setdefault("mlp", []).append((f"{at}.mlp.down_proj", shape.dense_mlp_parameters))
    return asked


def _attention(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """Attention's matrices and their parameters; of other forms than these two the whole by its output projection."""
    h, a = shape.hidden_size, shape.num_attention_heads
    if shape.attention_forms:
        return (("o_proj", shape.attention_parameters),)
    if (latent := shape.latent) is not None:
        query = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        first = latent.q_lora_rank or 0
        queries = (("q_a_proj", h * first), ("q_b_proj", first * a * query)) if first else (("q_proj", h * a * query),)
        return (
            *queries,
            ("kv_a_proj_with_mqa", h * (latent.kv_lora_rank + latent.qk_rope_head_dim)),
            ("kv_b_proj", latent.kv_lora_rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)),
            ("o_proj", a * latent.v_head_dim * h),
        )
    wide, narrow = h * a * shape.head_dim, h * shape.num_key_value_heads * shape.head_dim
    return (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow), ("o_proj", wide))


def _common(name: str) -> str:
    """A module's name in the common words, from ``layers.`` on."""
    start = name.find("layers.")
    return _common_words(name[start:] if start >= 0 else name)


def _common_words(name: str) -> str:
    for pattern, word in _SAME:
        name = pattern.sub(word, name)
    return name


def _spellings(name: str) -> tuple[str, ...]:
    """How publishers write a common name: a regular expression is tried on each, with the usual beginning."""
    whole = f"model.{name}"
    others = (("self_attn", "attn"), ("self_attn", "linear_attn"), ("mlp", "ffn"), ("shared_experts", "shared_expert"))
    return (whole, *(whole.replace(common, other) for common, other in others if common in whole))


def _scheme_of(name: str, rules: list[_Rule]) -> str:
    """The first rule that matches decides; 16 bits where none does."""
    return next((rule.scheme for rule in rules if rule.matches(name)), WIDE)


def _matcher(pattern: str) -> Matches:
    """A module's name, a beginning or part of it, wildcards, or a regular expression (``re:``)."""
    if pattern.startswith("re:"):
        written = re.compile(pattern.removeprefix("re:"))
        return lambda name: any(written.search(spelling) is not None for spelling in _spellings(name))
    plain = _common(pattern)
    if "*" in plain:
        whole = plain if plain.startswith("*") else f"*{plain}"
        return lambda name: fnmatch.fnmatchcase(name, whole) or fnmatch.fnmatchcase(name, f"{whole}.*")
    return lambda name: name == plain or name.startswith(f"{plain}.") or f".{plain}." in f".{name}."


# --- rules ------------------------------------------------------------------------------------------------------------


def _rules(section: Mapping[str, object], path: str, problems: list[Problem]) -> Iterator[_Rule]:
    """The rules of a section, the most special first."""
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    listed, groups = section.get("quantized_layers"), section.get("config_groups")
    # Groups laid over a checkpoint in fp8 (DeepSeek-V4 in nvfp4): what they leave out stays in fp8.
    kept = "fp8_block" if method == "fp8" and isinstance(groups, Mapping) else WIDE
    for pattern in _exceptions(section, path, problems):
        yield _Rule(_matcher(pattern), kept)
    yield from _dynamic(section.get("dynamic"), f"{path}.dynamic", problems)
    if isinstance(listed, Mapping):
        yield from _listed(listed, f"{path}.quantized_layers", problems)
        return
    if isinstance(algorithm, str):
        yield _Rule(_all, _modelopt(algorithm, f"{path}.quant_algo", problems))
    elif isinstance(groups, Mapping):
        for name, group in groups.items():
            yield from _group(group, f"{path}.config_groups.{name}", problems)
    else:
        yield _Rule(_all, _whole(section, method, path, problems))


def _all(name: str) -> bool:
    del name
    return True


def _exceptions(section: Mapping[str, object], path: str, problems: list[Problem]) -> Iterator[str]:
    """Modules that are left in 16 bits, by the key of each tool."""
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "llm_int8_skip_modules"):
        patterns = section.get(key)
        if patterns is None:
            continue
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            problems.append(Problem(path=f"{path}.{key}", message=f"must list names, is {shorten(patterns)}"))
            continue
        for index, pattern in enumerate(patterns[:MOST_RULES]):
            if _names_layers(pattern) and _is_sound(pattern, f"{path}.{key}[{index}]", problems):
                yield pattern


def _is_sound(pattern: str, path: str, problems: list[Problem]) -> bool:
    """Whether a pattern is short, and, where it is a regular expression, one that ends soon on every name."""
    expression = pattern.removeprefix("re:")
    repeats = len(re.findall(r"[*+{]", expression)) if pattern.startswith("re:") else 0
    nested = re.search(r"\)[*+{?]", expression) is not None and repeats > 0
    try:
        re.compile(expression if pattern.startswith("re:") else "")
    except re.error as error:
        problems.append(Problem(path=path, message=f"{shorten(pattern)} is no regular expression: {error}"))
        return False
    if len(pattern) > MOST_PATTERN or repeats > MOST_REPEATS or nested:
        limits = f"at most {MOST_PATTERN} characters and {MOST_REPEATS} repetitions, none of a group"
        problems.append(Problem(path=path, message=f"{shorten(pattern)} is too complicated to be matched ({limits})"))
        return False
    return True


def _names_layers(pattern: str) -> bool:
    """Whether a pattern can mean a matrix of a layer; norms, routers, heads and encoders hold no asked name."""
    return not re.search(r"(norm|\.gate|router|lm_head|^head|embed|vision|visual|mtp|conv1d|bias)", pattern)


def _dynamic(dynamic: object, path: str, problems: list[Problem]) -> Iterator[_Rule]:
    """GPTQModel's exceptions: ``-:PATTERN`` is not quantised, ``PATTERN`` or ``+:PATTERN`` has bits of its own."""
    for pattern, change in dynamic.items() if isinstance(dynamic, Mapping) else ():
        sign, _, expression = str(pattern).rpartition(":")
        bits = change.get("bits") if isinstance(change, Mapping) else None
        if _is_sound(f"re:{expression}", f"{path}.{shorten(pattern)}", problems):
            narrow = "w8a16" if bits == EIGHT_BITS else "w4a16"
            yield _Rule(_matcher(f"re:{expression}"), WIDE if sign == "-" else narrow)


def _listed(listed: Mapping[object, object], path: str, problems: list[Problem]) -> Iterator[_Rule]:
    """Modelopt's mixed precision: a format for each layer that is quantised, 16 bits for the rest."""
    exact: dict[str, str] = {}
    for name, entry in list(listed.items())[:MOST_RULES]:
        algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else None
        exact[_common(str(name))] = _modelopt(str(algorithm), f"{path}.{name}.quant_algo", problems)
        if problems:
            return
    for scheme in dict.fromkeys(exact.values()):
        names = frozenset(name for name, held in exact.items() if held == scheme)
        yield _Rule(_holds(names), scheme)
    yield _Rule(_all, WIDE)


def _holds(names: frozenset[str]) -> Matches:
    """Whether a name, or a module that holds it, is among ``names``."""

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in names for length in range(len(parts), 1, -1))

    return matches


def _group(group: object, path: str, problems: list[Problem]) -> Iterator[_Rule]:
    """A group of compressed-tensors or modelopt: bits of weights and of inputs, and the layers it holds for."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        problems.append(Problem(path=f"{path}.weights", message=f"must state num_bits and type, is {shorten(weights)}"))
        return
    inputs = group.get("input_activations")
    scheme = _bits_scheme(weights, inputs if isinstance(inputs, Mapping) else None, str(group.get("format", "")))
    if scheme is None:
        bits, kind = weights.get("num_bits"), weights.get("type")
        problems.append(
            Problem(path=f"{path}.weights", message=f"{shorten(bits)} bits of {shorten(kind)} are not known")
        )
        return
    targets = group.get("targets")
    named = targets if isinstance(targets, list) else ["Linear"]
    if "Linear" in named:
        yield _Rule(_all, scheme)
        return
    plain = frozenset(_common(str(name)) for name in named if not str(name).startswith("re:"))
    yield _Rule(_holds(plain), scheme)
    for name in named:
        if str(name).startswith("re:") and _is_sound(str(name), f"{path}.targets", problems):
            yield _Rule(_matcher(str(name)), scheme)


def _bits_scheme(weights: Mapping[object, object], inputs: Mapping[object, object] | None, form: str) -> str | None:
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    narrow = inputs is not None and inputs.get("num_bits") == bits
    if bits == EIGHT_BITS and kind == "float":
        if not narrow:
            return "w8a16"
        return "mxfp8" if size == _MX_GROUP else "fp8_block" if weights.get("strategy") == "block" else "fp8"
    if bits == FOUR_BITS and kind == "float":
        if form.startswith("mxfp4") or size == _MX_GROUP:
            return "mxfp4"
        return "nvfp4" if narrow else "w4a16"
    if kind == "int" and bits in (FOUR_BITS, EIGHT_BITS):
        return "int8" if bits == EIGHT_BITS and narrow else f"w{bits}a16"
    return None


def _modelopt(algorithm: str, path: str, problems: list[Problem]) -> str:
    if algorithm not in _MODELOPT:
        known = ", ".join(_MODELOPT)
        problems.append(Problem(path=path, message=f"{shorten(algorithm)} is not known (known: {known})"))
    return _MODELOPT.get(algorithm, WIDE)


def _whole(section: Mapping[str, object], method: object, path: str, problems: list[Problem]) -> str:
    """One format for all linear layers: AWQ, GPTQ, fp8, mxfp4, bitsandbytes."""
    bits = section.get("bits", section.get("w_bit", 4))
    if method in ("awq", "gptq", "auto-round", "intel/auto-round", "gptq_marlin", "awq_marlin") and bits in (
        FOUR_BITS,
        EIGHT_BITS,
    ):
        return f"w{bits}a16"
    if method == "fp8":
        return "fp8_block" if section.get("weight_block_size") else "fp8"
    if method in ("mxfp4", "mxfp8"):
        return str(method)
    if method == "bitsandbytes":
        return "w8a16" if section.get("load_in_8bit") is True else "w4a16"
    if method in _WEIGHT_ONLY:
        problems.append(Problem(path=f"{path}.bits", message=f"{shorten(bits)} bits are not known (known: 4, 8)"))
    else:
        problems.append(Problem(path=f"{path}.quant_method", message=f"{shorten(method)} is not supported yet"))
    return WIDE
