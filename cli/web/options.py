"""Options that the service's commands share, and the packages that they need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

WorkersOption = Annotated[int, typer.Option("--workers", metavar="N", min=0, max=256, help="Searches at once.")]
PACKAGES = ("fastapi", "uvicorn", "pebble", "sse_starlette", "jinja2", "prometheus_client")


def needs_service() -> None:
    """Say which extra is missing, if it is.

    Raises:
        BadParameter: the packages of the service are not installed.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(f"the service needs {', '.join(missing)}: pip install 'meshplan[service]'")
