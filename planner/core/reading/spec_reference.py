"""Every key of a spec with its type, default and meaning, read off the models that validate it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshplan.catalogs.units import EXAMPLES
from meshplan.planner.core.reading.spec_fields import TOTAL_TOKENS, Quantity, SpecModel, TimeInSeconds, Whole

Row = Mapping[str, Any]
_PLAIN = {str: "text", bool: "true or false", int: "whole number", float: "number"}


def reference_rows(model: type[SpecModel], prefix: str = "") -> Iterator[Row]:
    """Rows of ``key``, ``type``, ``default``, ``meaning``, sections before their keys.

    Args:
        model: of a kind of specs, or of a section.
        prefix: dotted path of the section.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = list(_sections(field.annotation))
        in_list = any(get_origin(part) is list for part in _unwrapped(field.annotation))
        yield {
            "key": key,
            "type": _type_text(field.annotation, field.metadata),
            "default": _default(field),
            "meaning": field.description or _summary(inner),
        }
        for section in inner:
            yield from reference_rows(section, f"{key}[]." if in_list else f"{key}.")


def _default(field: FieldInfo) -> str:
    """The default as it is written in a spec; ``required`` where there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value in (None, [], {}) or value is PydanticUndefined or isinstance(value, SpecModel):
        return ""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _summary(sections: list[type[SpecModel]]) -> str:
    """The first sentence of the section's docstring."""
    return " ".join((sections[0].__doc__ or "").split("\n\n")[0].split()) if sections else ""


def _type_text(annotation: Any, metadata: Any = ()) -> str:
    """A type in words: ``whole number``, ``text such as '80 GiB'``, ``bf16, fp8``, ``list of …``."""
    said = next((text for text in map(_said_by, metadata) if text), "")
    if said:
        return said
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(one) for one in arguments if one is not type(None)))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (list, dict, Mapping):
        return f"{'list of' if origin is list else 'mapping to'} {_type_text(arguments[-1])}"
    return _class_text(annotation)


def _said_by(annotation: Any) -> str:
    """The words of an annotation that reads text in its own way; empty for others."""
    if isinstance(annotation, Whole):
        return "tokens, such as 8192 or 8k" if annotation.tokens else "whole number"
    if isinstance(annotation, Quantity):
        return f"text such as {EXAMPLES[annotation.dimension]!r}"
    if isinstance(annotation, TimeInSeconds):
        return "seconds, or text such as '50 ms'"
    return "tokens, such as 15e12 or 15T" if annotation is TOTAL_TOKENS else ""


def _class_text(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(str(one.value) for one in annotation)
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return "section"
    return _PLAIN.get(annotation, "value")


def _unwrapped(annotation: Any) -> Iterator[Any]:
    """A type and everything inside it."""
    yield annotation
    for part in get_args(annotation):
        yield from _unwrapped(part)


def _sections(annotation: Any) -> Iterator[type[SpecModel]]:
    for part in _unwrapped(annotation):
        if isinstance(part, type) and issubclass(part, SpecModel):
            yield part
