"""Ask: what should I run? A form that writes its spec, an editor, and the job that answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from meshplan.catalogs.database.job_rows import Job
from meshplan.catalogs.errors import SpecError, StoreError
from meshplan.cli.answers.entries import Section, entry_rows
from meshplan.cli.web.api import PREFIX, Asked, Using, ask, client_of, job_document, job_progress, respond
from meshplan.cli.web.asking import Options
from meshplan.cli.web.calls import document_answer
from meshplan.cli.web.jobs.worker import ANSWER
from meshplan.cli.web.pages import calls
from meshplan.cli.web.pages.site import content, is_good, page, problem_page
from meshplan.cli.web.pages.views.ask import EXAMPLE_TEXTS, EXAMPLES, FIELDS, SERVE
from meshplan.cli.web.pages.views.job import job_view
from meshplan.cli.web.problems import problem
from meshplan.cli.web.state import Service
from meshplan.planner.core.reading.documents import parse_document
from meshplan.planner.launch.registry import engine_names, framework_names

router = APIRouter(include_in_schema=False)
_MOST_FIELDS = 40
_SEE_OTHER = 303
_OBJECTIVES = (
    "throughput", "usd_per_run", "throughput_per_device", "usd_per_million_tokens", "num_devices", "max_request_rate",
    "energy", "latency", "usd_per_item",
)  # fmt: skip


async def form_fields(request: Request) -> dict[str, str]:
    """The fields of a form that a page of this service has sent.

    Raises:
        SpecError: it is none, or a page of somebody else sent it.
    """
    if not is_own(request):
        message = "the form was sent by a page of another site"
        raise SpecError.at("", message, of="the request")
    try:
        fields = parse_qs((await request.body()).decode("utf-8"), max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise SpecError.at("", f"the form cannot be read: {error}", of="the request") from error
    return {name: values[0] for name, values in fields.items()}


def is_own(request: Request) -> bool:
    """Whether a form comes from here: browsers say where a page that sends one is from; other clients say nothing."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


Fields = Annotated[dict[str, str], Depends(form_fields)]


def names(service: Service) -> dict[str, list[str]]:
    """What completes the fields."""
    models = [
        str(row["slug"])
        for section in (Section.MODELS, Section.DIFFUSION_MODELS)
        for row in entry_rows(service.catalog, section)
    ]
    nodes = [str(row["slug"]) for row in entry_rows(service.catalog, Section.NODES)]
    devices = [str(row["slug"]) for row in entry_rows(service.catalog, Section.DEVICES)]
    return {
        "models": models,
        "devices": [f"8x{name}" for name in (*nodes, *devices)],
        "objectives": list(_OBJECTIVES),
        "targets": [*framework_names(), *engine_names()],
    }


def _form(
    request: Request, service: Service, fields: Mapping[str, str], *, text: str | None = None, status: int = 200
) -> Response:
    """The page with the form filled in; with ``text`` its editor comes first."""
    view = content(service.calls.answer(calls.form, dict(fields))) if any(fields.values()) else {}
    wrong = [] if text is None else content(service.calls.answer(calls.text, text))["errors"]
    return page(
        request,
        "ask.html",
        status=status,
        fields=FIELDS,
        values=fields,
        purpose=fields.get("purpose", SERVE),
        view={"yaml": "", "errors": [], "command": "", **view},
        names=names(service),
        examples=[*EXAMPLES],
        example_texts=EXAMPLE_TEXTS,
        text=text or "",
        text_errors=wrong,
        host=request.url.netloc,
        is_text=text is not None,
    )


@router.get("/")
def get_form(request: Request, service: Using, example: str = "", text_of: str = "") -> Response:
    """The form; its fields stand in the address."""
    if text_of in EXAMPLE_TEXTS:
        return _form(request, service, {}, text=EXAMPLE_TEXTS[text_of])
    fields = dict(EXAMPLES.get(example, {}))
    known = {"purpose", *(field.name for field in FIELDS)}
    fields |= {name: value for name, value in request.query_params.items() if name in known}
    return _form(request, service, fields)


@router.post("/ask/check")
def post_check(fields: Fields, service: Using) -> Response:
    """What a form means, and what is wrong with it, while somebody writes it."""
    text = fields.get("spec")
    return respond(service.calls.answer(calls.form, fields) if text is None else service.calls.answer(calls.text, text))


@router.post("/ask")
def post_form(fields: Fields, request: Request, service: Using) -> Response:
    """Ask; the browser goes to the job, or to the plan where it is known."""
    text = fields.get("spec")
    if text is None:
        view = content(service.calls.answer(calls.form, fields))
        if view["errors"]:
            return _form(request, service, fields, status=422)
        text = str(view["yaml"])
    try:
        asked = ask(parse_document(text, name="the text"), Options(), request, service)
    except SpecError:
        return _form(request, service, {}, text=text, status=422)
    return _next(request, asked)


def _next(request: Request, asked: Asked) -> Response:
    if asked.job is None:
        return problem_page(request, content(asked.answer) if asked.answer else problem(503, "Not asked", ""))
    if asked.job.plan_id is not None:
        return RedirectResponse(f"/plans/{asked.job.plan_id}", _SEE_OTHER)
    return RedirectResponse(f"/jobs/{asked.job.job_id}", _SEE_OTHER)


def _job(job_id: str, service: Service) -> Job:
    job = service.jobs.get(job_id)
    if job is None:
        raise StoreError(f"no job {job_id!r}; it may have been deleted")
    return job


@router.get("/jobs/{job_id}")
def get_job(job_id: str, request: Request, service: Using) -> Response:
    """How far a search is; when it has ended, its plan, or why there is none."""
    job = _job(job_id, service)
    if job.plan_id is not None and job.is_finished:
        return RedirectResponse(f"/plans/{job.plan_id}", _SEE_OTHER)
    document: Any = job_progress(job).get(ANSWER)
    if document is not None and job.is_finished:
        answer = service.calls.answer(calls.answer_without_plan, document)
        if not is_good(answer):
            return problem_page(request, content(answer))
        return page(request, "answer.html", plan=content(answer), is_stored=False, host=request.url.netloc)
    view = _view(job, request, service)
    return page(request, "job.html", job=view, events=f"{PREFIX}/jobs/{job_id}/events")


@router.post("/jobs/{job_id}/cancel")
def post_cancel(job_id: str, fields: Fields, request: Request, service: Using) -> Response:
    """Stop a search that nobody else waits for; what it has found is kept."""
    del fields  # only whether they come from here
    service.jobs.cancel(_job(job_id, service).job_id, client=client_of(request))
    return RedirectResponse(f"/jobs/{job_id}", _SEE_OTHER)


def _view(job: Job, request: Request, service: Service) -> dict[str, Any]:
    """A job as the one who looks may see it."""
    is_asker = client_of(request) in service.jobs.askers(job.job_id)
    return job_view(job, is_asker=is_asker, num_ahead=service.jobs.ahead_of(job))


@router.get("/jobs/{job_id}/progress")
def get_progress(job_id: str, request: Request, service: Using) -> Response:
    """A job as its page shows it, for a script that has heard of a change."""
    job = _job(job_id, service)
    view = _view(job, request, service)
    return respond(document_answer({**view, "is_finished": job_document(job)["finished_at"] is not None}))
