"""Collects what is wrong with a question, so that every problem is reported at once."""

from __future__ import annotations

from meshplan.catalogs.errors import Problem, SpecError


class Problems(list[Problem]):
    """Problems found so far, raised together."""

    def say(self, path: str, message: str) -> None:
        """Add one problem."""
        self.append(Problem(path=path, message=message))

    def check(self) -> None:
        """Raise all problems, if there are any."""
        if self:
            raise SpecError(self)
