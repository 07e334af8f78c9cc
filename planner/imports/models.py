"""Which model of the catalog a command line trains: by its name, or by the sizes that its flags give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments
from meshplan.planner.emit.training.megatron.hybrid import PATTERN, has_pattern, letters
from meshplan.planner.emit.training.megatron.model import inexpressible_shape, model_flags

# Sizes that tell one model from another; a model that has one of them only matches where the command gives it too.
DEPTH = "--num-layers"
SIZES = (
    DEPTH,
    "--hidden-size",
    "--num-attention-heads",
    "--ffn-hidden-size",
    "--num-query-groups",
    "--num-experts",
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--kv-lora-rank",
    PATTERN,
)
_GIVEN_ALWAYS = SIZES[1:3]
# A padded vocabulary tells families of equal layers apart; some releases differ in nothing else.
_FINE = ("--vocab-size", "--rotary-base", "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights")


def flags_of(shape: ModelShape) -> Mapping[str, str]:
    """The flags that the emitter writes for a model."""
    written = {flag[0]: " ".join(flag[1:]) for flag in model_flags(shape)} | {"--vocab-size": str(shape.vocab_size)}
    return written | ({PATTERN: "".join(letters(shape))} if has_pattern(shape) else {})


def models_of_size(arguments: Arguments, shapes: Iterable[ModelShape], *, num_positions: int = 0) -> list[ModelShape]:
    """Models whose sizes are those of the command, the most alike first.

    Fine-tuned releases have the sizes of their base model. Among models that no flag tells apart, those come first that
    read ``num_positions`` tokens, then those named after their family (``llama-3-70b`` before
    ``deepseek-r1-distill-llama-70b``), then those with the shorter name (``qwen2.5-7b`` before ``qwen2.5-coder-7b``).
    """
    if not all(size in arguments for size in _GIVEN_ALWAYS) or not {DEPTH, PATTERN} & arguments.keys():
        return []
    found = []
    for shape in shapes:
        if inexpressible_shape(shape) is not None:
            continue
        written = flags_of(shape)
        if all(_agrees(size, arguments, written) for size in SIZES):
            found.append(shape)
    return sorted(
        found,
        key=lambda shape: (
            -_likeness(arguments, flags_of(shape)),
            shape.max_sequence_length != num_positions,
            not shape.slug.startswith(shape.family.rstrip("0123456789._")),
            len(shape.slug),
            shape.slug,
        ),
    )


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
