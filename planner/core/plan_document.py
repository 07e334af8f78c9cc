"""A plan's JSON as it may come from anybody: which fields, of which types, within which ranges.

The id of a plan is a digest without a key: whoever writes a file can compute it. So a plan that is read is not trusted
to be one that meshplan made. Each kind has a model of its own beside its code (``PLAN`` in the module that
:class:`meshplan.planner.core.kinds.Kind` names); what all kinds share is here. Keys that no model names are kept: they
are shown, never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, ValidationError, model_validator

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.layers.recurrent import LayerBlocks
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.catalogs.untrusted.documents import require_plain

# No count of a plan is larger: layers, tokens, bytes are; these fit a float exactly.
MAX_COUNT = 2**53
MAX_NUMBER = 1e30
MAX_MODEL_SIZE = 10**9  # of one dimension of a model: hidden size, vocabulary, context
MAX_LAYERS = 10_000
MAX_EXPERT_GROUPS = 64  # as configurations may state
MAX_HOSTS = 1_000_000
MAX_TEXT = 20_000
# Parts of an error's place that name a model of ours or a validator, not a field.
_OF_PYDANTIC = re.compile(r"function-|constrained-|[A-Z_]")
_MODEL_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")

Number: TypeAlias = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0.0, le=MAX_NUMBER, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0.0, le=MAX_NUMBER, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+:/ -]{0,199}$")]
Index: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_HOSTS)]
# Read as an object of JSON. A type checker takes it for anything, so that a kind may say what is in it.
Object: TypeAlias = Annotated[Any, GetPydanticSchema(lambda _source, handler: handler(dict[str, Any]))]
Digest: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Section(BaseModel):
    """A part of a plan: known keys have their types, others are kept."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True, protected_namespaces=())


class Closed(Section):
    """A part that becomes an object of its own: other keys have no meaning there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True, protected_namespaces=())


class Nothing(Closed):
    """The choices and the memory of a plan that found none."""


class IntervalDocument(Closed):
    """A prediction and its range."""

    value: Number
    low: Number
    high: Number


class SolutionDocument(Section):
    """What the solver said."""

    status: Literal["optimal", "feasible", "infeasible"]
    solver: Text
    objective: Number | None = None
    bound: Number | None = None
    gap: Number | None = None
    wall_s: Number = 0.0
    cpu_s: Number = 0.0
    seed: int = 0
    num_candidates: Count | None = None
    num_simulated: Count | None = None
    tie: Number | None = None
    binding_constraint: Text = ""
    tried: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _gap_has_its_ends(self) -> SolutionDocument:
        if self.gap is not None and (self.objective is None or self.bound is None):
            raise ValueError("a gap needs an objective and a bound")
        return self


class PartDocument(Section):
    """One part of the time."""

    name: Text
    seconds: Share
    share: Share
    evidence: Text


class CheckDocument(Closed):
    """One statement of a plan beside the value of the second way."""

    what: Text
    stated: Number | Text | None
    found: Number | Text | None
    agrees: bool


class CertificateDocument(Closed):
    """A second opinion (:class:`meshplan.planner.core.certificate.Certificate`)."""

    outcome: Literal["agrees", "disagrees", "unfinished"]
    method: Text
    covers: Text
    checks: list[CheckDocument]


class RejectedDocument(Section):
    """Ways that were not taken, for one reason."""

    reason: Text
    count: Count
    example: Text | None = None


class PlanDocument(Section):
    """The fields that every plan has; see :class:`meshplan.planner.core.plan.Plan`.

    Kinds narrow some of them, where pydantic holds a document against the narrower form.
    """

    plan_id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    kind: Name
    spec: Object
    spec_digest: Digest
    catalog_digest: Digest
    config: Object
    predicted: dict[Name, IntervalDocument]
    memory: Object
    breakdown: list[Object]
    provenance: Object
    solution: SolutionDocument
    alternatives: list[Object]
    rejected: list[Object]
    rank_table: list[tuple[Index, Index]] | None = None
    mapping: Object | None = None
    run: Object | None = None
    lengths: Object | None = None
    far_apart: Object | None = None
    answer: Object | None = None
    certificate: CertificateDocument | None = None


PLAN = PlanDocument


def bounded(value: Any, path: str = "") -> Iterator[str]:
    """What is out of range in a dataclass that is made of counts, names and other dataclasses."""
    for item in fields(value):
        inner, name = getattr(value, item.name), f"{path}{item.name}"
        if is_dataclass(inner):
            yield from bounded(inner, f"{name}.")
        elif isinstance(inner, int | float) and not 0 <= inner <= MAX_MODEL_SIZE:
            yield f"{name} is {inner}, not within 0 and {MAX_MODEL_SIZE}"
        elif isinstance(inner, str) and len(inner) > MAX_TEXT:
            yield f"{name} has {len(inner)} characters; at most {MAX_TEXT}"


def _unsound_forms(blocks: LayerBlocks, layers: int) -> list[str]:
    """What is wrong with the forms of attention of a model's layers."""
    problems = []
    if len(blocks.indexed) not in (0, layers):
        problems.append(f"blocks.indexed has {len(blocks.indexed)} entries for {layers} layers")
    if len(blocks.form_of) != (layers if blocks.forms else 0):
        problems.append(f"blocks.form_of has {len(blocks.form_of)} entries for {layers} layers")
    if any(not 0 <= place < len(blocks.forms) for place in blocks.form_of):
        problems.append("blocks.form_of names a form that is not there")
    for form in blocks.forms:
        problems += bounded(form, "blocks.forms.")
        problems += [text for matrix in form.matrices for text in bounded(matrix, "blocks.forms.matrices.")]
        if min(form.num_heads, form.num_key_value_heads, form.key_dim, form.value_dim, form.compression) < 1:
            problems.append("blocks.forms: heads, widths and compression must be above 0")
    return problems


def _unsound_experts(experts: MixtureOfExperts, layers: int) -> list[str]:
    problems = []
    if len(experts.moe_layers) != layers:
        problems.append(f"moe_layers has {len(experts.moe_layers)} entries for {layers} layers")
    if not 1 <= experts.num_experts_per_token <= experts.num_experts:
        problems.append("num_experts_per_token is not within 1 and num_experts")
    if not 1 <= experts.num_groups_per_token <= experts.num_expert_groups <= MAX_EXPERT_GROUPS:
        problems.append(f"1 ≤ num_groups_per_token ≤ num_expert_groups ≤ {MAX_EXPERT_GROUPS} does not hold")
    return problems


def _sound_shape(shape: ModelShape) -> ModelShape:
    problems = list(_unsound_sizes(shape))
    if (encoder := shape.encoder) is not None:  # it has no vocabulary of its own
        problems += [f"encoder: {problem}" for problem in _unsound_sizes(replace(encoder, vocab_size=shape.vocab_size))]
        if (encoder.hidden_size, encoder.bidirectional, encoder.encoder) != (shape.hidden_size, True, None):
            problems.append("encoder: must be as wide as the model, read both ways, and have no encoder itself")
    if problems:
        raise ValueError("; ".join(problems))
    return shape


def _unsound_sizes(shape: ModelShape) -> list[str]:
    """What is wrong with one stack of layers."""
    problems = list(bounded(replace(shape, encoder=None)))
    problems += [f"{name} must be above 0" for name in _MODEL_SIZES if getattr(shape, name) < 1]
    layers = shape.num_hidden_layers
    if not 1 <= layers <= MAX_LAYERS:
        problems.append(f"num_hidden_layers is {layers}, not within 1 and {MAX_LAYERS}")
    if len(shape.sliding_windows) not in (0, layers):
        problems.append(f"sliding_windows has {len(shape.sliding_windows)} entries for {layers} layers")
    if any(window is not None and not 1 <= window <= MAX_MODEL_SIZE for window in shape.sliding_windows):
        problems.append("a sliding window is out of range")
    if (shape.latent is not None) != (shape.attention is AttentionKind.MULTI_HEAD_LATENT):
        problems.append("latent sizes belong to multi-head latent attention, and only there")
    if shape.moe is not None:
        problems += _unsound_experts(shape.moe, layers)
    vision = shape.vision
    if vision is not None and min(vision.num_layers, vision.hidden_size, vision.patch_size, vision.merged) < 1:
        problems.append("vision: layers, widths and patches must be above 0")
    if shape.num_token_types < 0 or (shape.pooling is not None and shape.pooling.num_labels < 0):
        problems.append("kinds of tokens and labels must not be below 0")
    blocks = shape.blocks
    if blocks is not None and (len(blocks.mixers), len(blocks.has_mlp)) != (layers, layers):
        problems.append(f"blocks has {len(blocks.mixers)} mixers and {len(blocks.has_mlp)} MLPs for {layers} layers")
    if blocks is not None:
        problems += _unsound_forms(blocks, layers)
    if blocks is not None and blocks.recurrent is None and shape.num_recurrent_layers:
        problems.append("blocks lists recurrent layers without their sizes")
    return problems


class _Shape(Closed):
    """Closed, because an open section passes unknown keys on to the dataclass, which has no place for them."""

    shape: Annotated[ModelShape, AfterValidator(_sound_shape)]


def as_json(model: type[BaseModel], document: Mapping[str, Any]) -> None:
    """Hold a part against a model of its own, as JSON: a list is a tuple there and a text an enumeration.

    Raises:
        ValueError: every problem with its field.
    """
    try:
        model.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ValueError("; ".join(_sentences(error))) from None


def _is_model(document: dict[str, Any]) -> dict[str, Any]:
    as_json(_Shape, {"shape": document})
    return document


# The model that a plan was made for: the fields of a ModelShape.
Model: TypeAlias = Annotated[dict[str, Any], AfterValidator(_is_model)]


def document_problems(model: type[PlanDocument], document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a plan's JSON, each with its field; empty where nothing is.

    Args:
        model: of the plan's kind.
        document: as :meth:`meshplan.planner.core.plan.Plan.to_document` writes it.

    Raises:
        DocumentError: it holds control characters, or what JSON cannot express.
    """
    require_plain(dict(document), "the plan")
    try:
        as_json(model, document)
    except ValueError as error:
        return str(error).split("; ")
    return []


def _sentences(error: ValidationError) -> list[str]:
    """The problems, without those of the branches of a choice that the input does not take."""
    found = error.errors(include_url=False)
    taken = [item for item in found if not any(str(part) == "Nothing" for part in item["loc"])] or found
    return [_sentence(item) for item in taken]


def _sentence(error: Any) -> str:
    shown = [part for part in error["loc"] if isinstance(part, int) or not _OF_PYDANTIC.match(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in shown).lstrip(".")
    return f"{path or 'the plan'}: {str(error['msg']).removeprefix('Value error, ')}"
