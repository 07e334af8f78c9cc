"""Encoder–decoders in a training question: the lengths of both sequences, who trains them, and how.

Both stacks lie on every data-parallel rank. Tensor parallelism is priced where no framework is named; of the targets
here, Hugging Face's models train in Accelerate and DeepSpeed with data parallelism alone: transformers 5.16.1 has no
plan of tensor parallelism for T5 (``models/t5`` defines no ``base_model_tp_plan``), and DeepSpeed's AutoTP was not
tried. Megatron-LM has a T5 (``pretrain_t5.py``: no pipeline stages, as many decoder as encoder layers), but no flag for
the ReLU of T5 or the GeGLU of T5 1.1. Nothing here trains Whisper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.problems import Problems
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.pytorch import only_one, whole_sequences
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.spec import TrainingSpec

# T5's pre-training (Raffel et al., arXiv:1910.10683, §3.1.4) hides spans of a text and predicts them: of n tokens those
# in spans leave the input, each span a sentinel in their place, and are the target, each behind its sentinel.
HIDDEN_SHARE, SPAN_TOKENS = 0.15, 3.0
_SPANS_SHARE = HIDDEN_SHARE / SPAN_TOKENS
TARGET_SHARE = (HIDDEN_SHARE + _SPANS_SHARE) / (1.0 - HIDDEN_SHARE + _SPANS_SHARE)
TRAINERS = ("accelerate", "deepspeed", ANY_FRAMEWORK.name)

_OWN = "the planner's own: exchanges between the stacks of an encoder–decoder are not priced"
_ONE_PLACE = LegalityRule(
    name="encoder_decoders_have_one_stage",
    holds=lambda _, config: (config.pipeline_parallel == 1) & (config.context_parallel == 1),
    message="an encoder–decoder has pipeline_parallel and context_parallel 1",
    stage="run time",
    source=f"{_OWN}; Megatron-LM: pretrain_t5.py refuses pipeline stages",
)


def target_length(sequence_length: int) -> int:
    """Tokens of a target where nobody says: those that T5's pre-training makes of a full input.

    >>> target_length(512)
    114
    """
    return max(round(TARGET_SHARE * sequence_length), 1)


def whole_stacks(rules: FrameworkRules) -> FrameworkRules:
    """The framework as it trains encoder–decoders."""
    own = [_ONE_PLACE, whole_sequences("targets of any length are not split over ranks", _OWN)]
    if rules.name != ANY_FRAMEWORK.name:
        source = "transformers 5.16.1: models/t5 has no plan of tensor parallelism"
        own.append(only_one("tensor_parallel", rules.name, "an encoder–decoder is not split", source))
    return replace(
        rules,
        rules=(*rules.rules, *own),
        pipeline_schedules=("none",),
        recompute_modes=tuple(mode for mode in rules.recompute_modes if mode != "block"),
        sequence_parallel=False,
    )


def check_stacks(spec: TrainingSpec, shape: ModelShape, problems: Problems) -> None:
    """What a question about an encoder–decoder may not say, and what only such a question may."""
    if shape.encoder is None:
        if spec.workload.decoder_sequence_length is not None:
            problems.say("workload.decoder_sequence_length", f"{shape.name} has no encoder in front: leave it out")
        return
    for path, message in _beyond(spec, shape):
        problems.say(path, message)


def _beyond(spec: TrainingSpec, shape: ModelShape) -> Iterator[tuple[str, str]]:
    target, workload = spec.constraints.target, spec.workload
    if shape.encoder is not None and shape.encoder.audio is not None:
        yield "model", f"{shape.name} reads sound, and no target here trains it; its serving is planned (kind: serving)"
    elif target not in TRAINERS:
        others = "has no flag for its MLP (ReLU or GeGLU)" if target == "megatron" else "trains none"
        yield "constraints.target", f"{shape.name} is an encoder–decoder, {target} {others}: {', '.join(TRAINERS)}"
    if workload.phase.has_adapters:
        yield "workload.phase", f"{workload.phase.value}: adapters on an encoder–decoder are not modelled yet: say sft"
    if workload.sequence_lengths is not None:
        yield "workload.sequence_lengths", "lengths of inputs and targets are not modelled apart: leave it out"
    if spec.far_apart is not None:
        yield "far_apart", "ways over sites are not compared for encoder–decoders: leave it out"
    for name in ("pipeline_parallel", "context_parallel"):
        if (getattr(spec.fixed, name) or 1) > 1:
            yield f"fixed.{name}", f"{getattr(spec.fixed, name)}: {_ONE_PLACE.message}"
