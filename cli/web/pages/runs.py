"""Runs: do predictions hold? What was recorded for stored plans beside what they predicted."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from meshplan.cli.web.api import Using
from meshplan.cli.web.pages import calls
from meshplan.cli.web.pages.site import content, is_good, page, problem_page

router = APIRouter(include_in_schema=False)


@router.get("/runs")
def get_runs(request: Request, service: Using) -> Response:
    """Errors of every recorded metric, and how they move."""
    answer = service.calls.answer(calls.runs)
    if not is_good(answer):
        return problem_page(request, content(answer))
    return page(request, "runs.html", found=content(answer), host=request.url.netloc)
