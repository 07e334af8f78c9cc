"""Servers that share a GPU have a part of one each, on the page as well."""

from __future__ import annotations

import itertools

import pytest
from emit_cases import H100, LLAMA_70B
from serving_cases import aggregated, layout, serving_plan

from meshplan.catalogs.constants.machines.device_shares import DeviceShare, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import mig_profiles
from meshplan.cli.web.pages.views.serving import equation, sentences


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (MpsShare.of(H100.memory_bytes, 2), "Every GPU runs 2 servers at the same time (CUDA MPS)."),
        (mig_profiles()[H100.slug]["3g.40gb"], "Every GPU is cut into 2 parts (3g.40gb), with a server in each."),
    ],
)
def test_parts_of_gpus_are_not_whole_ones(share: DeviceShare, said: str) -> None:
    plan = serving_plan(LLAMA_70B, aggregated("vllm", layout(1), num_workers=4, share=share))
    told = list(itertools.islice(sentences(plan), 2))
    assert told == ["Run 4 copies of the model on 2 GPUs, with vllm.", said]
    assert equation(plan.config) == "2 GPUs = 4 replicas × part of a GPU"


def test_whole_gpus_are_said_of_each() -> None:
    plan = serving_plan(LLAMA_70B, aggregated("vllm", layout(4), num_workers=2))
    assert next(sentences(plan)) == "Run 2 copies of the model on 4 GPUs each, with vllm."
    assert equation(plan.config) == "8 GPUs = 2 replicas × TP4"
