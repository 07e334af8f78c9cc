"""Compare: what differs between plans, by how much, and why? And: what would another choice cost?"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.errors import StoreError
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.cli.answers.plans import listed_plan
from meshplan.cli.web.api import MOST_COMPARED, Using
from meshplan.cli.web.pages import calls
from meshplan.cli.web.pages.site import content, is_good, page, problem_page

router = APIRouter(include_in_schema=False)
_OFFERED = 50


@router.get("/compare")
def get_comparison(request: Request, service: Using, plans: Annotated[list[str] | None, Query()] = None) -> Response:
    """Plans side by side, ``plans=a,b,c``; without any the plans to choose from."""
    handles = [handle for part in plans or () for handle in part.split(",") if handle]
    if not handles:
        rows = PlanRows(service.catalog.engine).list()[:_OFFERED]
        offered = [listed_plan(row) for row in rows]
        return page(request, "compare.html", found=None, offered=offered, most=MOST_COMPARED)
    if len(handles) > MOST_COMPARED:
        raise StoreError(f"at most {MOST_COMPARED} plans stand side by side, not {len(handles)}")
    answer = service.calls.answer(calls.compared, handles)
    if not is_good(answer):
        return problem_page(request, content(answer))
    return page(request, "compare.html", found=content(answer), offered=(), most=MOST_COMPARED)


@router.get("/plans/{handle}/instead")
def get_instead(
    handle: str, request: Request, service: Using, choice: Annotated[list[str] | None, Query()] = None
) -> Response:
    """The plan beside the best one that makes other choices, ``choice=tensor_parallel=8``."""
    answer = service.calls.answer(calls.instead, handle, list(choice or ()))
    if not is_good(answer):
        return problem_page(request, content(answer))
    found = content(answer)
    return page(request, "instead.html", found=found, spec_yaml=yaml_text(found["spec"], allow_unicode=True))
