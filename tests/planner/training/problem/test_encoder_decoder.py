"""Questions about encoder–decoders: what may be said, and what becomes of a plan's files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.planner.emit.training import train
from meshplan.planner.service import check_files, emit_plan, make_plan
from meshplan.planner.training.service import resolve

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "flan-t5-xl",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 512, "global_batch_size": 64},
    "constraints": {"target": "accelerate"},
    "fixed": {"data_parallel": 8},
}


def test_a_plan_names_the_targets_length_and_its_files_hand_it_over(catalog: Catalog) -> None:
    check_files({name: part for name, part in SPEC.items() if name != "fixed"}, catalog)  # no degree has to be pinned
    plan = make_plan(SPEC, catalog)
    assert plan.solution["status"] == "optimal"
    files = {file.path.name: file.content for file in emit_plan(plan, "accelerate", catalog).artifacts}
    config = json.loads(files["training_config.json"])["config"]
    assert (config["sequence_length"], config["decoder_sequence_length"]) == (512, 114)
    assert any("encoder–decoder" in text for text in plan.provenance["not_validated"])
    for target in ("megatron", "axolotl"):
        with pytest.raises(CannotExpressError, match="the encoder in front"):
            emit_plan(plan, target, catalog)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"constraints": {}}, "constraints.target"),
        ({"fixed": {"pipeline_parallel": 2}}, "fixed.pipeline_parallel"),
        ({"workload": {**SPEC["workload"], "phase": "lora", "lora_rank": 8}}, "workload.phase"),
        ({"model": "whisper-large-v3"}, "model"),
        (
            {"model": "llama-3.1-8b", "workload": {**SPEC["workload"], "decoder_sequence_length": 9}},
            "workload.decoder_",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_field(change: dict[str, Any], path: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError) as caught:
        resolve({**SPEC, **change}, catalog)
    assert any(problem.path.startswith(path) for problem in caught.value.problems)


def test_pairs_have_the_planned_lengths_and_padding_has_no_loss() -> None:
    class Tokenizer:
        """One token a letter, padded with 0."""

        pad_token_id = 0

        def __call__(self, texts: Any = None, *, text_target: Any = None, max_length: int, **_: Any) -> dict[str, Any]:
            rows = [[ord(sign) for sign in text][:max_length] for text in texts or text_target]
            padded = [row + [0] * (max_length - len(row)) for row in rows]
            return {"input_ids": padded, "attention_mask": [[int(token > 0) for token in row] for row in padded]}

    made = train.pairs(Tokenizer(), {"input": ["abc"], "target": ["d"]}, 4, 2)
    assert made == {"input_ids": [[97, 98, 99, 0]], "attention_mask": [[1, 1, 1, 0]], "labels": [[100, train.IGNORED]]}
