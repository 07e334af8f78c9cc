"""Documents that share sequences: what Megatron-LM's and TorchTitan's files say of them, and what they cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, config_for, plan_for, request_for

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training import torchtitan
from meshplan.planner.emit.training.megatron import documents
from meshplan.planner.emit.training.megatron import job as megatron
from meshplan.planner.emit.training.request import TrainingRequest

MASK = ("--dataloader-inter-document-masking",)


def request(shape: ModelShape = LLAMA_70B, *, groups: bool = False, **asked: Any) -> TrainingRequest:
    """A plan that knows of documents."""
    packing, across, longest = (
        asked.pop("packing", "concatenate"),
        asked.pop("across", False),
        asked.pop("longest", 900),
    )
    phase, longer = asked.pop("phase", "pretraining"), asked.pop("longer", "truncate")
    config = config_for(shape, **{"tensor_parallel": 8, "data_parallel": 8, **asked})
    lengths_asked = {"packing": packing, "cross_document_attention": across}
    spec = {"workload": {"phase": phase, "sequence_lengths": lengths_asked}}
    mean = 700.0 if longest == 900 else longest
    told = {"packing": packing, "mean": mean, "longest": longest, "longer": longer}
    lengths = {"documents": told, "groups": {"most_tokens": 4096} if groups else None}
    return request_for(shape, config, plan=plan_for(shape, config, spec=spec, lengths=lengths))


def test_the_mask_is_told_where_the_plan_counts_on_it() -> None:
    assert MASK in megatron.arguments(request())
    assert MASK not in megatron.arguments(request(across=True))
    assert MASK not in megatron.arguments(request(longest=request().config.sequence_length))
    plain = request()
    assert MASK not in megatron.arguments(replace(plain, plan=replace(plain.plan, lengths=None)))


def test_what_the_loaders_cannot_do_is_refused() -> None:
    with pytest.raises(CannotExpressError, match="packing: whole, whole documents with padding"):
        megatron.arguments(request(packing="whole"))
    with pytest.raises(CannotExpressError, match=r"pre-training data are not padded.*context_parallel = 1"):
        megatron.arguments(request(context_parallel=2, data_parallel=4))
    assert MASK not in megatron.arguments(request(across=True, context_parallel=2, data_parallel=4))
    titan = replace(LLAMA_70B, slug="llama-3.1-70b")
    with pytest.raises(CannotExpressError, match="attention across documents"):
        torchtitan.arguments(request(titan, across=True, zero_stage=3))
    with pytest.raises(CannotExpressError, match="packing: whole"):
        torchtitan.arguments(request(titan, packing="whole", zero_stage=3))
    assert torchtitan.arguments(request(titan, zero_stage=3))


def test_conversations_of_fine_tuning_stay_whole() -> None:
    tuning = {"phase": "sft", "packing": "whole"}
    packed = request(**tuning, context_parallel=2, data_parallel=4)
    assert ("--sft",) in megatron.arguments(packed)
    assert MASK not in megatron.arguments(packed)
    job = megatron.job(packed)
    assert "TOKENIZER_TYPE:-SFTTokenizer" in job.program
    assert "--mock-data" not in job.program
    assert {one.name for one in job.settings if one.required} >= {"DATA_PATH", "TOKENIZER_MODEL", "LOAD_DIR"}
    assert any("padded to a multiple of 4 for 2 context-parallel ranks" in note for note in job.notes)
    for asked, said in (
        ({"longer": "split", "longest": 9000}, "cuts off what does not fit"),
        ({"across": True}, "attention across conversations"),
        ({"framework_version": "0.16.0"}, "cannot express --sft"),
    ):
        version = asked.pop("framework_version", "")
        with pytest.raises(CannotExpressError, match=said):
            megatron.job(replace(request(**tuning, **asked), framework_version=version))


def test_groups_by_length_are_offered_where_megatron_has_them() -> None:
    (note,) = documents.document_notes(request(groups=True))[1:]
    assert "--max-seqlen-per-dp-cp-rank 4096" in note
    assert "multiple of 16 tokens" in note
    for refused, why in (
        (request(groups=True, zero_stage=3), "Megatron-FSDP"),
        (request(groups=True, pipeline_parallel=2), "pipeline parallelism"),
        (request(groups=True, data_parallel=3), "3 data × context-parallel ranks"),
        (request(DEEPSEEK_V3, groups=True), "multi-head latent attention"),
    ):
        assert documents.group_flags(refused) == ()
        assert why in documents.document_notes(refused)[-1]
