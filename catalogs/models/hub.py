"""The ``config.json`` of a model that is named by its Hugging Face id and is not in the catalog.

It is looked for where it lies already: among the files that ``hf download`` keeps (``$HF_HUB_CACHE``, ``$HF_HOME/hub``
or ``~/.cache/huggingface/hub``), and among those that were fetched here before (``$XDG_CACHE_HOME/meshplan/models``).
Nothing here asks the network: :mod:`.download` does.

Layout of the cache: huggingface_hub, ``file_download.py`` (``models--ORG--NAME/refs/main`` holds the name of a folder
of ``snapshots``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from meshplan.catalogs.models.config import CONFIG_FILE

HUB = "https://huggingface.co"
# Organisation and name as the hub allows them: no "..", no separators of folders.
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(model: str) -> bool:
    """Whether a name can be an id of the hub.

    >>> is_hub_id("Qwen/Qwen3-32B"), is_hub_id("../etc/passwd"), is_hub_id("qwen3-32b")
    (True, False, False)
    """
    return _ID.fullmatch(model) is not None and ".." not in model


def cached_config(model: str) -> Path | None:
    """The configuration of an id on this machine; None where neither cache holds it."""
    if not is_hub_id(model):
        return None
    found = (_from_hub_cache(model), kept_config(model))
    return next((file for file in found if file is not None and file.is_file()), None)


def _from_hub_cache(model: str) -> Path | None:
    home = os.environ.get("HF_HOME") or str(_cache_home() / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub") / f"models--{model.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / commit / CONFIG_FILE if _COMMIT.fullmatch(commit) else None


def kept_config(model: str) -> Path:
    """Where the configuration of an id is kept once it was fetched."""
    return _cache_home() / "meshplan" / "models" / model / CONFIG_FILE


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
