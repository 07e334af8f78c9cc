"""A word of a script under construction, and how long words may grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.catalogs.errors import Problem, SpecError

# The longest command line that Linux takes has 2 MiB; expansions may not make more of a script than these.
MAX_WORDS = 100_000  # of one command or array
MAX_WORD_LENGTH = 2**16


@dataclass(slots=True)
class Word:
    """A word under construction: finished fields, and the one that is being written."""

    fields: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    length: int = 0

    def add(self, text: str) -> None:
        """Write more of the present field."""
        self.parts.append(text)
        self.length += len(text)
        if self.length > MAX_WORD_LENGTH:
            raise refused(f"a word grows beyond {MAX_WORD_LENGTH} characters")

    def split(self, texts: list[str]) -> None:
        """Several fields in the place of one expansion; the outer ones touch their neighbours."""
        for place, text in enumerate(texts):
            if place:
                self.close()
            self.add(text)

    def close(self) -> None:
        """End the present field, if anything stands in it."""
        if self.parts:
            self.fields.append("".join(self.parts))
        self.parts, self.length = [], 0
        if len(self.fields) > MAX_WORDS:
            raise refused(f"one expansion makes more than {MAX_WORDS} words")


def refused(message: str) -> SpecError:
    """The error of a script that cannot be read."""
    return SpecError([Problem(path="", message=message)], of="the launch script")
