"""What a serving engine's command line states: degrees and limits of one server, read by the emitters' own tables.

Checked flags: vLLM 0.33, SGLang 0.5.23; those of trtllm-serve and llama-server are read in their documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.names import scheme_of
from meshplan.planner.emit.serving import llama_cpp, sglang, trtllm, vllm
from meshplan.planner.emit.serving.script import WORKERS_FILE
from meshplan.planner.emit.serving.terms import MEMORY_SHARES
from meshplan.planner.emit.terms import Term, read_all
from meshplan.planner.imports.reading import Given, Reading, as_written, with_dashes
from meshplan.planner.imports.sources.idle_flags import idle_flags
from meshplan.planner.serving.problem.pins import LayoutSpec

_DEGREES = (
    *("tensor_parallel", "context_parallel", "pipeline_parallel"),
    *("attention_data_parallel", "expert_parallel"),
)


_IN_A_SPEC = frozenset({*LayoutSpec.model_fields, *MEMORY_SHARES.values(), "quantization", "kv_cache", "task"})
# Flags of all engines that state formats, and what they mean in a spec. Checkpoints of these methods hold weights in
# four bits beside 16-bit activations (docs.vllm.ai, "Quantization").
_FORMAT_FLAGS = ("--quantization", "-q", "--kv-cache-dtype", "--dtype")
_SCHEMES = {
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "w4a16"), "w4a16"),
    **dict.fromkeys(("fp8", "fp8_per_tensor", "w8a8_fp8", "fbgemm_fp8", "modelopt", "modelopt_fp8"), "fp8"),
    **dict.fromkeys(("modelopt_fp4", "nvfp4"), "nvfp4"),
    **dict.fromkeys(("w8a8_int8", "int8"), "int8"),
    "mxfp4": "mxfp4",
    "fp8_per_block": "fp8_block",
}


def _take_formats(reading: Reading, arguments: Mapping[str, Any]) -> None:
    """Weights by ``--quantization`` or by the checkpoint's name, the KV cache by its flag."""
    written = str(arguments.get("--quantization", arguments.get("-q", ""))).lower()
    scheme = _SCHEMES.get(written) or scheme_of(reading.model) or None
    if scheme is not None:
        reading.values["quantization"] = scheme
        reading.source_flags["quantization"] = (
            f"--quantization {written}" if written in _SCHEMES else "the model's name"
        )
    elif written:
        reading.unread.append(f"--quantization {written}")
    if str(arguments.get("--kv-cache-dtype", "")).startswith("fp8"):
        reading.values["kv_cache"] = "fp8"
        reading.source_flags["kv_cache"] = f"--kv-cache-dtype {arguments['--kv-cache-dtype']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """The reader of one serving engine.

    Args:
        name: of the source, and ``constraints.target``.
        terms: the engine's mapping table.
        programs: how the program's name begins.
        subcommands: arguments without a flag that are not the model.
        clients: first words of commands of the same name that ask a server and start none.
        model_flags: where the model stands; an argument without a flag counts too.
        has_underscores: its flags are written with underscores.
    """

    name: str
    terms: tuple[Term, ...]
    programs: tuple[str, ...]
    subcommands: tuple[str, ...] = ()
    clients: tuple[tuple[str, ...], ...] = ()
    model_flags: tuple[str, ...]
    has_underscores: bool = False

    def recognises(self, given: Given) -> bool:
        """Whether the command starts this engine."""
        program = "".join(given.launch.program[:1])
        name = program.rsplit("/", 1)[-1]
        command = (name, *given.launch.program[1:])
        if any(command[: len(client)] == client for client in self.clients):
            return False
        return name in {self.name, *self.programs} or program.startswith(self.programs)

    def read(self, given: Given) -> Reading:
        """Degrees and limits; what is understood but has no place in a spec is listed."""
        reading = Reading(source=self.name, target=self.name, kind="serving", launch=given.launch)
        arguments = dict(given.arguments) if self.has_underscores else with_dashes(given.arguments)
        arguments |= given.document
        reading.take(read_all(self.terms, arguments))
        stated: Mapping[str, Any] = {}
        if given.servers is not None:
            reading.launch = replace(given.launch, num_hosts=given.servers.num_hosts)
            stated = {"num_workers": given.servers.num_workers, **given.servers.stated}
        reading.values |= stated
        for replicas in stated.get("mps", []):  # of each replica's share of a device the plan's is the sum
            if "memory_fraction" in reading.values:
                reading.values["memory_fraction"] = round(reading.values["memory_fraction"] * replicas, 6)
        for degree in _DEGREES:
            reading.assume(degree, 1, "no flag sets it")
        reading.assume("num_workers", given.num_replicas, "one server" if given.num_replicas == 1 else "replicas")
        reading.left_out += [flags for term, flags in reading.source_flags.items() if term not in _IN_A_SPEC]
        reading.source_flags |= dict.fromkeys(stated, str(WORKERS_FILE))
        named = [arguments[flag] for flag in self.model_flags if flag in arguments]
        loose = [argument for argument in given.loose if argument not in self.subcommands]
        reading.model = str((named or loose or [""])[0])
        known = {*self.model_flags, *_FORMAT_FLAGS, *(key for term in self.terms for key in term.keys)}
        _take_formats(reading, arguments)
        unknown = {flag: value for flag, value in arguments.items() if flag not in known}
        idle = idle_flags(unknown)
        reading.idle += idle
        reading.unread += [as_written(flag, value) for flag, value in unknown.items() if flag not in idle]
        return reading


VLLM = EngineSource(
    name="vllm",
    terms=vllm.TERMS,
    programs=("vllm.entrypoints",),
    subcommands=("serve",),
    clients=(("vllm", "bench", "serve"), ("vllm", "chat"), ("vllm", "complete")),
    model_flags=("--model",),
)
SGLANG = EngineSource(
    name="sglang",
    subcommands=("serve",),
    terms=(*sglang.TERMS, sglang.REPLICAS),
    programs=("sglang",),
    clients=(("sglang.bench_serving",),),
    model_flags=("--model-path", "--model"),
)
TRTLLM = EngineSource(
    name="trtllm",
    terms=trtllm.TERMS,
    programs=("trtllm-serve",),
    subcommands=("serve",),
    model_flags=("--model",),
    has_underscores=True,
)
LLAMA_CPP = EngineSource(
    name="llama.cpp",
    terms=llama_cpp.TERMS,
    programs=("llama-server", "llama-cli"),
    model_flags=("--model", "-m", "--hf-repo", "-hf", "-hfr"),
)
