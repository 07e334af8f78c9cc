"""The HTTP API, version 1: the answers of the command line as resources.

A question is a spec, in JSON or YAML, as the whole body. Searches are jobs; everything else is answered at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from meshplan.catalogs.database.job_rows import Job, JobState
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.errors import SpecError, StoreError
from meshplan.cli.answers.entries import Section, described, entry_rows
from meshplan.cli.answers.plans import listed_plan
from meshplan.cli.web import calls
from meshplan.cli.web.asking import ROWS_TYPES, Options, check_question, job_digest, read_question, read_text
from meshplan.cli.web.calls import Answer, document_answer, problem_answer
from meshplan.cli.web.jobs.worker import ANSWER
from meshplan.cli.web.metrics import KNOWN, REFUSED, SEARCHED
from meshplan.cli.web.openapi.operations import (
    EVENTS,
    KIND_PARAMETER,
    REFUSALS,
    ZIP,
    answers,
    reads,
    reads_rows,
)
from meshplan.cli.web.problems import problem
from meshplan.cli.web.state import Service
from meshplan.planner.core.kinds import kind_of

PREFIX = "/api/v1"
# Seconds between two looks at a job whose events somebody follows.
LOOK_S = 0.5
MOST_COMPARED = 6
KIND = "plan"  # of jobs
MOST_LISTED = 200

router = APIRouter(prefix=PREFIX, responses=REFUSALS, default_response_class=Response)


async def service_of(request: Request) -> Service:
    """What the application was made with; asynchronous, since FastAPI calls everything else in another thread."""
    service: Service = request.app.state.service
    return service


def client_of(request: Request) -> str:
    """Who asks, for limits and for whose job it is: an address."""
    return request.client.host if request.client else ""


Using = Annotated[Service, Depends(service_of)]
Listed = Annotated[int, Query(ge=1, le=MOST_LISTED)]


def respond(answer: Answer) -> Response:
    """An answer as it is: the text of the command line, byte for byte."""
    return Response(answer.body, status_code=answer.status, media_type=answer.media_type)


async def question(request: Request) -> dict[str, Any]:
    """The spec in the body.

    Raises:
        SpecError: it is none.
    """
    return read_question(await request.body(), request.headers.get("content-type", ""))


Question = Annotated[dict[str, Any], Depends(question)]
# Where an answer leads: resource → its parameters, as OpenAPI's runtime expressions.
_JOB, _PLAN = {"job_id": "$response.body#/job_id"}, {"handle": "$response.body#/plan_id"}
_OF_A_JOB = dict.fromkeys(("get_job", "get_events", "delete_job"), _JOB)
_OF_A_PLAN = dict.fromkeys(("get_plan", "get_explanation", "get_files", "post_record"), _PLAN)
_OF_A_PLAN |= {"get_comparison": {"plans": "$response.body#/plan_id"}}


# --- jobs and plans ---------------------------------------------------------------------------------------------------


@router.post(
    "/plans",
    responses=answers(200, links=_OF_A_PLAN) | answers(202, schema="Job", links=_OF_A_JOB),
    openapi_extra=reads("Spec"),
)
def post_plan(spec: Question, options: Annotated[Options, Query()], request: Request, service: Using) -> Response:
    """Ask for the best plan: 202 with the job that searches it, or 200 with the plan where it was asked before."""
    try:
        asked = ask(spec, options, request, service)
    except SpecError:
        told = service.calls.answer(calls.refused, spec)  # with the names that the catalog lacks
        if told.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        return respond(told)
    if asked.answer is not None:
        return respond(asked.answer)
    assert asked.job is not None  # noqa: S101 - one of both is there
    response = respond(document_answer(job_document(asked.job), status=202))
    response.headers["location"] = f"{PREFIX}/jobs/{asked.job.job_id}"
    return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What became of a question.

    Args:
        job: that searches it, or that has answered it; None where it is refused.
        answer: the plan, that there is none, or the refusal; None while it is searched.
    """

    job: Job | None
    answer: Answer | None


def ask(spec: dict[str, Any], options: Options, request: Request, service: Service) -> Asked:
    """Let a question be searched, unless it was answered before.

    Raises:
        SpecError: it is none.
    """
    check_question(spec)
    if kind_of(spec).spec_model(spec) is None:  # an instance, whose arrays are read where no request's text can do harm
        read = service.calls.answer(calls.checked, spec)
        if read.status != HTTPStatus.OK:
            return Asked(job=None, answer=read)
    client = client_of(request)
    digest = job_digest(spec, options, service.catalog_state.now())
    known = service.jobs.answered(kind=KIND, digest=digest)
    found = None if known is None else known_answer(known, service)
    if found is not None:
        service.metrics.asked(KNOWN)
        return Asked(job=known, answer=found)
    document, most = {"spec": spec, "options": options.model_dump(exclude_none=True)}, service.settings.most_waiting
    job = service.jobs.submit(document, kind=KIND, digest=digest, client=client, most=most)
    if job is None:
        refused = problem(429, "Too many questions at once", f"{most} of yours wait: ask later")
        service.metrics.asked(REFUSED)
        return Asked(job=None, answer=problem_answer(refused))
    service.metrics.asked(SEARCHED)
    service.on_job()
    return Asked(job=job, answer=None)


def known_answer(job: Job, service: Service) -> Answer | None:
    """The answer of a job that is done; None where its plan was deleted since."""
    if job.plan_id is None:
        return document_answer(job_progress(job)[ANSWER])
    found = service.calls.answer(calls.stored, job.plan_id)
    return found if found.status == HTTPStatus.OK else None


def job_progress(job: Job) -> dict[str, Any]:
    """What the worker told last."""
    return {} if job.progress is None else dict(job.progress)


def job_document(job: Job) -> dict[str, Any]:
    """A job as it is shown: its state, how far it is, where its plan lies, or that there is none (``answer``)."""
    return {
        "job_id": job.job_id,
        "state": job.state.value,
        "cancel_asked": job.cancel_asked,
        "submitted_at": _time(job.submitted_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
        "attempts": job.attempts,
        "progress": {name: value for name, value in job_progress(job).items() if name != ANSWER},
        "answer": job_progress(job).get(ANSWER),
        "plan_id": job.plan_id,
        "plan": None if job.plan_id is None else f"{PREFIX}/plans/{job.plan_id}",
        "problem": None if job.problem is None else dict(job.problem),
    }


def _told(job: Job, service: Service) -> dict[str, Any]:
    """A job alone: with how many clients want its answer, and how many jobs wait before it."""
    askers = len(service.jobs.askers(job.job_id))
    return {**job_document(job), "num_askers": askers, "num_ahead": service.jobs.ahead_of(job)}


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def _no_job(job_id: str) -> Response:
    return respond(problem_answer(problem(404, "There is no such job", f"no job {job_id!r}; {PREFIX}/jobs lists them")))


@router.get("/jobs", responses=answers(200))
def get_jobs(service: Using, state: JobState | None = None, limit: Listed = 50) -> Response:
    """The jobs, the newest first."""
    return respond(
        document_answer({"jobs": [job_document(job) for job in service.jobs.listed(state=state, limit=limit)]})
    )


@router.get("/jobs/{job_id}", responses=answers(200, schema="Job", links=_OF_A_JOB | _OF_A_PLAN))
def get_job(job_id: str, service: Using) -> Response:
    """State, incumbent, bound and seconds of a job."""
    job = service.jobs.get(job_id)
    return _no_job(job_id) if job is None else respond(document_answer(_told(job, service)))


@router.delete("/jobs/{job_id}", status_code=202, responses=answers(202, schema="Job"))
def delete_job(job_id: str, request: Request, service: Using) -> Response:
    """End a job: one that waits is cancelled, one that runs keeps the best plan that it has found.

    A job that other clients have asked for, too, goes on for them (``num_askers``).
    """
    job = service.jobs.cancel(job_id, client=client_of(request))
    return _no_job(job_id) if job is None else respond(document_answer(_told(job, service), status=202))


@router.get("/jobs/{job_id}/events", responses=answers(200, media_type=EVENTS))
async def get_events(job_id: str, service: Using) -> Response:
    """The job as server-sent events, one whenever it changes, until it has ended."""
    if await run_in_threadpool(service.jobs.get, job_id) is None:
        return _no_job(job_id)

    async def changes() -> AsyncIterator[dict[str, str]]:
        last = ""
        while (job := await run_in_threadpool(service.jobs.get, job_id)) is not None:
            text = json.dumps(await run_in_threadpool(_told, job, service))
            if text != last:
                last = text
                yield {"event": job.state.value, "data": text}
            if job.is_finished:
                return
            await asyncio.sleep(LOOK_S)

    return EventSourceResponse(changes())


@router.get("/plans", responses=answers(200))
def get_plans(
    service: Using, kind: str | None = None, limit: Listed = 50, offset: Annotated[int, Query(ge=0)] = 0
) -> Response:
    """The stored plans, the newest first."""
    rows = PlanRows(service.catalog.engine).list(kind=kind)
    listed = [listed_plan(row) for row in rows[offset : offset + limit]]
    return respond(document_answer({"total": len(rows), "offset": offset, "plans": listed}))


@router.get("/plans/{handle}", responses=answers(200, links=_OF_A_PLAN))
def get_plan(handle: str, service: Using) -> Response:
    """A stored plan by id, the beginning of one, tag, or ``latest``."""
    return respond(service.calls.answer(calls.stored, handle))


@router.get("/plans/{handle}/explain", responses=answers(200))
def get_explanation(handle: str, service: Using, instead: Annotated[list[str] | None, Query()] = None) -> Response:
    """Why the plan is as it is; with ``instead=tp=4`` what another choice would cost."""
    return respond(service.calls.answer(calls.explained, handle, list(instead or ())))


@router.get("/plans/{handle}/files", responses=answers(200, media_type=ZIP))
def get_files(
    handle: str,
    service: Using,
    target: str | None = None,
    framework: str | None = None,
    framework_version: str = "",
    script: str = "",
    image: str = "",
    model_path: str = "",
) -> Response:
    """The launcher files as a ZIP archive."""
    options = {
        "framework": framework,
        "framework_version": framework_version,
        "script": script,
        "image": image,
        "model_path": model_path,
    }
    answer = service.calls.answer(calls.files, handle, target, options)
    response = respond(answer)
    if answer.media_type == calls.ZIP:
        response.headers["content-disposition"] = 'attachment; filename="meshplan.zip"'
    return response


@router.post("/plans/{handle}/record", status_code=201, responses=answers(201), openapi_extra=reads("MeasuredFigures"))
def post_record(handle: str, measured: Question, service: Using) -> Response:
    """Attach what was measured: metric → value in SI units."""
    return respond(service.calls.answer(calls.recorded, handle, measured))


@router.get("/compare", responses=answers(200))
def get_comparison(plans: str, service: Using) -> Response:
    """Plans side by side, ``plans=ID,ID``; one alone against what was measured for it."""
    handles = [handle for handle in plans.split(",") if handle]
    if not 1 <= len(handles) <= MOST_COMPARED:
        raise StoreError(f"name one to {MOST_COMPARED} plans: compare?plans=ID,ID")
    return respond(service.calls.answer(calls.compared, handles))


# --- what takes a moment ----------------------------------------------------------------------------------------------


@router.post("/estimate", responses=answers(200), openapi_extra=reads("PinnedSpec"))
async def post_estimate(request: Request, service: Using) -> Response:
    """Price the one configuration that the spec pins under ``fixed``."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    # What was asked in the same words is answered here, without reading it again: most of what is asked repeatedly.
    state = service.catalog_state.fresh()
    answer = None if state is None else service.remembered.get(_words(state, media_type, body))
    if answer is None:
        answer = await run_in_threadpool(_estimated, body, media_type, service)
    return respond(answer)


def _words(state: str, media_type: str, body: bytes) -> str:
    """The same for the same bytes to the same catalog."""
    return hashlib.sha256(b"\0".join((state.encode(), media_type.encode(), body))).hexdigest()


def _estimated(body: bytes, media_type: str, service: Service) -> Answer:
    """An estimate; what was asked before in other words is remembered.

    Raises:
        SpecError: the body is no spec.
    """
    state = service.catalog_state.now()
    spec = read_question(body, media_type)
    digest = job_digest(spec, Options(), state)
    answer = service.remembered.get(digest) or service.calls.answer(calls.estimate, state, spec)
    if answer.status == HTTPStatus.OK:
        for key in (digest, _words(state, media_type, body)):
            service.remembered.put(key, answer)
    return answer


async def rows(request: Request) -> str:
    """The measured rows in the body, one JSON object a line.

    Raises:
        SpecError: another type, or no text.
    """
    return read_text(await request.body(), request.headers.get("content-type", ""), ROWS_TYPES)


@router.post("/validate", responses=answers(200), openapi_extra=reads_rows())
def post_validate(measured: Annotated[str, Depends(rows)], service: Using) -> Response:
    """Predict measured runs, one JSON object a line, and say how far off the predictions are."""
    return respond(service.calls.answer(calls.validated, measured))


@router.get("/catalog/{section}", responses=answers(200))
def get_entries(section: Section, service: Using, search: str = "") -> Response:
    """All entries of a section."""
    rows = [dict(row) for row in entry_rows(service.catalog, section, search=search)]
    return respond(document_answer({section.value: rows}))


@router.get("/catalog/{section}/{name:path}", responses=answers(200))
def get_entry(section: Section, name: str, service: Using) -> Response:
    """One entry: every number with its source."""
    del section  # names are unique over all sections
    return respond(document_answer(described(service.catalog, name)))


@router.post("/catalog", status_code=201, responses=answers(201), openapi_extra=reads("CatalogDocument"))
def post_entries(entries: Question, service: Using) -> Response:
    """Add or replace entries, facts and prices, as ``meshplan catalog import``: all of a document, or nothing."""
    answer = service.calls.answer(calls.imported, entries)
    service.catalog_state.forget()
    return respond(answer)


@router.get("/schema/{kind}", responses=answers(200))
def get_schema(kind: Annotated[str, Path(json_schema_extra=dict(KIND_PARAMETER))]) -> Response:
    """The JSON Schema of a kind of specs."""
    return respond(document_answer(calls.schema(kind)))
