"""Rows of the mapping table that serving engines share, by the name of the engine's flag; see :mod:`..terms`.

An engine's table is written for one pool and read back from the command line of one of its servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.terms import Arguments, Rows, Term, count, fraction, stated
from meshplan.planner.serving.problem.config import Pool
from meshplan.planner.serving.problem.engines.rules import EngineRules
from meshplan.planner.serving.problem.expert_routing import Dispatch
from meshplan.planner.serving.problem.quantization import published_formats

# How often a limit counts, by the data-parallel ranks that the arguments state.
Ranks = Callable[[Arguments], int]


# What an engine's share of a device's memory counts (estimator.memory.share_of_device) → what reading it is called: a
# share of the total is a plan's own, memory_fraction; the others become one where the memory of the model is known.
MEMORY_SHARES = {"total": "memory_fraction", "static": "static_memory_fraction", "free": "free_memory_fraction"}
WITHOUT_BF16 = {"volta", "turing"}  # compute capability 7
# Families whose checkpoints bring their tokenizer or configuration as Python files, which an engine runs only if told
# to: docs/deploy_guidance.md of moonshotai/Kimi-K2-Instruct, model cards of moonshotai/Kimi-Linear-48B-A3B-Instruct,
# internlm/internlm-7b and MiniMaxAI/MiniMax-Text-01.
IN_CODE = {"kimi_k2", "kimi_linear", "internlm", "minimax_text_01"}
POOLED = "pooled"  # a task that a command names no further: vectors, or scores where the checkpoint has a classifier


class ServingRows(Rows):
    """Makes the rows of an engine's table."""

    __slots__ = ()

    def degree(self, *flags: str, name: str, note: str = "", always: bool = False, verified_by: str = "") -> Term:
        """A parallel degree behind one flag.

        Args:
            flags: the one that is written, then other spellings that mean the same.
            name: field of the layout.
            note: for the support matrix.
            always: written even where it is 1, the engine's default.
            verified_by: what checked it, where that differs.
        """

        def write(_: ServingRequest, pool: Pool) -> Arguments:
            degree = getattr(pool.layout, name)
            return {flags[0]: str(degree)} if always or degree > 1 else {}

        def read(arguments: Arguments) -> Mapping[str, Any]:
            return stated(**{name: count(arguments, *flags)})

        return self.term(name, write, read, *flags, expressed_by=flags[0] + note, verified_by=verified_by)

    def tensor(
        self,
        *flags: str,
        ranks_of: Callable[[Pool], int],
        inside: Mapping[str, Ranks],
        note: str,
        verified_by: str = "",
    ) -> Term:
        """tensor_parallel behind a flag that counts further degrees: ranks = tensor × the degrees ``inside``.

        Args:
            flags: the one that is written, then other spellings.
            ranks_of: pool → ranks that the flag counts.
            inside: flags of the degrees inside it → how they are read.
            note: for the support matrix.
            verified_by: what checked it, where that differs.
        """

        def read(arguments: Arguments) -> Mapping[str, Any]:
            ranks, degrees = count(arguments, *flags), 1
            for degree_of in inside.values():
                degrees *= degree_of(arguments)
            if (ranks or 1) < degrees:
                product = " × ".join(inside)
                raise ValueError(f"{flags[0]} {ranks or 1} is less than the {degrees} ranks of {product} inside it")
            return {} if ranks is None else {"tensor_parallel": ranks // degrees}

        def write(_: ServingRequest, pool: Pool) -> Arguments:
            return {flags[0]: str(ranks_of(pool))}

        expressed_by = flags[0] + note
        return self.term("tensor_parallel", write, read, *flags, expressed_by=expressed_by, verified_by=verified_by)

    def max_num_seqs(self, flag: str, *, note: str, ranks: Ranks | None = None) -> Term:
        """Most running requests; ``ranks`` where the engine's limit is that of one data-parallel rank."""

        def write(_: ServingRequest, pool: Pool) -> Arguments:
            parts = 1 if ranks is None else pool.layout.attention_data_parallel
            return {flag: str(pool.limits.max_num_seqs // parts)}

        def read(arguments: Arguments) -> Mapping[str, Any]:
            limit = count(arguments, flag)
            return stated(max_num_seqs=None if limit is None else limit * (1 if ranks is None else ranks(arguments)))

        return self.term("max_num_seqs", write, read, flag, expressed_by=flag + note)

    def max_batched_tokens(self, flag: str) -> Term:
        """Token budget of one iteration of one data-parallel rank."""
        return self.term(
            "max_batched_tokens",
            lambda _, pool: {flag: str(pool.limits.max_batched_tokens)},
            lambda arguments: stated(max_batched_tokens=count(arguments, flag)),
            flag,
        )

    def memory(
        self,
        write: Callable[[ServingRequest, Pool], Arguments],
        *flags: str,
        of: str,
        expressed_by: str,
        verified_by: str = "",
    ) -> Term:
        """Share of a device's memory that a worker takes.

        Args:
            write: of the plan's share, as the engine counts it.
            flags: the one that is written, then other spellings that mean the same.
            of: what the engine's share is one of: a key of :data:`MEMORY_SHARES`.
            expressed_by: for the support matrix.
            verified_by: what checked it, where that differs.
        """

        def read(arguments: Arguments) -> Mapping[str, Any]:
            return stated(**{MEMORY_SHARES[of]: fraction(arguments, *flags)})

        return self.term("memory_fraction", write, read, *flags, expressed_by=expressed_by, verified_by=verified_by)

    def stream_interval(self, flag: str) -> Term:
        """Tokens that are sent to a client at once; not written where every token is sent by itself, the default."""

        def write(_: ServingRequest, pool: Pool) -> Arguments:
            tokens = pool.limits.stream_interval
            return {} if tokens == 1 else {flag: str(tokens) if flag.startswith("--") else tokens}

        return self.term(
            "stream_interval", write, lambda arguments: stated(stream_interval=count(arguments, flag)), flag
        )

    def api_servers(self, flag: str) -> Term:
        """API servers of a worker; not written where the engine starts as many as it does by itself."""

        def write(_: ServingRequest, pool: Pool) -> Arguments:
            return {flag: str(pool.limits.api_servers)} if pool.limits.api_servers else {}

        return self.term("api_servers", write, lambda arguments: stated(api_servers=count(arguments, flag)), flag)

    def off_switch(self, name: str, flag: str, *, note: str = "") -> Term:
        """A limit that is on by default, behind a flag that switches it off."""
        return self.term(
            name,
            lambda _, pool: {} if getattr(pool.limits, name) else {flag: ""},
            lambda arguments: {name: False} if flag in arguments else {},
            flag,
            expressed_by=flag + note,
        )

    def remote_code(self, flag: str) -> Term:
        """Leave to run the Python files of a checkpoint, where it does not start without (:data:`IN_CODE`)."""

        def write(request: ServingRequest, _: Pool) -> Arguments:
            return {flag: ""} if request.shape.family in IN_CODE else {}

        return self.write_only("remote_code", write, f"{flag} (checkpoints whose tokenizer is code)")

    def max_sequence_length(self, flag: str) -> Term:
        """Longest prompt and answer together; left to the model's configuration where the request names none."""

        def write(request: ServingRequest, _: Pool) -> Arguments:
            return {} if request.max_sequence_length is None else {flag: str(request.max_sequence_length)}

        return self.term(
            "max_sequence_length", write, lambda arguments: stated(max_sequence_length=count(arguments, flag)), flag
        )


def ranks_of_flags(*flags: str) -> Ranks:
    """How a degree is read from one flag; 1 where it is not there."""
    return lambda arguments: count(arguments, *flags) or 1


def refuse_serving(rules: EngineRules, request: ServingRequest) -> None:
    """Stop where the engine cannot express the plan.

    Raises:
        CannotExpressError: with what is wrong and the nearest that can be expressed.
    """
    config = request.config
    if (request.plan.spec.get("experts") or {}).get("dispatch") == Dispatch.STAYS.value:
        raise CannotExpressError(
            rules.name,
            "tokens that stay with their experts: in every engine they return to their attention rank",
            "a plan with experts.dispatch: returns",
        )
    if config.engine != rules.name:
        raise CannotExpressError(
            rules.name,
            f"a plan for {config.engine}, whose times and limits are that engine's",
            f"target {config.engine}, or a plan with engine {rules.name}",
        )
    wrong = rules.broken(request.shape, config)
    if wrong:
        raise CannotExpressError(
            rules.name, "this configuration: " + "; ".join(wrong), f"what meshplan plan finds with engine {rules.name}"
        )


def map_refused(rules: EngineRules, because: str) -> Callable[[ServingRequest, Pool], Arguments]:
    """The ``write`` of an engine that cannot load a map of experts: it refuses plans that have one.

    Args:
        rules: of the engine.
        because: why.
    """

    def write(request: ServingRequest, _: Pool) -> Arguments:
        if request.config.expert_map is None:
            return {}
        raise CannotExpressError(
            rules.name, f"a map of experts ({because})", "a plan without experts.placement, or target sglang"
        )

    return write


def drafts_from_text(request: ServingRequest) -> bool:
    """Whether drafts are looked up in the request's own text (n-grams), which needs no weights."""
    speculation = request.config.speculation
    return speculation is not None and speculation.method == "ngram"


def uses_own_layers(rules: EngineRules, request: ServingRequest) -> bool:
    """Whether drafts of speculative decoding come from the model's own prediction layers, not from a draft model.

    Raises:
        CannotExpressError: there is neither.
    """
    method = "" if request.config.speculation is None else request.config.speculation.method
    if request.draft_model and method != "mtp":
        return False
    if method in ("eagle3", "draft_model"):
        raise CannotExpressError(rules.name, f"{method} without its checkpoint", "speculation.draft_model")
    if not request.shape.num_nextn_predict_layers:
        raise CannotExpressError(
            rules.name, "speculation without a draft", "a draft_model, or a model with prediction layers of its own"
        )
    return True


def activations(request: ServingRequest, pool: Pool) -> str:
    """The 16-bit type of a server, of its cache too: float16 where the plan or the devices say so, else bfloat16.

    Engines refuse bfloat16 below compute capability 8.0 (vllm/platforms/cuda.py, check_if_supports_dtype).
    """
    device = request.host_type(pool.node_type).device
    is_early = device is not None and device.architecture in WITHOUT_BF16
    return "float16" if is_early or "fp16" in {pool.quantization.attention, pool.quantization.mlp} else "bfloat16"


def one_scheme(rules: EngineRules, request: ServingRequest, pool: Pool) -> str | None:
    """The scheme into which the engine quantizes a 16-bit checkpoint; None where the checkpoint holds the formats.

    Raises:
        CannotExpressError: the engine cannot make the formats itself.
    """
    formats = pool.quantization
    used = {formats.mlp, formats.attention}
    if request.shape.moe is not None:
        used.add(formats.experts)
    narrow = sorted(used - {"bf16", "fp16"})
    published = None if request.quantized_checkpoint is not None else published_formats(request.shape)
    if published is not None and not published.schemes <= used:
        held = published.with_cache("bf16").label
        raise CannotExpressError(
            rules.name,
            f"{formats.label} from the published checkpoint, which holds {held}",
            f"a plan in {held}, or --model-path of a checkpoint whose name tells the plan's formats",
        )
    if not narrow or all(request.is_quantized(scheme) for scheme in narrow):
        return None
    if len(used) > 1 or narrow[0] not in rules.online:
        raise CannotExpressError(
            rules.name,
            f"{formats.label} from a 16-bit checkpoint",
            "a checkpoint that holds them and says so (--model-path ORGANISATION/MODEL-AWQ, …-FP8), or one of "
            + ", ".join(("bf16", *rules.online)),
        )
    return narrow[0]
