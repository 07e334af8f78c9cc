"""What is wrong with a value, in the words of a spec: pydantic's findings name types of Python, limits and patterns.

>>> refusal_text({"type": "greater_than_equal", "ctx": {"ge": 2}, "input": 1, "msg": "Input …"})
'must be at least 2 (given: 1)'
>>> refusal_text({"type": "literal_error", "ctx": {"expected": "'vllm' or 'sglang'"}, "input": "vlm", "msg": "Input …"})
"must be one of vllm, sglang (given: 'vlm'); did you mean 'vllm'?"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from meshplan.catalogs.errors import closest_names, did_you_mean
from meshplan.planner.core.text import counted

# Pydantic's type of an error → what the value must be; fields of ``ctx`` in braces.
_MUST = {
    **dict.fromkeys(("dict_type", "model_type", "mapping_type"), "must be a mapping, such as {{key: value}}"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list, such as [first, second]"),
    "string_type": "must be a text",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}
_LENGTHS = {
    "string_too_short": ("min_length", "must have at least", "character", "characters"),
    "string_too_long": ("max_length", "must have at most", "character", "characters"),
    "too_short": ("min_length", "must have at least", "entry", "entries"),
    "too_long": ("max_length", "must have at most", "entry", "entries"),
}
_QUOTED = re.compile(r"'([^']*)'")
_SHAPES = ("dict_type", "model_type", "mapping_type", "list_type", "tuple_type", "string_type", "bool_type")


def refusal_text(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence with the value that was given, and the closest word where one is meant."""
    kind, given, context = error["type"], error.get("input"), error.get("ctx") or {}
    hint = ""
    if kind in ("literal_error", "enum"):
        known = _QUOTED.findall(str(context["expected"]))
        message = f"must be one of {', '.join(known)}" if len(known) > 1 else f"must be {context['expected']}"
        hint = did_you_mean(closest_names(given, known)) if isinstance(given, str) else ""
    elif kind in _LENGTHS:
        limit, words, noun, plural = _LENGTHS[kind]
        number = int(context[limit])
        empty = limit == "min_length" and number == 1
        message = "must not be empty" if empty else f"{words} {counted(number, noun, plural)}"
    elif kind in _MUST:
        message = _MUST[kind].format(**context)
    else:
        message = str(error["msg"]).removeprefix("Value error, ")
    if isinstance(given, str | int | float | bool) and repr(given) not in message:
        message = f"{message} (given: {given!r})"
    elif kind in _SHAPES and isinstance(given, list | Mapping):
        message = f"{message} (given: {'a list' if isinstance(given, list) else 'a mapping'})"
    return message + hint


@dataclass(frozen=True, slots=True)
class Patterned:
    """Annotation of texts that match a pattern, which a refusal says in words and the schema as it is.

    Args:
        pattern: regular expression of the whole text.
        words: completes "must be …".
    """

    pattern: str
    words: str

    def read(self, value: str) -> str:
        """The text, where it matches.

        Raises:
            ValueError: it does not.
        """
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"must be {self.words}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": self.pattern}
