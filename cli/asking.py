"""A question from a few options: ``--model Qwen/Qwen3-32B --gpus 16xH100 --slo ttft_p99=2s --rate 5`` → a spec.

What the options leave open takes a default that is named here with its source and printed as an assumption; the spec
that comes out is the one that a file would hold (``meshplan init`` writes it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import SpecError, UnitError, closest_names, did_you_mean
from meshplan.cli.completion import complete_gpus, complete_model
from meshplan.cli.gpus import cluster_of

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.diffusion import DiffusionModel
    from meshplan.catalogs.models.shapes import ModelShape

# Prompt and answer of the first of the three scenarios of InferenceX (SemiAnalysis): 1k / 1k.
ASSUMED_LENGTHS = "1024/1024"
# A text to embed or rerank: what BERT reads at most (Devlin et al., arXiv:1810.04805, section 3.1).
ASSUMED_TEXT = "512"
# A request to a model that hears: a window of Whisper (Radford et al., arXiv:2212.04356, section 2.2), its prompt of
# four tokens, and an answer of 75 words (150 a minute, as people talk) of 4/3 tokens (OpenAI: 100 tokens ≈ 75 words).
ASSUMED_SOUND_S, ASSUMED_SPEECH = 30, "4/100"
# Llama 3 began its pre-training with 4,096 tokens a sequence and 4M tokens a step (arXiv:2407.21783, section 3.4.1).
ASSUMED_SEQUENCE, ASSUMED_BATCH = "4096", "4M"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Catalog name, Hugging Face id or config.json.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="NxGPU",
        help="16xH100, 2xdgx-h100, 8xH100,8xA100: GPUs or nodes.",
        show_default=False,
        autocompletion=complete_gpus,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="IN/OUT",
        help="Serving: tokens of a prompt and an answer, 4000/1000; of a text to embed, 512.",
        show_default=False,
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", metavar="R", help="Serving, images: requests/s that arrive.", show_default=False),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="Serving: requests in flight.", show_default=False)
]
SloOption = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="SLO", help="Serving: ttft_p99=2s,tpot_p95=50ms; images: latency=10s.", show_default=False
    ),
]
SequenceOption = Annotated[
    str | None,
    typer.Option("--sequence-length", metavar="N", help="Training: tokens of a sequence, 8k.", show_default=False),
]
BatchOption = Annotated[
    str | None,
    typer.Option("--batch", metavar="N", help="Training: sequences of a step, or 4M tokens.", show_default=False),
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Training: tokens of the whole run, 15T.", show_default=False),
]
ObjectiveOption = Annotated[
    str | None, typer.Option("--objective", help="What the plan is best at; default throughput.", show_default=False)
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Framework or engine; default megatron, vllm, xdit.", show_default=False)
]

# Options about tokens and sequences, which images and videos do not have.
_OF_SERVING, _OF_TRAINING = ("lengths", "rate", "concurrency", "slo"), ("sequence_length", "batch", "tokens")
_OF_LANGUAGE = ("lengths", "concurrency", *_OF_TRAINING)
_DECIMAL_COMMA = re.compile(r"(?P<key>\w+)\s*=\s*(?P<whole>\d+),(?P<rest>\d[^,]*)")
_SLO = re.compile(r"\s*(?P<key>[a-z0-9_]+?)(?P<unit>_s)?\s*=\s*(?P<limit>[^=]+?)\s*")


@dataclass(slots=True, kw_only=True)
class Asked:
    """A question as options give it; None where an option was not given."""

    model: str | None = None
    gpus: str | None = None
    lengths: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    slo: str | None = None
    sequence_length: str | None = None
    batch: str | None = None
    tokens: str | None = None
    objective: str | None = None
    target: str | None = None
    assumed: list[str] = field(default_factory=list)
    has_trace: bool = False  # by --set: it brings lengths, so that none are assumed

    @classmethod
    def of(cls, context: typer.Context) -> Asked:
        """The question of a command that takes these options."""
        given = cls.__dataclass_fields__.keys() & context.params.keys()
        return cls(**{name: context.params[name] for name in given})

    @property
    def is_empty(self) -> bool:
        """No option of a question was given."""
        options = self.__dataclass_fields__.keys() - {"assumed", "has_trace"}
        return not any(getattr(self, name) is not None for name in options)

    @property
    def says_serving(self) -> bool:
        """An option that only serving has was given."""
        return any(getattr(self, name) is not None for name in _OF_SERVING)

    @property
    def says_training(self) -> bool:
        """An option that only training has was given."""
        return any(getattr(self, name) is not None for name in _OF_TRAINING)

    def pictures(self, catalog: Catalog) -> DiffusionModel | None:
        """The diffusion model that the question names; None where it names none."""
        if catalog.model_name(self.model or "") is not None:  # a model of the catalog: no file has to be read
            return None
        from meshplan.catalogs.errors import UnknownEntryError
        from meshplan.catalogs.models.diffusion import diffusion_model  # start-up: --help reads no model

        try:
            return diffusion_model(self.model or "")
        except UnknownEntryError:
            return None

    def kind(self, catalog: Catalog) -> str:
        """``diffusion`` by the model, else ``training`` or ``serving`` by the options that only one of them has.

        Raises:
            SpecError: they say both, or nothing, or what the model has not.
        """
        if (pictures := self.pictures(catalog)) is not None:
            others = [f"--{name.replace('_', '-')}" for name in _OF_LANGUAGE if getattr(self, name) is not None]
            if others:
                raise refused(
                    others[0],
                    f"{pictures.name} makes images or videos and has no {' and '.join(others)}; it has --rate "
                    "(items/s), --slo latency=10s and --set workload.steps=30 (width, height, frames)",
                )
            return "diffusion"
        serving, training = self.says_serving, self.says_training
        if self.target is not None:
            serves = _serves(self.target)
            if serving not in (training, serves):
                names = _OF_SERVING if serving else _OF_TRAINING
                given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
                does, other = ("serves", "training") if serves else ("trains", "serving")
                raise refused("--target", f"{self.target} {does} models, and {' and '.join(given)} is of {other}")
            serving, training = serving or serves, training or not serves
        if serving == training:
            model, gpus = self.model or "Qwen/Qwen3-32B", self.gpus or "16xH100"
            what = "both training and serving" if serving else "neither training nor serving"
            raise refused(
                "",
                f"the options ask for {what}. To serve: --model {model} --gpus {gpus} --rate 5 --slo ttft_p99=2s. "
                f"To train: --model {model} --gpus {gpus} --sequence-length 8k --batch 4M. Images and videos need no "
                "further option: models of `meshplan catalog list diffusion-models`",
            )
        return "serving" if serving else "training"

    def document(self, catalog: Catalog) -> dict[str, Any]:
        """The spec; what was assumed is listed in ``assumed``.

        Raises:
            SpecError: an option is missing or cannot be read.
        """
        missing = [f"--{name}" for name in ("model", "gpus") if getattr(self, name) is None]
        if missing:
            raise refused("", f"a question without a spec file needs {' and '.join(missing)}")
        kind = self.kind(catalog)
        cluster, most = cluster_of(str(self.gpus), catalog)
        constraints: dict[str, Any] = {"target": self.target} if self.target else {}
        if most is not None:
            constraints["max_devices"] = most
        sections = {"serving": lambda: self._serving(catalog), "training": self._training, "diffusion": self._diffusion}
        return {
            "kind": kind,
            "model": self.model,
            "cluster": cluster,
            **sections[kind](),
            **({"objective": self.objective} if self.objective else {}),
            **({"constraints": constraints} if constraints else {}),
        }

    def _serving(self, catalog: Catalog) -> dict[str, Any]:
        workload = self._requests(shape_of(str(self.model), catalog))
        if self.rate is not None:
            workload["request_rate_per_s"] = self.rate
        if self.concurrency is not None:
            workload["concurrency"] = self.concurrency
        section: dict[str, Any] = {"workload": workload}
        if self.slo is not None:
            section["slo"] = slo_of(self.slo)
        elif self.rate is not None:
            self.assumed.append("no limit on latencies: what keeps pace with the rate will do (--slo)")
        return section

    def _requests(self, shape: ModelShape | None) -> dict[str, Any]:
        """What a request asks for, by what the model does: answers, vectors or scores of texts, transcripts."""
        lengths = self.lengths
        if lengths is None and self.has_trace:
            return {}
        if lengths is None:
            lengths, words = assumed_lengths(shape)
            self.assumed.append(f"{lengths} {words}")
        if shape is not None and makes_no_tokens(shape):
            if "/" in lengths:
                raise refused("--lengths", f"{shape.name} makes no tokens: write those of a text alone: {ASSUMED_TEXT}")
            scores = shape.pooling is not None and shape.pooling.num_labels > 0
            return {"task": "rerank" if scores else "embed", "input_length": _number(lengths)}
        prompt, _, output = lengths.partition("/")
        if not prompt.strip() or not output.strip():
            raise refused("--lengths", f"{lengths!r} is not read; write tokens of a prompt and an answer: 4000/1000")
        sound = {"audio": {"seconds": ASSUMED_SOUND_S}} if shape is not None and _hears(shape) else {}
        return {**sound, "input_length": _number(prompt), "output_length": _number(output)}

    def _training(self) -> dict[str, Any]:
        sequence, batch = self.sequence_length, self.batch
        if sequence is None:
            sequence = ASSUMED_SEQUENCE
            self.assumed.append(f"sequences of {sequence} tokens (--sequence-length)")
        if batch is None:
            batch = ASSUMED_BATCH
            self.assumed.append(f"{batch} tokens in one step (--batch)")
        key = "global_batch_size" if batch.strip().isdigit() else "global_batch_tokens"
        workload = {"sequence_length": _number(sequence), key: _number(batch)}
        if self.tokens is not None:
            workload["num_training_tokens"] = self.tokens
        return {"workload": workload}

    def _diffusion(self) -> dict[str, Any]:
        from meshplan.catalogs.models.diffusion import diffusion_model  # start-up: as above

        model = diffusion_model(str(self.model))
        size = model.defaults
        workload: dict[str, Any] = {"width": size.width, "height": size.height, "steps": size.steps}
        frames = ""
        if model.is_video:
            workload["frames"] = size.frames
            frames = f" × {size.frames} frames"
        self.assumed.append(
            f"{size.width} × {size.height} pixels{frames}, {size.steps} steps, as {model.name} makes unless told "
            "(--set workload.steps=…)"
        )
        if self.rate is not None:
            workload["request_rate_per_s"] = self.rate
        return {"workload": workload, **({"slo": slo_of(self.slo)} if self.slo is not None else {})}


def assumed_lengths(shape: ModelShape | None) -> tuple[str, str]:
    """What ``--lengths`` is where nothing is said, and the words for it."""
    if makes_no_tokens(shape):
        return ASSUMED_TEXT, "tokens of a text (--lengths N)"
    if shape is not None and _hears(shape):
        return ASSUMED_SPEECH, f"tokens in and out for {ASSUMED_SOUND_S} s of sound (--lengths IN/OUT)"
    return ASSUMED_LENGTHS, "tokens in and out (--lengths IN/OUT)"


def makes_no_tokens(shape: ModelShape | None) -> bool:
    """Whether it is an embedding model or a reranker."""
    return shape is not None and (shape.bidirectional or shape.pooling is not None)


def _hears(shape: ModelShape) -> bool:
    return shape.encoder is not None and shape.encoder.audio is not None


def _serves(target: str) -> bool:
    """Whether plans for a target serve, or else train.

    Raises:
        SpecError: it is neither an engine nor a framework.
    """
    from meshplan.planner.serving.problem.engines.table import ENGINES  # start-up: --help must not load the planner

    if target in ENGINES:
        return True
    from meshplan.planner.launch.registry import TARGETS
    from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS

    if target in FRAMEWORKS:
        return False
    known = (*FRAMEWORKS, *ENGINES)
    hint = did_you_mean(closest_names(target, known))
    if any(one.name == target for one in TARGETS):
        hint = f"; it launches what one of them runs: plan for that one, then meshplan emit PLAN --target {target}"
    raise refused("--target", f"{target!r} is none of {', '.join(known)}{hint}")


def shape_of(model: str, catalog: Catalog) -> ModelShape | None:
    """The shape of a model; None where it is not known, which whoever reads the spec will say."""
    from meshplan.planner.cluster.lookup import look_up_shape  # start-up: --help must not load the planner
    from meshplan.planner.core.problems import Problems

    return look_up_shape(model, catalog, Path(), Problems())


def _number(text: str) -> int | str:
    """Digits as a number; what has a prefix (8k) stays as it is written."""
    return int(text) if text.strip().isdigit() else text.strip()


def slo_of(text: str) -> dict[str, float]:
    """``ttft_p99=2s,tpot_p95=50ms`` as a spec's ``slo``.

    Raises:
        SpecError: a limit is not a time with a unit.
    """
    from meshplan.catalogs.units import Dimension, parse_quantity, parse_seconds

    limits = {}
    if comma := _DECIMAL_COMMA.search(text):
        raise refused(
            "--slo", f"{comma['key']}: decimals have a point ({comma['whole']}.{comma['rest']}); commas part SLOs"
        )
    for part in text.split(","):
        match = _SLO.fullmatch(part)
        if match is None:
            raise refused("--slo", f"{part.strip()!r} is not read; write ttft_p99=2s,tpot_p95=50ms")
        try:
            # A key that names its unit is read as in a spec.
            is_named = match["unit"] is not None
            if not is_named and match["limit"].replace(".", "", 1).isdigit():
                given = f"{match['key']}={match['limit']}"
                raise refused("--slo", f"{given} has no unit; write {given}ms or {given}s")
            if f"{match['key']}_s" in limits:
                raise refused("--slo", f"{match['key']} is limited twice; keep one")
            limits[f"{match['key']}_s"] = (
                parse_seconds(match["limit"]) if is_named else parse_quantity(match["limit"], Dimension.S)
            )
        except UnitError as error:
            raise refused("--slo", f"{match['key']}: {error}") from None
    return limits


def refused(path: str, message: str) -> SpecError:
    """What is wrong with the question that options ask, ``path`` the option; empty where it is all of them."""
    return SpecError.at(path, message, of="the question")
