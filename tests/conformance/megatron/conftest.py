"""Megatron-LM's own argument parser and process groups, run on a CPU, as the judge of what we emit.

The three steps are those that ``pretrain_gpt.py`` takes before it touches a GPU: ``parse_args`` (flags and types),
``validate_args`` (degrees, batch, schedules) and ``core_transformer_config_from_args`` (heads, layouts, recompute).
What is replaced, and why:

* ``typing.override`` is from Python 3.12; the wheel works on 3.11 with the one of ``typing_extensions``.
* ``torch.cuda.get_device_properties`` and ``get_device_capability`` answer for an H100 (compute capability 9.0).
* :data:`CPU_OVERRIDES` replace what needs Transformer Engine or Apex, neither of which runs without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

# Transformer Engine is no dependency of the judge: its choice of kernels decides nothing that a plan says.
CPU_OVERRIDES = ("--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm")
HOPPER = types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)


class MegatronJudge:
    """Megatron-LM, imported once; every question is answered in this process."""

    REFUSALS = (AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError, SystemExit)

    def __init__(self) -> None:
        import typing_extensions

        if not hasattr(typing, "override"):
            setattr(typing, "override", typing_extensions.override)  # noqa: B010 - mypy knows no such attribute in 3.11
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            import torch
            from megatron.core import num_microbatches_calculator, parallel_state
            from megatron.training import arguments

        torch.cuda.get_device_properties = lambda *_: HOPPER
        torch.cuda.get_device_capability = lambda *_: (HOPPER.major, HOPPER.minor)
        self.torch = torch
        self.arguments = arguments
        self.parallel_state = parallel_state
        self.microbatches = num_microbatches_calculator

    @property
    def option_strings(self) -> frozenset[str]:
        """Every flag that the parser knows, written out."""
        with _silent():
            parser = self.arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        return frozenset(parser._option_string_actions)

    def refusal(self, flags: Sequence[str], *, world_size: int, environment: Mapping[str, str]) -> str | None:
        """Why Megatron refuses ``flags``, or None where all three steps pass."""
        try:
            self.config(flags, world_size=world_size, environment=environment)
        except self.REFUSALS as refusal:
            return f"{type(refusal).__name__}: {refusal}"
        return None

    def config(self, flags: Sequence[str], *, world_size: int, environment: Mapping[str, str]) -> tuple[Any, Any]:
        """(arguments, transformer configuration) after the three steps and the count of micro-batches."""
        argv = ["pretrain_gpt.py", *flags, *CPU_OVERRIDES]
        variables = {**environment, "WORLD_SIZE": str(world_size), "RANK": "0"}
        with _environment(variables), _argv(argv), _silent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = self.arguments.validate_args(self.arguments.parse_args())
            config = self.arguments.core_transformer_config_from_args(parsed)
            # Megatron divides the training batch when it starts; validate_args does not.
            self.microbatches.ConstantNumMicroBatchesCalculator(
                parsed.global_batch_size, parsed.micro_batch_size, parsed.data_parallel_size, False, 0
            )
        return parsed, config

    def layers_per_chunk(
        self, flags: Sequence[str], *, world_size: int, environment: Mapping[str, str]
    ) -> tuple[int, ...]:
        """Layers that Megatron builds in each chunk, in the order in which a token visits them."""
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        parsed, config = self.config(flags, world_size=world_size, environment=environment)
        stages, virtual = parsed.pipeline_model_parallel_size, parsed.virtual_pipeline_model_parallel_size
        built: dict[tuple[int, int], int] = {}
        for stage in range(stages):
            with self.process_groups(parsed, rank=stage * world_size // stages):
                for chunk in range(virtual or 1):
                    vp_stage = chunk if virtual else None
                    built[chunk, stage] = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
        return tuple(built[place] for place in sorted(built))

    def can_shard_fully(self, parsed: Any) -> bool:
        """Whether Megatron-FSDP finds its mesh of data and tensor parallel ranks."""
        from einops import EinopsError
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter

        with self.process_groups(parsed, rank=0):
            sharded = self.parallel_state.get_data_parallel_group(with_context_parallel=True)
            try:
                mcore_fsdp_adapter._get_dp_tp_mesh(sharded, self.parallel_state.get_tensor_model_parallel_group())
            except EinopsError:
                return False
        return True

    def padded_vocab_size(self, parsed: Any, vocab_size: int) -> int:
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

        return vocab_size_with_padding(vocab_size, parsed, logging_enabled=False)

    def torchrun_arguments(self, argv: Sequence[str]) -> Any:
        from torch.distributed.run import get_args_parser

        return get_args_parser().parse_args(list(argv))

    @property
    def torchrun_options(self) -> frozenset[str]:
        from torch.distributed.run import get_args_parser

        return frozenset(get_args_parser()._option_string_actions)

    def coordinates(self, parsed: Any, rank: int) -> dict[str, int]:
        """Where ``rank`` sits, by ``initialize_model_parallel``."""
        state = self.parallel_state
        with self.process_groups(parsed, rank=rank):
            return {
                "tensor": state.get_tensor_model_parallel_rank(),
                "context": state.get_context_parallel_rank(),
                "data": state.get_data_parallel_rank(),
                "pipeline": state.get_pipeline_model_parallel_rank(),
                "expert": state.get_expert_model_parallel_rank(),
                "expert_tensor": state.get_expert_tensor_parallel_rank(),
                "expert_data": state.get_expert_data_parallel_rank(),
            }

    @contextlib.contextmanager
    def process_groups(self, parsed: Any, *, rank: int) -> Iterator[None]:
        """Megatron's groups as ``rank`` sees them, on torch's fake process group."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        state, distributed = self.parallel_state, self.torch.distributed
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            distributed.init_process_group("fake", rank=rank, world_size=parsed.world_size, store=FakeStore())
            try:
                state.initialize_model_parallel(
                    parsed.tensor_model_parallel_size,
                    parsed.pipeline_model_parallel_size,
                    parsed.virtual_pipeline_model_parallel_size,
                    context_parallel_size=parsed.context_parallel_size,
                    expert_model_parallel_size=parsed.expert_model_parallel_size,
                    expert_tensor_parallel_size=parsed.expert_tensor_parallel_size,
                    num_distributed_optimizer_instances=parsed.num_distributed_optimizer_instances,
                    order="tp-cp-ep-pp-dp" if parsed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                    create_gloo_process_groups=False,
                )
                yield
            finally:
                state.destroy_model_parallel()
                distributed.destroy_process_group()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _argv(argv: Sequence[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, list(argv)
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@pytest.fixture(scope="session")
def megatron() -> MegatronJudge:
    return MegatronJudge()
