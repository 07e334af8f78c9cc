"""What all pages share: templates and static files, read once at the start, and answers that are pages.

No request opens a file: templates are compiled and static files are held in memory when this module is loaded. The
address of a static file holds a digest of all of them, so that a browser keeps it for good and never keeps an old one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from jinja2 import DictLoader, Environment, StrictUndefined

from meshplan.catalogs.untrusted.text import shown
from meshplan.cli.web.calls import Answer
from meshplan.cli.web.problems import MEDIA_TYPE, problem
from meshplan.planner.core.plan import own_version

_HERE = Path(__file__).parent
_TEMPLATES = {file.name: file.read_text(encoding="utf-8") for file in sorted((_HERE / "templates").iterdir())}
_STATIC = {file.name: file.read_bytes() for file in sorted((_HERE / "static").iterdir())}
_MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_DIGEST = hashlib.sha256(b"\0".join(_STATIC.values())).hexdigest()[:12]
STATIC = f"/static/{_DIGEST}"
# A year: the address changes with the content.
_KEEP = {"cache-control": "public, max-age=31536000, immutable"}
HTML = "text/html"
# No line ends between a number and its unit.
_NUMBER_AND_UNIT = re.compile(r"(\d) ([a-zA-Z%]{1,3}(?:/s)?\b|%)")

router = APIRouter(include_in_schema=False)
_environment = Environment(
    loader=DictLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    cache_size=-1,
)
_environment.globals.update(static=STATIC, version=own_version())
_environment.filters["unbroken"] = lambda text: _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)
for _name in _TEMPLATES:
    _environment.get_template(_name)


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """A page.

    Args:
        request: whose path and host the page may name.
        template: of ``templates``.
        status: of HTTP.
        values: what the template shows; every text in it is escaped.
    """
    return Response(
        _rendered(template, path=request.url.path, **values),
        status_code=status,
        media_type=HTML,
        headers={"cache-control": "no-cache"},
    )


def fragment(template: str, **values: Any) -> str:
    """Part of a page, for a script to put in the place of what it shows."""
    return _rendered(template, **values)


def _rendered(template: str, **values: Any) -> str:
    """The text of a template; signs that no reader sees, such as those that turn the direction of text, are named."""
    return shown(_environment.get_template(template).render(**values))


def content(answer: Answer) -> dict[str, Any]:
    """What a call has answered, as the values of a template."""
    values: dict[str, Any] = json.loads(answer.body)
    return values


def is_good(answer: Answer) -> bool:
    """Whether a call has answered, and not with a problem."""
    return answer.status < HTTPStatus.BAD_REQUEST


def problem_page(request: Request, document: Mapping[str, Any]) -> Response:
    """A problem document as a page."""
    return page(request, "problem.html", status=int(document["status"]), problem=document)


def wants_page(request: Request) -> bool:
    """Whether a person asks, with a browser, and not for the API."""
    return not request.url.path.startswith("/api/") and HTML in request.headers.get("accept", "")


@router.get("/static/{digest}/{name}")
def get_static(digest: str, name: str) -> Response:
    """A style sheet, a script or a picture of the pages."""
    if digest != _DIGEST or name not in _STATIC:
        missing = problem(404, "There is nothing here", f"no file {name!r} of this version")
        return Response(json.dumps(missing), status_code=404, media_type=MEDIA_TYPE)
    return Response(_STATIC[name], media_type=_MEDIA_TYPES[name.rpartition(".")[2]], headers=_KEEP)


@router.get("/favicon.ico")
def get_icon() -> Response:
    """The mark, which browsers ask for by this name."""
    return Response(_STATIC["mark.svg"], media_type=_MEDIA_TYPES["svg"], headers=_KEEP)
