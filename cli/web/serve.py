"""``meshplan serve``: questions over HTTP, answered by workers beside it."""

from __future__ import annotations

import ipaddress
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshplan.cli.options import DatabaseOption
from meshplan.cli.web.options import WorkersOption, needs_service
from meshplan.planner.core.text import counted

app = typer.Typer(rich_markup_mode=None, add_completion=False)
LEAST_TOKEN = 16


@app.command()
def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8484,
    workers: WorkersOption = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="Holds the token that requests must bear.", show_default=False
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="Name by which it may be asked.", show_default=False),
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Answer questions over HTTP, as pages and as an API: plans, comparisons, what-if, launcher files.

    Beyond this machine a token is needed. Further workers on other machines: meshplan work.
    """
    needs_service()
    import uvicorn

    from meshplan.cli.web.app import create_app
    from meshplan.cli.web.jobs.crew import bell, crew
    from meshplan.cli.web.protocol import ForgivingProtocol
    from meshplan.cli.web.settings import LOOPBACK, Settings

    token = "" if token_file is None else read_token(token_file)
    if not token and not _is_loopback(host):
        raise typer.BadParameter(f"{host} is reached from elsewhere: give --token-file too", param_hint="--host")
    hosts = (*LOOPBACK, *(allowed_host or ())) if _is_loopback(host) or allowed_host else ("*",)
    settings = Settings(db=db, token=token, hosts=hosts, workers=workers)
    ringing = bell()
    application = create_app(settings, on_job=ringing.release)
    sys.stderr.write(
        f"meshplan answers at http://{host}:{port}, its API below /api/v1, with {counted(workers, 'worker')}; "
        "Ctrl-C ends it\n"
    )
    # uvicorn ends on a signal and then raises it anew: as an exception, so that the workers end as they should.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with crew(settings, ringing):
        uvicorn.run(
            application,
            host=host,
            port=port,
            http=ForgivingProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
        )


def read_token(file: Path) -> str:
    """The token in a file.

    Raises:
        BadParameter: it cannot be read, or is too short to keep anybody out.
    """
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--token-file") from error
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        hint = "such as of: openssl rand -hex 32"
        raise typer.BadParameter(
            f"{file} must hold one word of at least {LEAST_TOKEN} letters, {hint}", param_hint="--token-file"
        )
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return bool(ipaddress.ip_address(host.strip("[]")).is_loopback)
    except ValueError:
        return False
