"""What a vLLM or an SGLang command line says: degrees, and the settings of the engine.

The rows are the mapping tables of the serving targets, in both directions: flags as in vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.planner.emit.terms import Term, Words, count_term, read_all, stated
from meshplan.planner.imports.reading import Given, Reading, as_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One serving engine.

    Args:
        name: of the source, and ``constraints.target``.
        programs: what a command line of it contains.
        degrees: rows of its table.
        settings: flag → our name, for what is no degree; the first flag of a name is the one to write.
        model_flags: where the model stands; a word without a flag counts too.
    """

    name: str
    programs: tuple[str, ...]
    degrees: tuple[Term, ...]
    settings: Mapping[str, str]
    model_flags: tuple[str, ...]


def _degree(name: str, *keys: str) -> Term:
    return count_term(keys[0], name, aliases=keys[1:], verified_by="")


def _switch_experts(words: Words) -> Mapping[str, Any]:
    return stated(spreads_experts=True if "--enable-expert-parallel" in words else None)


VLLM = Engine(
    name="vllm",
    programs=("vllm", "vllm.entrypoints"),
    degrees=(
        _degree("tensor_parallel", "--tensor-parallel-size", "-tp"),
        _degree("pipeline_parallel", "--pipeline-parallel-size", "-pp"),
        _degree("data_parallel", "--data-parallel-size", "-dp"),
        _degree("decode_context_parallel", "--decode-context-parallel-size", "-dcp"),
        # vLLM has a switch: experts go over tensor × data parallel devices, or nowhere.
        Term(
            name="expert_parallel",
            words=lambda config, _: {"--enable-expert-parallel": ""} if config.expert_parallel > 1 else {},
            read=_switch_experts,
            keys=("--enable-expert-parallel",),
            said_by="--enable-expert-parallel",
            verified_by="",
        ),
    ),
    settings={
        "--max-model-len": "max_sequence_length",
        "--max-num-seqs": "max_num_sequences",
        "--max-num-batched-tokens": "max_batched_tokens",
        "--gpu-memory-utilization": "memory_fraction",
        "--kv-cache-dtype": "kv_cache_dtype",
        "--quantization": "quantization",
        "--dtype": "dtype",
    },
    model_flags=("--model",),
)
SGLANG = Engine(
    name="sglang",
    programs=("sglang.launch_server", "sglang"),
    degrees=(
        _degree("tensor_parallel", "--tensor-parallel-size", "--tp-size", "--tp"),
        _degree("pipeline_parallel", "--pipeline-parallel-size", "--pp-size"),
        _degree("data_parallel", "--data-parallel-size", "--dp-size", "--dp"),
        _degree("expert_parallel", "--expert-parallel-size", "--ep-size", "--ep"),
    ),
    settings={
        "--context-length": "max_sequence_length",
        "--max-running-requests": "max_num_sequences",
        "--chunked-prefill-size": "max_batched_tokens",
        "--mem-fraction-static": "memory_fraction",
        "--kv-cache-dtype": "kv_cache_dtype",
        "--quantization": "quantization",
        "--dtype": "dtype",
    },
    model_flags=("--model-path", "--model"),
)
ENGINES = (VLLM, SGLANG)


def _number(text: Any) -> Any:
    """A setting as a number where it is one: ``auto`` and ``fp8`` stay text."""
    for convert in (int, float):
        try:
            value = convert(text)
        except (TypeError, ValueError):
            continue
        return value if math.isfinite(value) else text
    return text


def read_engine(engine: Engine, given: Given, loose: Sequence[str]) -> Reading:
    """Degrees and settings of one engine.

    Args:
        engine: whose words they are.
        given: words of the command.
        loose: words that belong to no flag, such as the model of ``vllm serve MODEL``.
    """
    reading = Reading(source=engine.name, target=engine.name, kind="serving", launch=given.launch)
    reading.take(read_all(engine.degrees, given.words))
    for term in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
        reading.assume(term, 1, f"not stated; {engine.name}'s default")
    spreads = reading.values.pop("spreads_experts", False)
    spread_over = reading.values["tensor_parallel"] * reading.values["data_parallel"]
    reading.assume(
        "expert_parallel", spread_over if spreads else 1, "tensor × data parallel" if spreads else "not stated"
    )
    reading.settings = {
        ours: _number(given.words[flag]) for flag, ours in engine.settings.items() if flag in given.words
    }
    named = [given.words[flag] for flag in engine.model_flags if flag in given.words]
    reading.model = str((named or list(loose) or [""])[0])
    known = {key for term in engine.degrees for key in term.keys} | engine.settings.keys() | set(engine.model_flags)
    reading.unread += [as_written(word, value) for word, value in given.words.items() if word not in known]
    return reading
