"""What a vLLM or an SGLang command line says: degrees and limits of one server.

The degrees are read by the emitters' own ``degrees``; here stand only the other spellings of their flags, and which
limits a spec has a place for. Checked flags: vLLM 0.33, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshplan.catalogs.errors import Problem
from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.training.terms import Words, count
from meshplan.planner.imports.reading import Given, Reading, as_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One serving engine.

    Args:
        name: of the source, and ``constraints.target``.
        degrees: words of a command → our degrees (the emitter's own reader).
        spellings: the flag that the emitter writes → the other ones that mean the same.
        required: flags that ``degrees`` looks for, with the engine's default.
        limits: flag → our name.
        model_flags: where the model stands; a word without a flag counts too.
        switches: flags without a value that ``degrees`` looks at.
        seqs_of_one_rank: the limit of sequences is that of one data-parallel rank.
        tokens_of_all_ranks: the limit of tokens is divided by the data-parallel ranks.
    """

    name: str
    degrees: Callable[[Sequence[str]], Mapping[str, int]]
    spellings: Mapping[str, tuple[str, ...]]
    required: Mapping[str, str]
    limits: Mapping[str, str]
    model_flags: tuple[str, ...]
    switches: tuple[str, ...] = field(default=())
    seqs_of_one_rank: bool = False
    tokens_of_all_ranks: bool = False


VLLM = Engine(
    name="vllm",
    degrees=vllm.degrees,
    spellings={
        "--tensor-parallel-size": ("-tp",),
        "--pipeline-parallel-size": ("-pp",),
        "--data-parallel-size": ("-dp",),
        "--decode-context-parallel-size": ("-dcp",),
    },
    required={"--pipeline-parallel-size": "1"},
    limits={"--max-num-seqs": "max_num_seqs", "--max-num-batched-tokens": "max_batched_tokens"},
    model_flags=("--model",),
    switches=("--enable-expert-parallel",),
    seqs_of_one_rank=True,
)
SGLANG = Engine(
    name="sglang",
    degrees=sglang.degrees,
    spellings={
        "--tp-size": ("--tensor-parallel-size", "--tp"),
        "--pp-size": ("--pipeline-parallel-size", "--pp"),
        "--ep-size": ("--expert-parallel-size", "--ep"),
        "--attn-dp-size": (),
        "--dcp-size": (),
    },
    required={"--tp-size": "1", "--pp-size": "1"},
    limits={"--max-running-requests": "max_num_seqs", "--chunked-prefill-size": "max_batched_tokens"},
    model_flags=("--model-path", "--model"),
    tokens_of_all_ranks=True,
)
_SGLANG_REPLICAS = ("--dp-size", "--data-parallel-size", "--dp")
_SGLANG_DP_ATTENTION = "--enable-dp-attention"


def read_engine(engine: Engine, given: Given, loose: Sequence[str]) -> Reading:
    """Degrees and limits of one engine.

    Args:
        engine: whose words they are.
        given: words of the command.
        loose: words that belong to no flag, such as the model of ``vllm serve MODEL``.
    """
    reading = Reading(source=engine.name, target=engine.name, kind="serving", launch=given.launch)
    words = {word.replace("_", "-") if word.startswith("--") else word: value for word, value in given.words.items()}
    if engine is SGLANG:
        words = _sglang_replicas(reading, words)
    known = {*engine.limits, *engine.model_flags, *engine.switches, *_known(engine)}
    try:
        said = _canonical(engine, words)
        found = engine.degrees([part for pair in said.items() for part in pair if part])
        limits = {name: count(words, flag) for flag, name in engine.limits.items() if flag in words}
    except ValueError as error:
        reading.problems.append(Problem(path="fixed", message=str(error)))
        return reading
    text = " ".join(" ".join(pair).strip() for pair in said.items())
    for name, value in found.items():
        if value == 1:
            reading.assume(name, 1, "no flag says another")
        else:
            reading.values[name], reading.said_by[name] = value, text
    if reading.values["tensor_parallel"] < 1:
        reading.say("fixed", f"{', '.join(map(' '.join, said.items()))}: the ranks inside a stage exceed it")
    ranks = found["attention_data_parallel"]
    for name, limit in limits.items():
        if limit is not None:
            times = ranks if name == "max_num_seqs" and engine.seqs_of_one_rank else 1
            parts = ranks if name == "max_batched_tokens" and engine.tokens_of_all_ranks else 1
            reading.values[name] = max(1, limit * times // parts)
    reading.assume("num_workers", 1, "one server")
    named = [words[flag] for flag in engine.model_flags if flag in words]
    reading.model = str((named or list(loose) or [""])[0])
    reading.unread += [as_written(word, value) for word, value in words.items() if word not in known]
    return reading


def _known(engine: Engine) -> set[str]:
    return {flag for canonical, others in engine.spellings.items() for flag in (canonical, *others)}


def _canonical(engine: Engine, words: Words) -> dict[str, str]:
    """The words of the degrees as the emitter writes them, each a number."""
    said = dict(engine.required)
    for canonical, others in engine.spellings.items():
        value = count(words, canonical, *others)
        if value is not None:
            said[canonical] = str(value)
    return {**said, **{switch: "" for switch in engine.switches if switch in words}}


def _sglang_replicas(reading: Reading, words: Words) -> dict[str, str]:
    """``--dp-size`` means replicas, or data-parallel attention inside the stage where that is switched on."""
    rest = {word: value for word, value in words.items() if word not in {*_SGLANG_REPLICAS, _SGLANG_DP_ATTENTION}}
    try:
        replicas = count(words, *_SGLANG_REPLICAS)
    except ValueError as error:
        reading.problems.append(Problem(path="fixed", message=str(error)))
        return rest
    if replicas is not None and _SGLANG_DP_ATTENTION in words:
        rest["--attn-dp-size"] = str(replicas)
    elif replicas is not None:
        reading.values["num_workers"] = replicas
    return rest
