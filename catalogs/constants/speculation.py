"""Measured acceptance of speculative decoding: tokens per step by dataset, method and number of drafted tokens."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from functools import cache

from meshplan.catalogs.yaml_reader import load_yaml

PROFILE_FILE = "speculation_profiles.yaml"

# method → drafted tokens → mean tokens of a step, the model's own included.
Profile = Mapping[str, Mapping[int, float]]


@cache
def speculation_profiles() -> Mapping[str, Profile]:
    """The shipped profiles by dataset; the file says from which runs."""
    text = (importlib.resources.files("meshplan.catalogs.seed") / PROFILE_FILE).read_text(encoding="utf-8")
    profiles: Mapping[str, Profile] = load_yaml(text)["profiles"]
    return profiles
