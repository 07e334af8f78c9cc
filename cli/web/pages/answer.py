"""Answer: what should I run, how sure is that, and why not otherwise? Stored plans, their pictures and files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.cli.answers.plans import listed_plan
from meshplan.cli.web.api import Using, respond
from meshplan.cli.web.calls import files as files_of
from meshplan.cli.web.calls import stored
from meshplan.cli.web.pages import calls
from meshplan.cli.web.pages.site import content, is_good, page, problem_page

router = APIRouter(include_in_schema=False)
_OF_A_PAGE = 50


@router.get("/plans")
def get_plans(request: Request, service: Using, kind: str = "", offset: Annotated[int, Query(ge=0)] = 0) -> Response:
    """The stored plans, the newest first, to look at and to compare."""
    rows = PlanRows(service.catalog.engine).list(kind=kind or None)
    plans = [listed_plan(row) for row in rows[offset : offset + _OF_A_PAGE]]
    next_offset = offset + _OF_A_PAGE if offset + _OF_A_PAGE < len(rows) else None
    return page(request, "plans.html", plans=plans, kind=kind, total=len(rows), next_offset=next_offset)


@router.get("/plans/{handle}")
def get_plan(handle: str, request: Request, service: Using) -> Response:
    """The page of a plan; ``latest``, tags and beginnings of ids lead to the id."""
    answer = service.calls.answer(calls.answer, handle)
    if not is_good(answer):
        return problem_page(request, content(answer))
    plan = content(answer)
    if plan["plan_id"] != handle:
        return RedirectResponse(f"/plans/{plan['plan_id']}")
    return page(request, "answer.html", plan=plan, is_stored=True, host=request.url.netloc)


@router.get("/plans/{handle}/report")
def get_report(handle: str, request: Request, service: Using) -> Response:
    """The whole report, as the command line prints it."""
    answer = service.calls.answer(calls.report, handle)
    return respond(answer) if is_good(answer) else problem_page(request, content(answer))


@router.get("/plans/{handle}/{name}.svg")
def get_picture(handle: str, name: str, request: Request, service: Using) -> Response:
    """A picture of the plan."""
    answer = service.calls.answer(calls.picture, handle, name)
    return respond(answer) if is_good(answer) else problem_page(request, content(answer))


@router.get("/plans/{handle}/files")
def get_files(handle: str, request: Request, service: Using, target: str = "", framework: str = "") -> Response:
    """The launcher files of one target; where it cannot express the plan, why."""
    answer = service.calls.answer(files_of, handle, target or None, {"framework": framework or None})
    if not is_good(answer):
        return problem_page(request, content(answer))
    response = respond(answer)
    plain = "".join(letter for letter in f"{handle}-{target or 'files'}" if letter.isalnum() or letter == "-")
    response.headers["content-disposition"] = f'attachment; filename="meshplan-{plain[:60]}.zip"'
    return response


@router.get("/plans/{handle}/document.json")
def get_document(handle: str, request: Request, service: Using) -> Response:
    """The plan's JSON as a file."""
    answer = service.calls.answer(stored, handle)
    if not is_good(answer):
        return problem_page(request, content(answer))
    response = respond(answer)
    response.headers["content-disposition"] = 'attachment; filename="plan.json"'
    return response
