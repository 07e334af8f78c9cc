"""The application: guard, errors as problem documents, the API, the pages, and what monitors ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import MeshplanError
from meshplan.cli.web import api
from meshplan.cli.web.calls import Calls, document_answer, problem_answer
from meshplan.cli.web.guard import Guard
from meshplan.cli.web.metrics import MEDIA_TYPE, Measured, Metrics
from meshplan.cli.web.openapi.document import documented
from meshplan.cli.web.pages import answer, ask, compare, runs, site, what_if
from meshplan.cli.web.pages import catalog as catalog_page
from meshplan.cli.web.problems import problem, problem_of
from meshplan.cli.web.settings import Settings
from meshplan.cli.web.state import CatalogState, Service
from meshplan.planner.core.plan import own_version

ROUTERS = tuple(part.router for part in (api, site, ask, answer, compare, what_if, runs, catalog_page))


def create_app(settings: Settings, *, on_job: Callable[[], object] = lambda: None) -> FastAPI:
    """The application; its processes start and end with it.

    Args:
        settings: its database and limits.
        on_job: called when there is work for a worker.

    Raises:
        CatalogError: the database cannot be opened.
    """
    catalog = Catalog.open(settings.db)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        calls = Calls(settings, ("meshplan.cli.web.pages.calls",))
        calls.warm_up()
        jobs = Jobs(catalog.engine)
        app.state.service = Service(
            settings=settings,
            catalog=catalog,
            jobs=jobs,
            metrics=Metrics(jobs),
            calls=calls,
            catalog_state=CatalogState(catalog),
            on_job=on_job,
        )
        try:
            yield
        finally:
            await run_in_threadpool(calls.close)

    app = FastAPI(
        title="meshplan",
        version=own_version(),
        docs_url=None,  # its pages fetch scripts from elsewhere
        redoc_url=None,
        lifespan=running,
        generate_unique_id_function=lambda route: route.name,
    )
    for router in ROUTERS:
        app.include_router(router)
    app.add_api_route("/metrics", measured, methods=["GET"], include_in_schema=False)
    app.add_api_route("/healthz", healthy, methods=["GET"], include_in_schema=False)
    app.add_api_route("/livez", living, methods=["GET"], include_in_schema=False)
    app.openapi = documented(app)  # type: ignore[method-assign]  # FastAPI's own way to extend its document
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(MeshplanError, _failed)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*settings.hosts], www_redirect=False)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(Measured)
    return app


async def living() -> Response:
    """That requests are answered at all; it asks no database, so that one that is away gets no service restarted."""
    return api.respond(document_answer({"status": "ok", "version": own_version()}))


def healthy(request: Request) -> Response:
    """Whether the database answers: whether requests should be sent here."""
    service: Service = request.app.state.service
    counts = {state.value: count for state, count in service.jobs.counts().items()}
    return api.respond(document_answer({"status": "ok", "version": own_version(), "jobs": counts}))


def measured(request: Request) -> Response:
    """What a monitor scrapes."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=MEDIA_TYPE)


def _told(request: Request, document: dict[str, Any]) -> Response:
    """A problem as a page for browsers, as a document for everybody else."""
    return site.problem_page(request, document) if site.wants_page(request) else api.respond(problem_answer(document))


async def _failed(request: Request, error: Exception) -> Response:
    return _told(request, problem_of(error))


async def _left(_: Request, __: Exception) -> Response:
    """Who has left in the middle of a body hears nothing, and the log need not hear of it."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _refused(request: Request, error: Any) -> Response:
    title = {404: "There is nothing here", 405: "This cannot be done here"}.get(error.status_code, "Refused")
    response = _told(request, problem(error.status_code, title, str(error.detail)))
    response.headers.update(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(sorted({*_methods(request)}))
    return response


def _methods(request: Request) -> Iterator[str]:
    """The methods of all routes at the address; the framework names those of the first alone."""
    for route in chain(request.app.routes, *(router.routes for router in ROUTERS)):
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            yield from route.methods or ()


async def _misread(request: Request, error: Any) -> Response:
    errors = [
        {"path": ".".join(str(part) for part in one["loc"][1:]), "message": str(one["msg"])} for one in error.errors()
    ]
    detail = "; ".join(f"{one['path']}: {one['message']}" for one in errors)
    return _told(request, problem(422, "The request cannot be read", detail, errors=errors))
