"""Documents that share sequences, and context-parallel groups by length, as Megatron-LM has them.

Its pre-training samples are documents one after another, cut every ``--seq-length`` tokens. Attention goes across them
unless the loader tells where they begin (``--dataloader-inter-document-masking``). Whole documents with padding are
the conversations of ``--sft``: a line of its data is a sequence, what is too long is cut off, attention always keeps to
a conversation.

Context-parallel ranks take a share of every document, which must then be a multiple of 2 × ranks long. ``--sft`` pads
conversations to that; pre-training data are as they are.

Groups by length (``--hybrid-context-parallel``): a scheduler of Megatron's own deals the documents of a step to groups
of 1, 2, 4, … of the data × context-parallel ranks. It is not the plan's: whoever wants to try it is told the flags.

Source       megatron-core 0.19.2: training/arguments.py (flags, what validate_args asserts), core/datasets/
             gpt_dataset.py (inter_document_masking, hybrid_context_parallel) and data_schedule.py, core/utils.py
             (thd_get_partitioned_indices), training/datasets/sft_dataset.py, core/pipeline_parallel/
             hybrid_cp_schedule.py; core/transformer/multi_latent_attention.py (no groups with MLA).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training.adapters import phase_of
from meshplan.planner.emit.training.request import DocumentsAsked, TrainingRequest
from meshplan.planner.lengths.packing import CONCATENATE, SPLIT, TRUNCATE, WHOLE
from meshplan.planner.training.problem.problem import Phase

DOCUMENTS = Feature(
    name="sequence_lengths",
    expressed_by="--dataloader-inter-document-masking (packing: concatenate, context_parallel 1); --sft (phase: sft, "
    "packing: whole); groups by length: --hybrid-context-parallel, --max-seqlen-per-dp-cp-rank are told",
    verified_by="parser",
)
Flag = tuple[str, ...]
# From this stage of ZeRO on Megatron-LM shards by Megatron-FSDP.
_FSDP_STAGE = 2


def has_conversations(request: TrainingRequest) -> bool:
    """Whether the data are lines of conversations (``--sft``), one line a sequence."""
    documents = request.documents
    return documents is not None and documents.packing == WHOLE and phase_of(request.plan) is Phase.FINE_TUNING


def document_flags(request: TrainingRequest) -> tuple[Flag, ...]:
    """What the loader says of documents; nothing where the plan knows of none, or has no mask between them.

    Raises:
        CannotExpressError: whole documents with padding in pre-training; conversations that are split, or that see
            each other.
    """
    documents = request.documents
    if documents is None:
        return ()
    if has_conversations(request):
        _refuse_conversations(request, documents)
        return (("--sft",),)
    if documents.packing != CONCATENATE:
        raise CannotExpressError(
            "megatron",
            f"workload.sequence_lengths.packing: {documents.packing}, whole documents with padding: its pre-training "
            "data is cut every sequence_length tokens",
            f"packing: {CONCATENATE}; or phase: {Phase.FINE_TUNING.value}, whose conversations stay whole",
        )
    return (("--dataloader-inter-document-masking",),) if documents.is_masked else ()


def _refuse_conversations(request: TrainingRequest, documents: DocumentsAsked) -> None:
    """Stop at what ``--sft`` does otherwise with its conversations."""
    if documents.are_split:
        raise CannotExpressError(
            "megatron",
            f"workload.sequence_lengths.longer: {SPLIT}: --sft cuts off what does not fit into sequence_length tokens",
            f"longer: {TRUNCATE}",
        )
    if request.plan.spec["workload"]["sequence_lengths"].get("cross_document_attention", False):
        raise CannotExpressError(
            "megatron",
            "attention across conversations: --sft always keeps to one",
            "cross_document_attention: false",
        )


def group_flags(request: TrainingRequest) -> tuple[Flag, ...]:
    """Context-parallel groups by length; nothing where the plan has none, or Megatron-LM refuses them."""
    groups = (request.plan.lengths or {}).get("groups")
    if groups is None or any(_refusals(request)):
        return ()
    return (
        ("--hybrid-context-parallel",),
        ("--max-seqlen-per-dp-cp-rank", str(int(groups["most_tokens"]))),
        ("--calculate-per-token-loss",),
    )


def _refusals(request: TrainingRequest) -> Iterator[str]:
    """What Megatron-LM does not combine with groups by length."""
    config = request.config
    if config.pipeline_parallel > 1:
        yield "pipeline parallelism"
    if config.zero_stage >= _FSDP_STAGE:
        yield "Megatron-FSDP"
    if request.shape.latent is not None:
        yield "multi-head latent attention"
    if config.data_parallel * config.context_parallel % 2:
        yield f"{config.data_parallel * config.context_parallel} data × context-parallel ranks, an odd number"


def document_notes(request: TrainingRequest) -> tuple[str, ...]:
    """What a user should know of documents and groups."""
    documents = request.documents
    if documents is None:
        return ()
    notes = []
    if has_conversations(request):
        ranks = request.config.context_parallel
        padded = f", each padded to a multiple of {2 * ranks} for {ranks} context-parallel ranks" if ranks > 1 else ""
        notes.append(
            'A line of DATA_PATH is a sequence: {"messages": […]}, its conversations one after another, each begun by '
            f'the role "system", together no more than {request.config.sequence_length} tokens{padded} (--sft).'
        )
    elif documents.is_masked:
        notes.append(
            "Attention keeps to documents (--dataloader-inter-document-masking), as they are told apart in DATA_PATH; "
            "synthetic data has no documents."
        )
    if request.plan.lengths and request.plan.lengths.get("groups") is not None:
        flags, refusals = group_flags(request), ", ".join(_refusals(request))
        notes.append(
            f"Megatron-LM has no context-parallel groups by length with {refusals}."
            if refusals
            else "Context-parallel groups by length, which a scheduler of Megatron-LM's own makes (its parser was run, "
            f"not it): start with {' '.join(word for flag in flags for word in flag)} added; every document must be "
            f"padded to a multiple of {2 * request.config.data_parallel * request.config.context_parallel} tokens."
        )
    return tuple(notes)
