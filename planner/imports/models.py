"""Which model of the catalog a command line trains: by its name, or by the sizes that its flags give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from meshplan.catalogs.errors import closest_names
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments
from meshplan.planner.emit.training.megatron.model import inexpressible_shape, model_flags

# Sizes that tell one model from another; a model that has one of them only matches where the command gives it too.
_TUNING = re.compile(
    r"instruct|chat|it|hf|base|pt|fp8|awq|gptq|int4|int8|w4a16|w8a8|w8a16|nvfp4|fp4|mxfp4|bf16|bnb|4bit|dynamic|"
    r"quantized|v\d+(?:\.\d+)?|\d{4}|thinking"
)
_NAMED_SCHEMES = (
    *(("awq", "w4a16"), ("gptq", "w4a16"), ("w4a16", "w4a16"), ("int4", "w4a16"), ("bnb", "w4a16")),
    *(("fp8", "fp8"), ("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("w8a8", "int8"), ("int8", "int8")),
)
SIZES = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--ffn-hidden-size",
    "--num-query-groups",
    "--num-experts",
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--kv-lora-rank",
)
_GIVEN_ALWAYS = SIZES[:3]
# A padded vocabulary tells families of equal layers apart; some releases differ in nothing else.
_FINE = ("--vocab-size", "--rotary-base", "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights")


def slug_of(written: str, slugs: Iterable[str]) -> tuple[str | None, tuple[str, ...]]:
    """(catalog name of a model as written, close names): ``meta-llama/Llama-3.1-8B`` is ``llama-3.1-8b``."""
    known = sorted(slugs)
    name = written.rstrip("/").rsplit("/", 1)[-1].lower()
    if name in known:
        return name, ()
    by_plain = {_plain_name(slug): slug for slug in reversed(known)}
    found = by_plain.get(_plain_name(name))
    return (found, ()) if found is not None else (None, closest_names(name, known))


def scheme_of(written: str) -> str | None:
    """The format of the weights that a checkpoint's name tells; None where it tells none."""
    name = written.rsplit("/", 1)[-1].lower()
    return next((scheme for mark, scheme in _NAMED_SCHEMES if re.search(rf"(?:^|[-_.]){mark}(?:$|[-_.])", name)), None)


def _plain_name(name: str) -> str:
    """A name without what tells tuning, format or release: ``llama-3.1-8b`` of ``Meta-Llama-3.1-8B-Instruct-FP8``."""
    words = re.split(r"[-_]", name.lower().removeprefix("meta-"))
    kept = [word for word in words if word and not _TUNING.fullmatch(word)]
    return "-".join(kept)


def flags_of(shape: ModelShape) -> Mapping[str, str]:
    """The flags that the emitter writes for a model."""
    return {flag[0]: " ".join(flag[1:]) for flag in model_flags(shape)} | {"--vocab-size": str(shape.vocab_size)}


def models_of_size(arguments: Arguments, shapes: Iterable[ModelShape]) -> list[ModelShape]:
    """Models whose sizes are those of the command, the most alike first."""
    if not all(size in arguments for size in _GIVEN_ALWAYS):
        return []
    found = []
    for shape in shapes:
        if inexpressible_shape(shape) is not None:
            continue
        written = flags_of(shape)
        if all(_agrees(size, arguments, written) for size in SIZES):
            found.append(shape)
    return sorted(found, key=lambda shape: -_likeness(arguments, flags_of(shape)))


def mismatches(arguments: Arguments, shape: ModelShape) -> list[str]:
    """Sizes in which the command and the model differ."""
    written = flags_of(shape)
    return [
        f"{flag} {arguments[flag]}, the model has {written[flag]}"
        for flag in (*SIZES, "--vocab-size")
        if flag in arguments and flag in written and str(arguments[flag]) != written[flag]
    ]


def _agrees(size: str, arguments: Arguments, written: Mapping[str, str]) -> bool:
    theirs, ours = written.get(size), arguments.get(size)
    if theirs is None:
        # As many groups as heads is what having no groups means.
        return ours is None or (size == "--num-query-groups" and str(ours) == written["--num-attention-heads"])
    return theirs == (_plain(size, written) if ours is None else str(ours))


def _plain(size: str, written: Mapping[str, str]) -> str | None:
    """The value that Megatron-LM takes where the command leaves a size out."""
    if size == "--ffn-hidden-size":
        return str(4 * int(written["--hidden-size"]))
    if size == "--moe-ffn-hidden-size":
        return written.get("--ffn-hidden-size")
    return None


def _likeness(arguments: Arguments, written: Mapping[str, str]) -> int:
    return sum(
        (flag in arguments) == (flag in written) and str(arguments.get(flag)) == str(written.get(flag))
        for flag in _FINE
    )
