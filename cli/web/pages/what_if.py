"""What if: how do a plan's figures move with price, load and use?"""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter, Request, Response

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.cli.web.api import Using
from meshplan.cli.web.calls import Answer
from meshplan.cli.web.pages import calls
from meshplan.cli.web.pages.site import HTML, content, fragment, is_good, page, problem_page
from meshplan.cli.web.state import Service
from meshplan.planner.core.plan import digest

router = APIRouter(include_in_schema=False)
_SLIDERS = ("rate", "in_flight", "batch", "price", "utilisation", "power_price")


def _values(request: Request) -> dict[str, float]:
    """Where the sliders stand, from the address.

    Raises:
        SpecError: a value is no number.
    """
    values, problems = {}, []
    for name in _SLIDERS:
        text = request.query_params.get(name)
        if text:
            try:
                values[name] = float(text)
            except ValueError:
                values[name] = math.nan
            if not math.isfinite(values[name]):
                problems.append(Problem(path=name, message=f"{text!r} is no number"))
    if problems:
        raise SpecError(problems, of="the question")
    return values


def _answer(handle: str, request: Request, service: Service) -> Answer:
    """The figures; those that were asked before are remembered, since a slider is moved back and forth."""
    values = _values(request)
    state = service.catalog_state.now()
    key = digest({"what_if": handle, "values": values, "catalog": state})
    known = service.remembered.get(key)
    if known is not None:
        return known
    answer = service.calls.answer(calls.what_if, state, handle, values)
    if is_good(answer) and handle == content(answer)["plan_id"]:
        service.remembered.put(key, answer)
    return answer


@router.get("/plans/{handle}/what-if")
def get_what_if(handle: str, request: Request, service: Using) -> Response:
    """The sliders and every figure before and after; where they stand is in the address."""
    answer = _answer(handle, request, service)
    if not is_good(answer):
        return problem_page(request, content(answer))
    return page(request, "what_if.html", found=content(answer))


@router.get("/plans/{handle}/what-if/figures")
def get_figures(handle: str, request: Request, service: Using) -> Response:
    """The table of figures alone, for a script that has moved a slider."""
    answer = _answer(handle, request, service)
    if not is_good(answer):
        return problem_page(request, content(answer))
    found: dict[str, Any] = content(answer)
    return Response(fragment("figures.html", figures=found["figures"]), media_type=HTML)
