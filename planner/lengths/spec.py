"""``workload.sequence_lengths`` of a training spec: how long documents are, and how they come into sequences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import SpecModel, Whole
from meshplan.planner.lengths.packing import CONCATENATE, LONGER, PACKINGS, SPLIT

MAX_DOCUMENT_TOKENS = 2**30
MAX_BINS = 10_000
MAX_DOCUMENTS = 1e15
_Tokens = Annotated[int, Whole(most=MAX_DOCUMENT_TOKENS, tokens=True)]


class BinSpec(SpecModel):
    """Documents of one length, or of lengths in a range."""

    length: _Tokens | None = Field(default=None, description="tokens of each of these documents")
    least: _Tokens | None = Field(default=None, description="or tokens of the shortest of them")
    most: _Tokens | None = Field(default=None, description="and of the longest; lengths between are as frequent")
    count: Annotated[float, Field(gt=0, le=MAX_DOCUMENTS, allow_inf_nan=False)] = Field(
        description="how many documents, or their share"
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> BinSpec:
        if (self.length is None) == (self.least is None) or (self.least is None) != (self.most is None):
            raise ValueError("give either length, or least and most")
        if self.least is not None and self.most is not None and self.most < self.least:
            raise ValueError(f"most {self.most} is below least {self.least}")
        return self


class SequenceLengthsSpec(SpecModel):
    """Lengths of documents, from a file or a histogram."""

    file: str | None = Field(
        default=None, min_length=1, description="CSV with a column 'length' (or a single column), JSON list or .npz"
    )
    histogram: Annotated[list[BinSpec], Field(min_length=1, max_length=MAX_BINS)] | None = Field(
        default=None, description="numbers of documents by length"
    )
    packing: Literal[PACKINGS] = Field(  # type: ignore[valid-type]  # names from the table
        default=CONCATENATE,
        description="one after another, cut every sequence_length tokens; or whole documents, the rest padding",
    )
    longer: Literal[LONGER] = Field(  # type: ignore[valid-type]  # names from the table
        default=SPLIT, description="what becomes of documents that are longer than sequence_length"
    )
    cross_document_attention: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="tokens attend to earlier documents of their sequence, too: no mask"
    )

    @model_validator(mode="after")
    def _is_given_once(self) -> SequenceLengthsSpec:
        if (self.file is None) == (self.histogram is None):
            raise ValueError("give either a file of lengths or a histogram")
        return self
