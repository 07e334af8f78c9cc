"""YAML into plain values, with the fastest safe reader that the platform has."""

from __future__ import annotations

from typing import Any

import yaml

# libyaml reads the seeds about ten times faster than the pure Python reader; some platforms lack it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str | bytes) -> Any:
    """The values of one YAML document: mappings, lists, text and numbers, never other objects.

    Raises:
        yaml.YAMLError: not YAML, or it asks for other objects.
    """
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - both loaders are safe ones; the rule knows them by name only
