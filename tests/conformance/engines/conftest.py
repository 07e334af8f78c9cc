"""The parsers of vLLM and SGLang, run on a machine without a GPU that answers as an H100 host would.

What is replaced, and why:

* kernels, grammars and codecs (:mod:`stand_ins`): they bring gigabytes and decide nothing that a plan says;
* ``torch.cuda`` answers for eight H100s, and vLLM's platform is its CUDA platform with those answers, so that neither
  engine falls back to the rules of a CPU build;
* vLLM inspects a model's class in a process of its own, which would not see the stand-ins: here in this one.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_configs import write_config
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL, QWEN3_4B

HERE = Path(__file__).parent
SHAPES = (LLAMA_70B, MIXTRAL, DEEPSEEK_V3, QWEN3_4B)
NAME, CAPABILITY, MEMORY_BYTES, NUM_DEVICES = "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30, 8
KERNELS = (
    *("cutlass", "cv2", "decord", "deep_ep", "deep_gemm", "depyf", "flash_attn", "flashinfer", "humming", "kernels"),
    *("llguidance", "lmformatenforcer", "mcp", "outlines", "outlines_core", "quack", "sgl_kernel", "tilelang", "timm"),
    *("torch_memory_saver", "torchaudio", "torchvision", "tvm_ffi", "xgrammar"),
    *(f"vllm.{name}" for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C", "_flashmla_C")),
    "vllm.vllm_flash_attn",
)
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}


def _pretend() -> Any:
    """Stand-ins, eight H100s, no network; before the first import of an engine."""
    sys.path.insert(0, str(HERE))
    import stand_ins

    os.environ.update(NO_NETWORK)
    stand_ins.install(*KERNELS)
    import torch

    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], name=NAME, total_memory=MEMORY_BYTES, multi_processor_count=132
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: NUM_DEVICES
    torch.cuda.get_device_name = lambda *_: NAME
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.mem_get_info = lambda *_: (MEMORY_BYTES, MEMORY_BYTES)
    torch.version.cuda = "13.0"
    # Fake kernels of operators that the stand-ins do not register.
    torch.library.register_fake = lambda *_, **__: lambda function: function
    for name in ("_C", "_moe_C", "_C_cache_ops", "_qutlass_C"):
        setattr(torch.ops, name, stand_ins.Nothing())
    return torch


class VllmJudge:
    """``vllm serve`` up to its engine configuration, imported once."""

    def __init__(self) -> None:
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            _pretend()
            import vllm.platforms
            from vllm.platforms import cuda
            from vllm.platforms.interface import DeviceCapability

            class Platform(cuda.NonNvmlCudaPlatform):
                get_device_capability = classmethod(lambda *_, **__: DeviceCapability(*CAPABILITY))
                get_device_name = classmethod(lambda *_, **__: NAME)
                get_device_total_memory = classmethod(lambda *_, **__: MEMORY_BYTES)
                device_count = classmethod(lambda _: NUM_DEVICES)

            vllm.platforms._current_platform = Platform()
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.entrypoints.cli.serve import make_arg_parser
            from vllm.model_executor.models import registry
            from vllm.usage.usage_lib import UsageContext
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            registry._run_in_subprocess = lambda function: function()
            self.parser = make_arg_parser(FlexibleArgumentParser())
        self.arguments = AsyncEngineArgs
        self.context = UsageContext.OPENAI_API_SERVER

    @property
    def option_strings(self) -> frozenset[str]:
        return frozenset(self.parser._option_string_actions)

    def parsed(self, words: Sequence[str]) -> Any:
        """``words`` after ``vllm serve``."""
        with _silent():
            parsed = self.parser.parse_args(list(words))
        parsed.model = parsed.model_tag
        return parsed

    def config(self, words: Sequence[str]) -> Any:
        """The engine's configuration; no tokenizer is read."""
        parsed = self.parsed([*words, "--skip-tokenizer-init"])
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            arguments = self.arguments.from_cli_args(parsed)
            return arguments.create_engine_config(usage_context=self.context, headless=parsed.headless)

    def refusal(self, words: Sequence[str]) -> str | None:
        try:
            self.config(words)
        except (ValueError, AssertionError, NotImplementedError, TypeError, SystemExit) as refusal:
            return f"{type(refusal).__name__}: {refusal}"
        return None


class SglangJudge:
    """``sglang.launch_server``'s arguments, resolved and checked, imported once."""

    def __init__(self) -> None:
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            _pretend()
            import argparse

            from sglang.srt import server_args
            from sglang.srt.arg_groups.validation_hook import check_server_args

            parser = argparse.ArgumentParser()
            server_args.ServerArgs.add_cli_args(parser)
        self.module, self.check = server_args, check_server_args
        self.option_strings = frozenset(parser._option_string_actions)

    def resolved(self, words: Sequence[str]) -> Any:
        """``words`` after ``python3 -m sglang.launch_server``."""
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            arguments = self.module.prepare_server_args([*words, "--device", "cuda", "--skip-tokenizer-init"])
            arguments.resolve_once()
            self.check(arguments)
        return arguments

    def refusal(self, words: Sequence[str]) -> str | None:
        try:
            self.resolved(words)
        except (ValueError, AssertionError, NotImplementedError, TypeError, RuntimeError, SystemExit) as refusal:
            return f"{type(refusal).__name__}: {refusal}"
        return None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@pytest.fixture(scope="session")
def vllm() -> VllmJudge:
    return VllmJudge()


@pytest.fixture(scope="session")
def sglang() -> SglangJudge:
    return SglangJudge()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a ``config.json`` by slug of the shape."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {shape.slug: str(write_config(shape, folder)) for shape in SHAPES}
