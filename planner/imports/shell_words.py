"""Words of shell scripts under construction, how long they may grow, and the whole-number arithmetic in them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshplan.catalogs.errors import SpecError

# The longest command line that Linux takes has 2 MiB; expansions may not make more of a script than these.
MAX_WORDS = 100_000  # of one command or array
MAX_WORD_LENGTH = 2**16
# Of an expression $((…)).
MAX_EXPRESSION_LENGTH = 200
MAX_VALUE = 10**12
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


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
    return SpecError.at("", message, of="the launch script")


def whole_number(expression: str, variables: Mapping[str, str]) -> int | None:
    """The value of ``expression``; None where it is not plain arithmetic over known whole numbers.

    >>> whole_number("$NODES * (GPUS+1)", {"NODES": "4", "GPUS": "7"})
    32
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        return None
    try:
        tree = ast.parse(_VARIABLE.sub(r"\1", expression).strip(), mode="eval")
        return _value(tree.body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, variables: Mapping[str, str]) -> int:
    value = _plain(node, variables)
    if abs(value) > MAX_VALUE:
        raise ValueError(f"beyond {MAX_VALUE}")
    return value


def _plain(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return int(variables[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, variables), _value(node.right, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, variables)
    raise ValueError("not plain arithmetic")
