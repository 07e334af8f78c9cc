"""The ``config.json`` of a model that is named by its Hugging Face id and is not in the catalog.

It is looked for where it lies already: among the files that ``hf download`` keeps (``$HF_HUB_CACHE``, ``$HF_HOME/hub``
or ``~/.cache/huggingface/hub``), and among those that were fetched here before (``$XDG_CACHE_HOME/meshplan/models``).
Nothing asks the network but :func:`download_config`, which is called where the user says ``--download``. It fetches
this one file, from ``$HF_ENDPOINT`` or huggingface.co, and sends no token.

Layout of the cache: huggingface_hub, ``file_download.py`` (``models--ORG--NAME/refs/main`` holds the name of a folder
of ``snapshots``); address of a file: ``hf_hub_url`` of the same.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from meshplan.catalogs.errors import ModelConfigError, why
from meshplan.catalogs.models.config import CONFIG_FILE, MAX_CONFIG_BYTES, parse_config
from meshplan.catalogs.untrusted.text import shown
from meshplan.catalogs.writing import write_file

HUB = "https://huggingface.co"
PATIENCE_S = 30.0
# Organisation and name as the hub allows them: no "..", no separators of folders.
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECURE, _PLAIN = "https", "http"


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
    found = (_from_hub_cache(model), _kept(model))
    return next((file for file in found if file is not None and file.is_file()), None)


def download_config(model: str) -> Path:
    """Fetch the configuration of an id, check that it is one, and keep it.

    Args:
        model: such as ``Qwen/Qwen3-32B``.

    Raises:
        ModelConfigError: no id, no answer, none that may be read without a token, or not the JSON of a configuration.
    """
    if not is_hub_id(model):
        raise ModelConfigError(f"{shown(model)} is not a Hugging Face id such as Qwen/Qwen3-32B: nothing was fetched")
    url = f"{_endpoint()}/{model}/resolve/main/{CONFIG_FILE}"
    content = _fetched(url, model)
    parse_config(Path(url), content)
    file = _kept(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelConfigError(f"cannot keep the configuration of {model} in {file.parent}: {why(error)}") from error
    write_file(file, content.decode("utf-8-sig"), force=True)
    return file


class _SameTransport(urllib.request.HTTPRedirectHandler):
    """Follows the hub to where it keeps its files, never from an encrypted address to one that is not."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in (_SECURE, urlsplit(req.full_url).scheme):
            raise urllib.error.URLError(f"it leads to another kind of address ({shown(scheme)})")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str, model: str) -> bytes:
    by_hand = f"fetch it yourself and give its path: hf download {model} {CONFIG_FILE}"
    try:
        with urllib.request.build_opener(_SameTransport).open(url, timeout=PATIENCE_S) as answer:
            content: bytes = answer.read(MAX_CONFIG_BYTES + 1)
    except urllib.error.HTTPError as error:
        reasons = {
            401: f"there is no model {model}, or it wants an account: {by_hand}",
            403: f"{model} is gated: {by_hand}",
            404: f"there is no model {model} with a {CONFIG_FILE}: check the id",
        }
        told = reasons.get(error.code, f"it answers {error.code}: {by_hand}")
        raise ModelConfigError(f"{url}: {told}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        told = why(reason) if isinstance(reason, Exception) else shown(str(reason))
        raise ModelConfigError(f"{url} cannot be fetched ({told}); {by_hand}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"{url} is larger than {MAX_CONFIG_BYTES} bytes: not a model configuration")
    return content


def _endpoint() -> str:
    """The hub, or a mirror of it.

    Raises:
        ModelConfigError: ``$HF_ENDPOINT`` is no address.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    parts = urlsplit(endpoint)
    if parts.scheme not in (_SECURE, _PLAIN) or not parts.hostname:
        raise ModelConfigError(f"HF_ENDPOINT={shown(endpoint)} is no address; unset it, or write {HUB}")
    return endpoint.rstrip("/")


def _from_hub_cache(model: str) -> Path | None:
    home = os.environ.get("HF_HOME") or str(_cache_home() / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub") / f"models--{model.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / commit / CONFIG_FILE if _COMMIT.fullmatch(commit) else None


def _kept(model: str) -> Path:
    return _cache_home() / "meshplan" / "models" / model / CONFIG_FILE


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
