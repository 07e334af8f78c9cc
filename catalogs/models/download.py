"""Fetches the ``config.json`` of a model from the Hugging Face hub, where the user says ``--download``.

Nothing else asks the network. It fetches this one file, from ``$HF_ENDPOINT`` or huggingface.co, and sends no token.
Address of a file: ``hf_hub_url`` of huggingface_hub, ``file_download.py``.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from meshplan.catalogs.errors import ModelConfigError, why
from meshplan.catalogs.models.config import CONFIG_FILE, MAX_CONFIG_BYTES, parse_config
from meshplan.catalogs.models.hub import HUB, is_hub_id, kept_config
from meshplan.catalogs.untrusted.text import shown
from meshplan.catalogs.writing import write_file

PATIENCE_S = 30.0
_SECURE, _PLAIN = "https", "http"


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
    file = kept_config(model)
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
        meaning = reasons.get(error.code, f"it answers {error.code}: {by_hand}")
        raise ModelConfigError(f"{url}: {meaning}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        cause = why(reason) if isinstance(reason, Exception) else shown(str(reason))
        raise ModelConfigError(f"{url} cannot be fetched ({cause}); {by_hand}") from error
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
