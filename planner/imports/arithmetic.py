"""Whole-number expressions of shell scripts, computed without a shell: ``$((NODES * GPUS_PER_NODE))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

MAX_LENGTH = 200
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


def whole_number(expression: str, variables: Mapping[str, str]) -> int | None:
    """The value of ``expression``; None where it is not plain arithmetic over known whole numbers.

    >>> whole_number("$NODES * (GPUS+1)", {"NODES": "4", "GPUS": "7"})
    32
    """
    if len(expression) > MAX_LENGTH:
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
