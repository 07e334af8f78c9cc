"""A training plan as DeepSpeed's JSON. The training script is the user's: ``deepspeed.initialize(config=…)``.

DeepSpeed's parser takes any unknown top-level key without a word, so the keys are compared with its own list in
tests/conformance/deepspeed. What the JSON has no word for (recomputation, sequence length) is handed to the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.planner.emit import script
from meshplan.planner.emit.artifact import Artifact, ParserVerified, TrainingRequest
from meshplan.planner.emit.job import Job
from meshplan.planner.emit.registry import Feature
from meshplan.planner.emit.terms import BY_THE_SCRIPT, HANDED_OVER, Term, feature_rows, refuse
from meshplan.planner.emit.torchrun import RANK_TABLE
from meshplan.planner.problems.pytorch_frameworks import DEEPSPEED
from meshplan.planner.problems.training import TrainingConfig

TARGET = "deepspeed"
CONFIG_FILE = PurePosixPath("deepspeed_config.json")
VERIFIED = ParserVerified(
    framework="deepspeed",
    version=DEEPSPEED.version,
    mode="DeepSpeedConfig with the plan's number of ranks; no engine is built",
)
_PARSER = "parser (DeepSpeedConfig)"
_KNOWN_NAMES = {"precision": ("bf16", "fp16"), "activation_recompute": ("none", "full")}
_NOTES = (
    f"The script reads {CONFIG_FILE} (its path is in DEEPSPEED_CONFIG) and hands it to deepspeed.initialize. It gets "
    "what the JSON has no word for from MESHPLAN_CONFIG: activation_recompute, sequence_length.",
)
_TENSOR_NOTE = (
    "With tensor parallelism DeepSpeed counts every rank as a batch: its log shows train_batch_size × tensor_parallel."
)


def _batch(config: TrainingConfig) -> Mapping[str, Any]:
    """The batch triple. Under tensor parallelism its product would count every rank, so the total is left out."""
    words = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.num_microbatches,
    }
    return words if config.tensor_parallel > 1 else {"train_batch_size": config.global_batch_size, **words}


def _zero(config: TrainingConfig) -> Mapping[str, Any]:
    if config.zero_stage == 0:
        return {"zero_optimization": {"stage": 0}}
    return {"zero_optimization": {"stage": config.zero_stage, "overlap_comm": True, "contiguous_gradients": True}}


def _handed(name: str) -> Term:
    return Term(name=name, words=lambda _: {}, said_by=HANDED_OVER, verified_by=BY_THE_SCRIPT)


TERMS = (
    Term(
        name="micro_batch_size",
        words=_batch,
        said_by="train_micro_batch_size_per_gpu",
        verified_by=_PARSER,
    ),
    Term(
        name="global_batch_size",
        words=lambda _: {},
        said_by="train_batch_size, gradient_accumulation_steps",
        verified_by=_PARSER,
    ),
    Term(name="zero_stage", words=_zero, said_by="zero_optimization.stage", verified_by=_PARSER),
    Term(
        name="tensor_parallel",
        words=lambda config: (
            {"tensor_parallel": {"autotp_size": config.tensor_parallel}} if config.tensor_parallel > 1 else {}
        ),
        said_by="tensor_parallel.autotp_size (zero_stage up to 2, without sequence_parallel)",
        verified_by=_PARSER,
    ),
    Term(
        name="precision",
        words=lambda config: {config.precision: {"enabled": True}},
        said_by="bf16.enabled, fp16.enabled",
        verified_by=_PARSER,
    ),
    _handed("activation_recompute"),
    _handed("sequence_length"),
)


def configuration(request: TrainingRequest) -> dict[str, Any]:
    """The JSON as a mapping.

    Raises:
        CannotExpressError: DeepSpeed's JSON has no word for a choice.
    """
    refuse(DEEPSPEED, request.shape, request.config, _KNOWN_NAMES)
    words: dict[str, Any] = {}
    for term in TERMS:
        words.update(term.words(request.config))
    return words


def job(request: TrainingRequest) -> Job:
    """The user's script with DeepSpeed's JSON and the plan's choices beside it."""
    text = json.dumps(configuration(request), indent=2) + "\n"
    tensor_note = (_TENSOR_NOTE,) if request.config.tensor_parallel > 1 else ()
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=DEEPSPEED.rank_orders[0],
        environment={},
        program=script.program(request) + f"export DEEPSPEED_CONFIG=$here/{CONFIG_FILE}\n",
        # JSON has no comments and DeepSpeed owns every key, so the stamp is in the file beside it.
        files=(Artifact(path=CONFIG_FILE, content=text), script.config_file(request, VERIFIED)),
        settings=(script.script_setting(request.script),),
        notes=(*_NOTES, *tensor_note),
    )


def degrees(words: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Our degrees, read back from DeepSpeed's JSON and the number of its ranks."""
    tensor = int(words.get("tensor_parallel", {}).get("autotp_size", 1))
    return {
        "tensor_parallel": tensor,
        "data_parallel": world_size // tensor,
        "zero_stage": int(words.get("zero_optimization", {}).get("stage", 0)),
        "micro_batch_size": int(words["train_micro_batch_size_per_gpu"]),
        "num_microbatches": int(words["gradient_accumulation_steps"]),
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
