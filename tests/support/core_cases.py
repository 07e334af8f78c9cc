"""Small problems that the tests of estimators and solvers share (plain data; no fixtures)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from emit_cases import H100
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.attention import AttentionKind, LatentAttention
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer, RecurrentMixer
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.layers import split_layers_evenly
from meshplan.planner.training.problem.problem import (
    Phase,
    TrainingConfig,
    TrainingLimits,
    TrainingObjective,
    TrainingProblem,
    TrainingWorkload,
)

H100_FP8 = replace(H100, peak_flops_per_s={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}, tdp_w=700.0)

DENSE = ModelShape(
    slug="dense",
    name="a small Llama",
    family="llama",
    num_hidden_layers=6,
    hidden_size=2048,
    intermediate_size=5632,
    gated_mlp=True,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
)
MOE = replace(
    DENSE,
    slug="moe",
    name="a small mixture of experts",
    num_hidden_layers=4,
    moe=MixtureOfExperts(
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_size=1408,
        shared_intermediate_size=1408,
        moe_layers=(False, True, True, True),
    ),
)
LATENT = replace(
    MOE,
    slug="latent",
    name="a small DeepSeek",
    num_key_value_heads=16,
    attention=AttentionKind.MULTI_HEAD_LATENT,
    latent=LatentAttention(
        q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    num_nextn_predict_layers=1,
)
WINDOWED = replace(DENSE, slug="windowed", name="windows of 512", sliding_windows=(512, None) * 3)
HYBRID = replace(
    DENSE,
    slug="hybrid",
    name="state-space layers between attention",
    blocks=LayerBlocks(
        mixers=(Mixer.RECURRENT, Mixer.NONE, Mixer.ATTENTION, Mixer.NONE, Mixer.BOTH, Mixer.RECURRENT),
        has_mlp=(False, True, False, True, True, True),
        recurrent=RecurrentMixer(
            kind="mamba-2",
            num_heads=16,
            split_outputs=2 * 1024 + 2 * 64 + 16,
            output_inputs=1024,
            vector_parameters=8192,
            state_elements=16 * 64 * 64,
            convolution_elements=3 * 1152,
            scan_flops_per_token=2 * (256 * 64 + 16 * (256 * 64 + 2 * 64 * 64)),
            streamed_elements=2 * 1152 + 3 * 1024,
        ),
    ),
)
SMALL_SHAPES = (DENSE, MOE, LATENT, WINDOWED, HYBRID)


def machine_with(num_devices: int, *, device: Device = H100_FP8, **fields: Any) -> Machine:
    """Hosts of 8 H100 on NDR InfiniBand, 400 Gb/s a device."""
    defaults: dict[str, Any] = {
        "domain_size": 8,
        "devices_per_host": 8,
        "scale_up_bytes_per_s": 450e9,
        "scale_up_latency_s": 2e-6,
        "scale_out_bytes_per_s": 50e9,
        "scale_out_latency_s": 5e-6,
        "usd_per_hour_per_device": 2.5,
    }
    return Machine(device=device, num_devices=num_devices, **{**defaults, **fields})


def problem_of(
    shape: ModelShape = DENSE,
    *,
    num_devices: int = 8,
    global_batch_size: int = 16,
    sequence_length: int = 1024,
    precision: str = "bf16",
    phase: Phase = Phase.PRETRAINING,
    objective: TrainingObjective = TrainingObjective.THROUGHPUT,
    rules: FrameworkRules = ANY_FRAMEWORK,
    calibration: Calibration | None = None,
    machine: Machine | None = None,
    limits: dict[str, Any] | None = None,
    fixed: dict[str, Any] | None = None,
    search_over: Collection[str] = (),
) -> TrainingProblem:
    """A small training question with everything looked up."""
    bounds: dict[str, Any] = {"memory_bytes": 80e9, "max_devices": num_devices, **(limits or {})}
    return TrainingProblem(
        shape=shape,
        machine=machine or machine_with(num_devices),
        workload=TrainingWorkload(
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            precision=precision,
            phase=phase,
            lora_rank=16 if phase is Phase.LORA else 0,
        ),
        calibration=calibration or Calibration(framework="any", architecture="any"),
        rules=rules,
        limits=TrainingLimits(**bounds),
        objective=objective,
        num_training_tokens=1e9,
        fixed=fixed or {},
        search_over=frozenset(search_over),
    )


def assert_rows_see_no_other(problem: TrainingProblem, configs: Sequence[TrainingConfig]) -> None:
    """A batch of one layout of layers costs, row by row, what batches of one cost."""
    single = [candidates_of(problem, config) for config in configs]
    names = [name for name in Candidates.__slots__ if name != "split"]
    together = Candidates(
        split=single[0].split, **{name: np.concatenate([getattr(one, name) for one in single]) for name in names}
    )
    args = (problem.shape, problem.machine, problem.workload)
    batch = estimate_training(*args, together, problem.calibration)
    for row, one in enumerate(single):
        alone = estimate_training(*args, one, problem.calibration)
        assert batch.step_s[row] == alone.step_s[0]
        assert batch.safe_bytes[row] == alone.safe_bytes[0]
        assert {name: values[row] for name, values in batch.breakdown_s.items()} == {
            name: values[0] for name, values in alone.breakdown_s.items()
        }


def compute_model_of(problem: TrainingProblem, **choices: Any) -> ComputeModel:
    """What prices the operators of one configuration of the problem."""
    return ComputeModel(
        shape=problem.shape,
        device=problem.machine.device,
        workload=problem.workload,
        candidates=candidates_of(problem, configured(problem, **choices)),
        calibration=problem.calibration,
    )


def configured(problem: TrainingProblem, **choices: Any) -> TrainingConfig:
    """A configuration of a problem, degrees 1 unless given; derived fields follow."""
    chosen: dict[str, Any] = {
        **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "virtual_pipeline_stages", "context_parallel"), 1),
        **dict.fromkeys(("data_parallel", "expert_parallel", "expert_tensor_parallel", "micro_batch_size"), 1),
        "zero_stage": 1,
        "activation_recompute": "none",
        **choices,
    }
    stages, chunks = chosen["pipeline_parallel"], chosen["virtual_pipeline_stages"]
    workload = problem.workload
    derived: dict[str, Any] = {
        "data_parallel_shard": chosen["data_parallel"] if chosen["zero_stage"] else 1,
        "sequence_parallel": chosen["tensor_parallel"] > 1,
        "pipeline_schedule": "none" if stages == 1 else "interleaved" if chunks > 1 else "1f1b",
        "layers_per_chunk": split_layers_evenly(problem.shape.num_hidden_layers, stages * chunks),
        "num_microbatches": workload.global_batch_size // (chosen["micro_batch_size"] * chosen["data_parallel"]),
        "global_batch_size": workload.global_batch_size,
        "sequence_length": workload.sequence_length,
        "precision": workload.precision,
    }
    return TrainingConfig(**{**derived, **chosen})


@st.composite
def questions(draw: st.DrawFn) -> tuple[TrainingProblem, TrainingConfig]:
    """A small problem and one of its legal configurations."""
    shape = draw(st.sampled_from(SMALL_SHAPES))
    problem = problem_of(
        shape,
        num_devices=64,
        global_batch_size=draw(st.sampled_from((32, 64, 96))),
        sequence_length=draw(st.sampled_from((512, 2048, 8192))),
        precision=draw(st.sampled_from(("bf16", "fp16", "fp8"))),
        phase=draw(st.sampled_from((Phase.PRETRAINING, Phase.FINE_TUNING, Phase.LORA))),
    )
    tensor = draw(st.sampled_from((1, 2, 4, 8)))
    context = draw(st.sampled_from((1, 2, 4)))
    data = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    stages = draw(st.sampled_from((1, 2, 4)))
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    experts = 1 if shape.moe is None else draw(st.sampled_from([e for e in (1, 2, 4, 8) if tensor * data % e == 0]))
    config = configured(
        problem,
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        pipeline_parallel=stages,
        expert_parallel=experts,
        zero_stage=zero,
        activation_recompute=draw(st.sampled_from(("none", "selective", "full"))),
    )
    return problem, config
