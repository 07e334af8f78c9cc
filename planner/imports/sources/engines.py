"""What a vLLM or an SGLang command line states: degrees and limits of one server, read by the emitters' own tables.

Checked flags: vLLM 0.33, SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.terms import Term, read_all
from meshplan.planner.imports.reading import Given, Reading, as_written, with_dashes
from meshplan.planner.serving.problem.spec import LayoutSpec

_DEGREES = (
    *("tensor_parallel", "context_parallel", "pipeline_parallel"),
    *("attention_data_parallel", "expert_parallel"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """The reader of one serving engine.

    Args:
        name: of the source, and ``constraints.target``.
        terms: the engine's mapping table.
        programs: how the program's name begins.
        subcommands: arguments without a flag that are not the model.
        model_flags: where the model stands; an argument without a flag counts too.
    """

    name: str
    terms: tuple[Term, ...]
    programs: tuple[str, ...]
    subcommands: tuple[str, ...] = ()
    model_flags: tuple[str, ...]

    def recognises(self, given: Given) -> bool:
        """Whether the command starts this engine."""
        program = "".join(given.launch.program[:1])
        return program.rsplit("/", 1)[-1] == self.name or program.startswith(self.programs)

    def read(self, given: Given) -> Reading:
        """Degrees and limits; what is understood but has no place in a spec is listed."""
        reading = Reading(source=self.name, target=self.name, kind="serving", launch=given.launch)
        arguments = with_dashes(given.arguments)
        reading.take(read_all(self.terms, arguments))
        for degree in _DEGREES:
            reading.assume(degree, 1, "no flag sets it")
        reading.assume("num_workers", 1, "one server")
        reading.left_out += [
            flags for term, flags in reading.source_flags.items() if term not in LayoutSpec.model_fields
        ]
        named = [arguments[flag] for flag in self.model_flags if flag in arguments]
        loose = [argument for argument in given.loose if argument not in self.subcommands]
        reading.model = str((named or loose or [""])[0])
        known = {*self.model_flags, *(key for term in self.terms for key in term.keys)}
        reading.unread += [as_written(flag, value) for flag, value in arguments.items() if flag not in known]
        return reading


VLLM = EngineSource(
    name="vllm",
    terms=vllm.TERMS,
    programs=("vllm.entrypoints",),
    subcommands=("serve",),
    model_flags=("--model",),
)
SGLANG = EngineSource(
    name="sglang",
    terms=(*sglang.TERMS, sglang.REPLICAS),
    programs=("sglang",),
    model_flags=("--model-path", "--model"),
)
