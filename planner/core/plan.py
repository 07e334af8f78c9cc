"""The answer: a frozen plan, its canonical JSON and its digest.

Everything that a plan shows is in here: what was chosen, what it will take, why, and what was rejected. A plan is
made once by :mod:`meshplan.planner.service` and never changes; measurements are attached to it in the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from typing import Any, TypedDict

from meshplan.catalogs.models.attention import AttentionKind, LatentAttention
from meshplan.catalogs.models.audio import AudioEntry
from meshplan.catalogs.models.layers.attention_form import AttentionForm, Matrix
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer, RecurrentMixer, SparseIndexer
from meshplan.catalogs.models.pooling import Pooling
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.catalogs.models.vision import VisionTower

# Fields of the run, not of the answer; no digest covers them.
CLOCK_FIELDS = ("wall_s", "cpu_s", "created_at")
# Fields of a plan's JSON beside its content.
NOT_IN_DIGEST = ("plan_id", "certificate")
PLAN_ID_LENGTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A predicted number with the range in which the measured one is expected (90 % unless stated)."""

    value: float
    low: float
    high: float


def canonical_json(document: Any) -> str:
    """The same text for the same content: sorted keys, no spaces, no NaN, UTF-8 as is."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(document: Any) -> str:
    """SHA-256 of the canonical JSON of ``document``, hexadecimal."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


@cache
def own_version() -> str:
    """The release of meshplan that answers; read once, since it takes as long as an estimate."""
    return version("meshplan")


class PlanIdentity(TypedDict):
    """The fields of a plan that name its question; see :class:`Plan`."""

    kind: str
    spec: Mapping[str, Any]
    spec_digest: str
    catalog_digest: str


def plan_identity(document: Mapping[str, Any], content: Any) -> PlanIdentity:
    """What names the question of a plan.

    Args:
        document: the spec as it was asked.
        content: every catalog entry that the answer rests on, as plain JSON, and nothing else.
    """
    spec = dict(document)
    return PlanIdentity(kind=str(document["kind"]), spec=spec, spec_digest=digest(spec), catalog_digest=digest(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One answered question.

    Args:
        kind: as in the spec.
        spec: the question as it was asked, as plain JSON.
        spec_digest: digest of ``spec``.
        catalog_digest: digest of every catalog entry that the answer rests on.
        config: the choices, as plain JSON (for training: the fields of ``TrainingConfig``).
        rank_table: (node, device) of each rank, node = host number; None for kinds without ranks.
        predicted: metric → interval; names carry SI units.
        memory: bytes of the worst rank by component, and of every stage.
        breakdown: where the time goes: rows of name, seconds, share, evidence level.
        provenance: what the numbers rest on: versions, sources, shares by evidence level.
        solution: status, objective, bound, gap, wall_s, cpu_s, solver, seed; for ``infeasible`` also the binding
            constraint, the nearest miss and the least change.
        alternatives: well-known other choices, what they would take and why they lost.
        rejected: reason → count and an example, for candidates that are not legal or do not fit.
        mapping: which rank sits where and what that is worth, where the links differ or not all nodes may be used.
        run: what interruptions make of the whole run, where a training spec asks for it.
        lengths: what documents of different lengths make of a training plan, where its spec says how long they are.
        far_apart: ways to train over sites that a slow network joins, where a training spec asks for them.
        answer: the decision of a stand-alone problem, in that problem's own format.
        certificate: what a second, independent way says of this answer
            (:class:`~meshplan.planner.core.certificate.Certificate`); no digest covers it. None where nobody asked.
        launched_from: digest of the plan that launchers write this one's files for, where they see a part or a
            rewording of it; files name that plan. Empty for a plan that was answered.
    """

    kind: str
    spec: Mapping[str, Any]
    spec_digest: str
    catalog_digest: str
    config: Mapping[str, Any]
    predicted: Mapping[str, Interval]
    solution: Mapping[str, Any]
    rank_table: tuple[tuple[int, int], ...] | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    breakdown: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Mapping[str, Any], ...] = ()
    rejected: tuple[Mapping[str, Any], ...] = ()
    answer: Mapping[str, Any] | None = None
    mapping: Mapping[str, Any] | None = None
    certificate: Mapping[str, Any] | None = None
    run: Mapping[str, Any] | None = None
    lengths: Mapping[str, Any] | None = None
    far_apart: Mapping[str, Any] | None = None
    launched_from: str = ""

    @property
    def plan_id(self) -> str:
        """Short digest of everything but the run's clocks."""
        return self.digest[:PLAN_ID_LENGTH]

    @property
    def digest(self) -> str:
        """Digest of the whole plan without the run's clocks; stamped into every launcher file."""
        return self.launched_from or digest(self._document(clocks=False))

    def to_document(self, *, clocks: bool = True) -> dict[str, Any]:
        """The plan as plain JSON, ``plan_id`` first.

        Args:
            clocks: with the run's own clock times; without them the same question gives the same bytes.
        """
        document = {"plan_id": self.plan_id, **self._document(clocks=clocks)}
        return document if self.certificate is None else {**document, "certificate": dict(self.certificate)}

    def _document(self, *, clocks: bool) -> dict[str, Any]:
        solution = {key: value for key, value in self.solution.items() if clocks or key not in CLOCK_FIELDS}
        document: dict[str, Any] = {
            "kind": self.kind,
            "spec": dict(self.spec),
            "spec_digest": self.spec_digest,
            "catalog_digest": self.catalog_digest,
            "config": dict(self.config),
            "predicted": {
                name: {"value": interval.value, "low": interval.low, "high": interval.high}
                for name, interval in self.predicted.items()
            },
            "memory": dict(self.memory),
            "breakdown": [dict(row) for row in self.breakdown],
            "provenance": dict(self.provenance),
            "solution": solution,
            "alternatives": [dict(row) for row in self.alternatives],
            "rejected": [dict(row) for row in self.rejected],
        }
        if self.rank_table is not None:
            document["rank_table"] = [list(place) for place in self.rank_table]
        if self.mapping is not None:
            document["mapping"] = dict(self.mapping)
        if self.run is not None:
            document["run"] = dict(self.run)
        if self.lengths is not None:
            document["lengths"] = dict(self.lengths)
        if self.far_apart is not None:
            document["far_apart"] = dict(self.far_apart)
        if self.answer is not None:
            document["answer"] = dict(self.answer)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Plan:
        """Read back what :meth:`to_document` wrote."""
        table = document.get("rank_table")
        return cls(
            kind=document["kind"],
            spec=document["spec"],
            spec_digest=document["spec_digest"],
            catalog_digest=document["catalog_digest"],
            config=document["config"],
            predicted={name: Interval(**interval) for name, interval in document["predicted"].items()},
            solution=document["solution"],
            rank_table=None if table is None else tuple((place[0], place[1]) for place in table),
            memory=document["memory"],
            breakdown=tuple(document["breakdown"]),
            provenance=document["provenance"],
            alternatives=tuple(document["alternatives"]),
            rejected=tuple(document["rejected"]),
            answer=document.get("answer"),
            mapping=document.get("mapping"),
            run=document.get("run"),
            lengths=document.get("lengths"),
            far_apart=document.get("far_apart"),
            certificate=document.get("certificate"),
        )


def plain(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as what JSON knows."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


# Fields of a model that few have: left out of the documents of the others.
_UNSAID = {
    **dict.fromkeys(("vision", "pooling", "audio", "encoder"), None),
    "bidirectional": False,
    "num_token_types": 0,
    "key_bias": True,
    "position_bias_parameters": 0,
}


def shape_document(shape: ModelShape) -> dict[str, Any]:
    """A model as plans carry it; what only hybrids have is left out of others, as in plans of before they were read."""
    document: dict[str, Any] = plain(shape)
    if shape.blocks is None:
        del document["blocks"]
    else:
        for key in ("indexed", "forms", "form_of"):  # empty for most
            if not document["blocks"][key]:
                del document["blocks"][key]
    if shape.moe is not None and shape.moe.latent_size is None:
        del document["moe"]["latent_size"]
    if shape.moe is not None and not shape.moe.limits_groups:
        del document["moe"]["num_expert_groups"], document["moe"]["num_groups_per_token"]
    if shape.encoder is not None:
        document["encoder"] = shape_document(shape.encoder)
    return {key: value for key, value in document.items() if key not in _UNSAID or value != _UNSAID[key]}


def shape_from_document(document: Mapping[str, Any]) -> ModelShape:
    """Read back the model that a plan carries in its provenance (what :func:`shape_document` made of it)."""
    values = dict(document)  # what equals the default of a ModelShape need not stand there
    if values.get("latent") is not None:
        values["latent"] = LatentAttention(**values["latent"])
    if values.get("vision") is not None:
        values["vision"] = VisionTower(**values["vision"])
    if values.get("pooling") is not None:
        values["pooling"] = Pooling(**values["pooling"])
    if values.get("audio") is not None:
        values["audio"] = AudioEntry(**values["audio"])
    if values.get("encoder") is not None:
        values["encoder"] = shape_from_document(values["encoder"])
    if (experts := values.get("moe")) is not None:
        values["moe"] = MixtureOfExperts(**{**experts, "moe_layers": tuple(experts["moe_layers"])})
    if "attention" in values:
        values["attention"] = AttentionKind(values["attention"])
    if "sliding_windows" in values:
        values["sliding_windows"] = tuple(values["sliding_windows"])
    if (blocks := values.get("blocks")) is not None:
        values["blocks"] = _blocks_from_document(blocks)
    return ModelShape(**values)


def _blocks_from_document(document: Mapping[str, Any]) -> LayerBlocks:
    recurrent, indexer = document.get("recurrent"), document.get("indexer")
    return LayerBlocks(
        mixers=tuple(Mixer(name) for name in document["mixers"]),
        has_mlp=tuple(document["has_mlp"]),
        recurrent=None if recurrent is None else RecurrentMixer(**recurrent),
        indexer=None if indexer is None else SparseIndexer(**indexer),
        output_gate=document.get("output_gate", False),
        indexed=tuple(document.get("indexed", ())),
        forms=tuple(_form_from_document(form) for form in document.get("forms", ())),
        form_of=tuple(document.get("form_of", ())),
    )


def _form_from_document(document: Mapping[str, Any]) -> AttentionForm:
    return AttentionForm(**{**document, "matrices": tuple(Matrix(**matrix) for matrix in document["matrices"])})
