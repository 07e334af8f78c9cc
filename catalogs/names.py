"""Names as people write them to names of the catalog: Hugging Face ids, capitals, short names of GPUs.

A name of the catalog always wins; what is written otherwise is read only where one entry alone can be meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HUGGING_FACE = re.compile(r"https://huggingface\.co/([^/\s]+/[^/\s]+)")
# Endings of a checkpoint's name that tell how it was tuned or when it was released, not what shape it has. Examples:
# Qwen3-30B-A3B-Instruct-2507, gemma-2-9b-it, Llama-2-7b-chat-hf, Mixtral-8x7B-Instruct-v0.1, DeepSeek-V3-0324.
_ROLE = r"instruct|base|chat|it|hf|thinking|sft|dpo|text"
_TUNED = re.compile(rf"-({_ROLE}|v0\.\d|\d{{4}})(?=-|$)")
_ROLES = re.compile(rf"-({_ROLE})(?=-|$)")
# Endings that tell the format of the weights → the scheme of `meshplan plan`; as vLLM's and the publishers' own
# checkpoints are named (Qwen3-32B-FP8, Qwen2.5-7B-Instruct-AWQ, Llama-3.1-70B-Instruct-quantized.w4a16, …-NVFP4).
_FORMATS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-fp8-block$"), "fp8_block"),
    (re.compile(r"-(fp8(-dynamic|-kv)?|quantized\.w8a8-fp8)$"), "fp8"),
    (re.compile(r"-(awq|gptq|((awq|gptq)-)?int4|bnb-4bit|w4a16|quantized\.w4a16|awq-w4a16)$"), "w4a16"),
    (re.compile(r"-(nvfp4|fp4)$"), "nvfp4"),
    (re.compile(r"-((gptq-)?int8|w8a8|quantized\.w8a8)$"), "int8"),
)
# Publishers' prefixes that the catalog leaves out: meta-llama/Meta-Llama-3-8B.
_PREFIXES = ("meta-",)
# What people say → the form that clouds and the makers' own nodes have (SXM boards), where a name fits several forms.
GPU_SHORT_NAMES: Mapping[str, str] = {
    "v100": "v100-sxm2-32gb",
    "a100": "a100-sxm-80gb",
    "a100-80gb": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "a800": "a800-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "h100-80gb": "h100-sxm-80gb",
    "h100-sxm": "h100-sxm-80gb",
    "h100-sxm5": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "h20": "h20-96gb",
    "h800": "h800-sxm-80gb",
    "a6000": "rtx-a6000",
    "h200": "h200-sxm-141gb",
    "h200-sxm": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "b200-sxm": "b200-sxm-180gb",
    "4090": "rtx-4090",
    "v5e": "tpu-v5e",
    # Product names of NVIDIA's driver, as nvidia-smi prints them and Kubernetes nodes are labelled.
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100-80gb-pcie": "a100-pcie-80gb",
    "a800-sxm4-80gb": "a800-sxm-80gb",
    "h100-80gb-hbm3": "h100-sxm-80gb",
    "gh200-480gb": "gh200",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000",
}
_MAKERS = re.compile(r"^(nvidia|amd|intel|google|aws|geforce|instinct|tesla)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """A model as written.

    Args:
        slug: its name in the catalog.
        scheme: format of the weights that the written name tells, such as ``fp8``; empty where it tells none.
    """

    slug: str
    scheme: str = ""


def model_name(written: str, sources: Mapping[str, str]) -> ModelName | None:
    """The model that a name or a Hugging Face id means; None where no entry, or more than one, can be meant.

    Args:
        written: such as ``Qwen/Qwen3-32B-FP8`` or ``llama-3.1-8b``.
        sources: name in the catalog → where the publisher states the configuration.
    """
    name = written.strip().rstrip("/")
    if name in sources:
        return ModelName(slug=name)
    published = {match[1].lower(): slug for slug, source in sources.items() if (match := _HUGGING_FACE.match(source))}
    stem, scheme = _without_format(name.lower())
    for known in (name.lower(), stem):
        if known in published:
            return ModelName(slug=published[known], scheme=scheme if known == stem != name.lower() else "")
    tuned = {slug for known, slug in published.items() if "/" in stem and _TUNED.sub("", known) == _TUNED.sub("", stem)}
    if len(tuned) == 1:
        return ModelName(slug=tuned.pop(), scheme=scheme)
    bare = stem.rsplit("/", 1)[-1]
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    for candidate in dict.fromkeys((bare, _ROLES.sub("", bare), *_endings_dropped(bare))):
        if candidate in sources:
            return ModelName(slug=candidate, scheme=scheme)
    plain = _TUNED.sub("", bare)
    alike = [slug for slug in sources if _TUNED.sub("", slug) == plain]
    return ModelName(slug=alike[0], scheme=scheme) if len(alike) == 1 else None


def scheme_of(written: str) -> str:
    """The format of the weights that a checkpoint's name tells; empty where it tells none."""
    return _without_format(written.strip().rstrip("/").lower())[1]


def _without_format(name: str) -> tuple[str, str]:
    for pattern, scheme in _FORMATS:
        stem = pattern.sub("", name)
        if stem != name:
            return stem, scheme
    return name, ""


def _endings_dropped(name: str) -> list[str]:
    """The name without its last ending, without its last two, and so on."""
    found = []
    while (match := list(_TUNED.finditer(name))) and match[-1].end() == len(name):
        name = name[: match[-1].start()]
        found.append(name)
    return found


def hardware_name(written: str, known: Iterable[str]) -> str | None:
    """The device or node type that a name means; None where none, or more than one, can be meant.

    Capitals, the maker's name, and hyphens or spaces between the parts do not matter.

    Args:
        written: such as ``H100``, ``NVIDIA L40S``, ``RTX4090``, ``DGX_H100``.
        known: names of the catalog.
    """
    names = set(known)
    if written in names:
        return written
    name = re.sub(r"[\s_]+", "-", written.strip().lower())
    while (shorter := _MAKERS.sub("", name)) != name:
        name = shorter
    for candidate in (name, GPU_SHORT_NAMES.get(name, ""), f"rtx-{name}"):
        if candidate in names:
            return candidate
    joined = name.replace("-", "")
    meant = {slug for slug in names if slug.replace("-", "") == joined}
    meant |= {slug for short, slug in GPU_SHORT_NAMES.items() if short.replace("-", "") == joined and slug in names}
    return meant.pop() if len(meant) == 1 else None
