"""Catalog: on what numbers do the answers rest, and from where are they?"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from meshplan.cli.answers.entries import Section, described, entry_rows
from meshplan.cli.web.api import Using
from meshplan.cli.web.pages.site import page
from meshplan.cli.web.pages.views.catalog import entry_view, section_table

router = APIRouter(include_in_schema=False)


@router.get("/catalog")
def get_catalog(request: Request, service: Using, search: str = "") -> Response:
    """The devices, which most people look for."""
    return get_section(Section.DEVICES, request, service, search)


@router.get("/catalog/{section}")
def get_section(section: Section, request: Request, service: Using, search: str = "") -> Response:
    """The entries of a section that hold the words of ``search``."""
    rows = entry_rows(service.catalog, section, search=search)
    return page(
        request,
        "catalog.html",
        section=section.value,
        sections=[one.value for one in Section],
        search=search,
        found=section_table(section, rows),
    )


@router.get("/catalog/{section}/{name:path}")
def get_entry(section: Section, name: str, request: Request, service: Using) -> Response:
    """One entry: every number with its source, and which of several counts."""
    entry = entry_view(described(service.catalog, name))
    return page(request, "entry.html", section=section.value, sections=[one.value for one in Section], entry=entry)
