"""What is wrong with a set of an estimator's constants that somebody imports: an empty one would stop every plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from meshplan.catalogs.constants.serving import ServingCalibration, ServingConstants
from meshplan.catalogs.constants.training import (
    KINDS_OF_WORK,
    OTHER_KERNELS,
    Calibration,
    FrameworkRecipe,
    MemoryConstants,
    TimeConstants,
)
from meshplan.catalogs.errors import closest_names, did_you_mean

# Wide on purpose: a decade or more around everything that was fitted.
_FACTORS = (0.01, 100.0)  # what multiplies a rate or a size
_FACTOR_ENDINGS = ("_efficiency", "_factor")
_CONSTANTS = (0.0, 1e12)  # seconds, bytes, shares
_MOST_ERROR = 5.0  # of a 90th percentile; e^5 in the logarithm
_MOST_SAMPLES = 10**9
_ERROR_WORDS = ("error_basis", "related_error_basis", "unseen_error_basis")
_OTHER_ERRORS = ("related_error_p90", "unseen_error_p90", "cluster_error_p90")
_OF_KERNELS = ("error_p90", "error_basis", "related_error_p90", "related_error_basis")
_TEXTS = ("source", "date", "memory_basis")
_RECIPE_TEXTS = ("source", "attention_library")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a set of constants of one estimator looks like.

    Args:
        named: key of the framework or engine.
        whole: the set.
        parts: key → constants under it.
        by_model: key of the constants of single models.
        of_model: those constants.
        kinds: what the half-widths of intervals are given for.
        of: what these are, in words.
        widths: keys of half-widths by kind.
        others: problems of the keys that only this form has.
    """

    named: str
    whole: type[Any]
    parts: Mapping[str, type[Any]]
    by_model: str
    of_model: type[Any]
    kinds: tuple[str, ...]
    of: str
    widths: tuple[str, ...]
    others: Callable[[Mapping[str, Any]], Iterator[str]]


def calibration_problems(framework: object, architecture: object, document: Mapping[str, Any]) -> Iterator[str]:
    """Problems of one set of constants, each with its field.

    Args:
        framework: framework or engine that the set is stored for.
        architecture: device generation that it is stored for.
        document: what :meth:`Calibration.to_document` or :meth:`ServingCalibration.to_document` wrote.
    """
    form = _SERVING if "engine" in document else _TRAINING
    for name, wanted in ((form.named, framework), ("architecture", architecture)):
        if document.get(name) != wanted:
            yield f"{name} must be {wanted!r} as in the entry, not {document.get(name)!r}"
    yield from _unknown(document, form.whole, "")
    for part, kind in form.parts.items():
        yield from _section(part, kind, document.get(part, {}))
    by_model = document.get(form.by_model, {})
    if not isinstance(by_model, Mapping):
        yield f"{form.by_model} must map models to constants, not {by_model!r}"
    else:
        for model, section in by_model.items():
            yield from _section(f"{form.by_model}.{model}", form.of_model, section)
    runs = document.get("num_runs", 0)
    if not isinstance(runs, int) or isinstance(runs, bool) or not 0 <= runs <= _MOST_SAMPLES:
        yield f"num_runs must be a whole number of at least 0, not {runs!r}"
    yield from _errors(document, form)
    for name in _TEXTS:
        if not isinstance(document.get(name, ""), str):
            yield f"{name} must be a text, not {document[name]!r}"


def _section(path: str, kind: type[Any], section: object) -> Iterator[str]:
    """Problems of the constants of one part."""
    if not isinstance(section, Mapping):
        yield f"{path} must be a mapping of constants, not {section!r}"
        return
    yield from _unknown(section, kind, f"{path}.")
    for name, value in section.items():
        yield from _constant(path, str(name), value)


def _errors(document: Mapping[str, Any], form: _Form) -> Iterator[str]:
    """Problems of the intervals' half-widths, and of the words for what they rest on."""
    for name in form.widths:
        errors = document.get(name, {})
        yield from _widths(name, errors, form.of)
        if isinstance(errors, Mapping) and errors and set(errors) != set(form.kinds):
            yield f"{name} must hold {', '.join(form.kinds)}, not {', '.join(map(str, errors))}"
    by_kind = document.get("model_error_p90", {})
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(form.kinds):
        yield f"model_error_p90 must map {form.of} to errors by model, not {by_kind!r}"
    else:
        for kind, errors in by_kind.items():
            yield from _widths(f"model_error_p90.{kind}", errors, "models")
    yield from form.others(document)
    generations = document.get("generations", ())
    if not isinstance(generations, list | tuple) or not all(isinstance(name, str) for name in generations):
        yield f"generations must be a list of names, not {generations!r}"


def _are_texts(words: object) -> bool:
    return isinstance(words, Mapping) and all(isinstance(text, str) for text in (*words, *words.values()))


def _of_serving(document: Mapping[str, Any]) -> Iterator[str]:
    basis = document.get("basis", {})
    if not _are_texts(basis):
        yield f"basis must map metrics to texts, not {basis!r}"


def _of_training(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _by_way(document.get("way_error_p90", {}))
    for name in _ERROR_WORDS:
        words = document.get(name, {})
        if not _are_texts(words):
            yield f"{name} must map kinds of work to texts, not {words!r}"
    yield from _by_kernels(document.get("by_kernels", {}))
    basis = document.get("basis", "")
    if not isinstance(basis, str):
        yield f"basis must be a text, not {basis!r}"


_SERVING = _Form(
    named="engine",
    whole=ServingCalibration,
    parts={"constants": ServingConstants},
    by_model="model_constants",
    of_model=ServingConstants,
    kinds=("ttft", "tpot", "throughput"),
    of="metrics",
    widths=("error_p90", "start_error_p90"),
    others=_of_serving,
)
_TRAINING = _Form(
    named="framework",
    whole=Calibration,
    parts={"time": TimeConstants, "memory": MemoryConstants, "recipe": FrameworkRecipe},
    by_model="model_time",
    of_model=TimeConstants,
    kinds=tuple(KINDS_OF_WORK),
    of="kinds of work",
    widths=("error_p90", "start_error_p90", *_OTHER_ERRORS),
    others=_of_training,
)


def _by_way(by_kind: object) -> Iterator[str]:
    """Problems of the widths that depend on the way in which plans work."""
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(KINDS_OF_WORK):
        yield f"way_error_p90 must map kinds of work to errors by model and way, not {by_kind!r}"
        return
    for kind, by_model in by_kind.items():
        if not isinstance(by_model, Mapping):
            yield f"way_error_p90.{kind} must map models to errors by way, not {by_model!r}"
            continue
        for model, errors in by_model.items():
            yield from _widths(f"way_error_p90.{kind}.{model or 'others'}", errors, "ways")


def _by_kernels(by_kernels: object) -> Iterator[str]:
    """Problems of the widths that differ by kernels."""
    if not isinstance(by_kernels, Mapping):
        yield f"by_kernels must map kinds of kernels to widths, not {by_kernels!r}"
        return
    if by_kernels and OTHER_KERNELS not in by_kernels:
        yield f"by_kernels must hold {OTHER_KERNELS!r}, for kernels that no run has"
    for kernels, widths in by_kernels.items():
        if not isinstance(widths, Mapping) or not set(widths) <= set(_OF_KERNELS):
            yield f"by_kernels.{kernels} must map {', '.join(_OF_KERNELS)} to kinds of work, not {widths!r}"
            continue
        for name, by_kind in widths.items():
            path = f"by_kernels.{kernels}.{name}"
            if name.endswith("_p90"):
                yield from _widths(path, by_kind, "kinds of work")
            elif not isinstance(by_kind, Mapping) or not all(isinstance(text, str) for text in by_kind.values()):
                yield f"{path} must map kinds of work to texts, not {by_kind!r}"


def _widths(name: str, errors: object, of: str) -> Iterator[str]:
    if not isinstance(errors, Mapping):
        yield f"{name} must map {of} to errors, not {errors!r}"
        return
    for key, value in errors.items():
        if not _is_number(value) or not 0.0 <= value <= _MOST_ERROR:
            yield f"{name}.{key} must be within 0 and {_MOST_ERROR:g}, not {value!r}"


def _unknown(document: Mapping[str, Any], kind: type[Any], path: str) -> Iterator[str]:
    known = [item.name for item in fields(kind)]
    for name in document:
        if name not in known:
            yield f"unknown constant {path}{name}{did_you_mean(closest_names(str(name), known))}"


def inside_limits(constants: TimeConstants) -> TimeConstants:
    """The constants with every factor at the nearest value that is taken: a run far off may ask for any."""
    low, high = _FACTORS
    factors = (one.name for one in fields(constants) if one.name.endswith(_FACTOR_ENDINGS))
    return replace(constants, **{name: min(max(getattr(constants, name), low), high) for name in factors})


def _constant(part: str, name: str, value: Any) -> Iterator[str]:
    if part == "recipe" and (name in _RECIPE_TEXTS or isinstance(value, bool)):
        if name in _RECIPE_TEXTS and not isinstance(value, str):
            yield f"recipe.{name} must be a text, not {value!r}"
        return
    low, high = _FACTORS if name.endswith(_FACTOR_ENDINGS) else _CONSTANTS
    if not _is_number(value) or not low <= value <= high:
        yield f"{part}.{name} must be a number within {low:g} and {high:g}, not {value!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
