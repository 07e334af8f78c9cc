"""What emitters of frameworks share: the mapping table's row, refusals by rule, reading of what was emitted.

A row says one term of a plan in the target's words and reads it back from them, so that ``emit`` and ``import`` can
never disagree about what a flag means. Words are a flat mapping: a flag, or the dotted path of a key in a document, to
its value; a switch has the value ``""``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshplan.catalogs.errors import CannotExpressError, Problem
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.target import Feature
from meshplan.planner.training.problem.framework_rules import FrameworkRules
from meshplan.planner.training.problem.problem import TrainingConfig

HANDED_OVER = "training_config.json (MESHPLAN_CONFIG)"
BY_THE_SCRIPT = "handed over only: nothing checks that the script obeys"
MAX_COUNT = 10**9  # no degree, batch or sequence is longer; keeps products of what is read finite

Words = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one term of a plan is said, and how it is read back.

    Args:
        name: our term: a field of ``TrainingConfig``.
        words: (configuration, model) → the target's words; empty where its default already says it.
        read: the target's words → our terms with their values; only what the words say. Raises ValueError where a
            value cannot be meant.
        keys: every word that ``words`` can say or ``read`` looks at.
        said_by: the keys, for the support matrix.
        verified_by: what judged them.
    """

    name: str
    words: Callable[[Any, ModelShape], Words]
    read: Callable[[Words], Mapping[str, Any]]
    keys: tuple[str, ...]
    said_by: str
    verified_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a table understood.

    Args:
        values: our terms → values, only what was said.
        said_by: our terms → the words that said it.
        problems: words whose values cannot be meant.
    """

    values: Mapping[str, Any]
    said_by: Mapping[str, str]
    problems: tuple[Problem, ...] = field(default=())


def count(words: Words, *keys: str) -> int | None:
    """The whole number from 1 on that the first of ``keys`` in ``words`` says; None where none is there.

    Raises:
        ValueError: another value, such as text, 0 or more than :data:`MAX_COUNT`.
    """
    for key in keys:
        if key not in words:
            continue
        text = str(words[key]).strip()
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:12]) <= MAX_COUNT:
            raise ValueError(f"{key} {words[key]!r} is not a whole number within 1 and {MAX_COUNT}")
        return int(text)
    return None


def stated(**values: Any) -> dict[str, Any]:
    """Only the values that are there."""
    return {name: value for name, value in values.items() if value is not None}


def count_term(key: str, name: str, *, verified_by: str, aliases: Sequence[str] = ()) -> Term:
    """A number behind one key, the same in both directions.

    Args:
        key: how it is said.
        name: the field of the configuration.
        verified_by: what judged it.
        aliases: other keys under which the target takes it.
    """
    return Term(
        name=name,
        words=lambda config, _: {key: str(getattr(config, name))},
        read=lambda words: stated(**{name: count(words, key, *aliases)}),
        keys=(key, *aliases),
        said_by=key,
        verified_by=verified_by,
    )


def handed_over(name: str) -> Term:
    """A term that the target has no word for: the user's script gets it."""
    return Term(
        name=name,
        words=lambda *_: {},
        read=lambda _: {},
        keys=(),
        said_by=HANDED_OVER,
        verified_by=BY_THE_SCRIPT,
    )


def say_all(terms: Sequence[Term], config: TrainingConfig, shape: ModelShape) -> dict[str, Any]:
    """The words of a configuration, row by row."""
    words: dict[str, Any] = {}
    for term in terms:
        words.update(term.words(config, shape))
    return words


def read_all(terms: Sequence[Term], words: Words) -> Read:
    """Our terms, read back row by row; nothing is guessed for what was not said."""
    values: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    problems: list[Problem] = []
    for term in terms:
        try:
            found = term.read(words)
        except ValueError as error:
            problems.append(Problem(path=term.name, message=str(error)))
            continue
        values.update(found)
        text = ", ".join(f"{key} {words[key]}".strip() for key in term.keys if key in words)
        said_by.update(dict.fromkeys(found, text))
    return Read(values=values, said_by=said_by, problems=tuple(problems))


def nested(words: Words) -> dict[str, Any]:
    """Dotted keys as a document.

    >>> nested({"bf16.enabled": True, "steps": 1})
    {'bf16': {'enabled': True}, 'steps': 1}
    """
    document: dict[str, Any] = {}
    for path, value in words.items():
        *folders, key = path.split(".")
        place = document
        for folder in folders:
            place = place.setdefault(folder, {})
        place[key] = value
    return document


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A document as dotted keys, the inverse of :func:`nested`; lists stay values."""
    words: dict[str, Any] = {}
    for key, value in document.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            words.update(flattened(value, f"{path}."))
        else:
            words[path] = value
    return words


def feature_rows(terms: Sequence[Term]) -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return tuple(Feature(name=term.name, expressed_by=term.said_by, verified_by=term.verified_by) for term in terms)


def refuse(
    rules: FrameworkRules, shape: ModelShape, config: TrainingConfig, known: Mapping[str, Sequence[str]]
) -> None:
    """Stop where the framework has no words for the plan.

    Args:
        rules: the framework's.
        shape: the model.
        config: the choices.
        known: choices by name: what the framework has a word for.

    Raises:
        CannotExpressError: with what is missing and the nearest that can be said.
    """
    for choice, names in known.items():
        if getattr(config, choice) not in names:
            raise CannotExpressError(rules.name, f"{choice} {getattr(config, choice)!r}", "one of " + ", ".join(names))
    broken = rules.broken(shape, config)
    if broken:
        raise CannotExpressError(
            rules.name,
            "this configuration: " + "; ".join(f"{rule.message} ({rule.source})" for rule in broken),
            f"what meshplan plan finds with constraints.target: {rules.name}",
        )
    if not rules.uneven_layers and len(set(config.layers_per_chunk)) > 1:
        raise CannotExpressError(
            rules.name, "stages of unequal length", "a number of stages and chunks that divides the layers"
        )
