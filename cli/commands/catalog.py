"""``meshplan catalog``: what hardware, node types, models and prices exist, and where each number comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.units import format_bandwidth, format_bytes, format_duration, format_flops, format_usd
from meshplan.cli.answers.entries import Section, described_as_written, entry_rows
from meshplan.cli.commands.reference import choices, fields, schema, support
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption
from meshplan.cli.render import Column, Format, Row, show_document, show_rows
from meshplan.planner.core.text import counted

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Hardware, links, node types, models and prices, and where each number comes from.",
)
app.command("schema")(schema)
app.command("choices")(choices)
app.command("fields")(fields)
app.command("support")(support)


@app.command("list")
def list_entries(
    section: Annotated[Section, typer.Argument(help="What to list.")] = Section.DEVICES,
    search: Annotated[str, typer.Option("--search", help="Only entries with these words.", show_default=False)] = "",
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List a section of the catalog; of several facts for one number the one in effect is shown."""
    show_rows(entry_rows(open_catalog(db, or_shipped=True), section, search=search), LISTINGS[section], form)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Slug of any section's entry.")],
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show one entry: every number with value, evidence level, source, date, number of samples and spread."""
    catalog = open_catalog(db, or_shipped=True)
    entry = described_as_written(catalog, name)
    if form in (Format.JSON, Format.YAML) or "facts" not in entry:
        show_document(entry, form)
        return
    texts = ", ".join(value for key, value in entry.items() if isinstance(value, str) and key not in ("kind", "slug"))
    show_rows(
        entry["facts"], _FACT_COLUMNS, form, title=f"{entry['slug']} ({entry['kind'].replace('_', ' ')}): {texts}"
    )
    if entry.get("prices") and form is not Format.CSV:
        show_rows(entry["prices"], _PRICE_COLUMNS[1:], form, title="\nPrices")


@app.command("export")
def export_entries(
    name: Annotated[str | None, typer.Argument(help="One entry; everything when left out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write instead of stdout.")] = None,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.JSON,
) -> None:
    """Write the catalog, or one entry, as one JSON or YAML document that 'catalog import' reads."""
    from meshplan.catalogs.database.transfer import export_document
    from meshplan.catalogs.writing import write_file
    from meshplan.cli.render import rendered_document

    if form not in (Format.JSON, Format.YAML):
        raise typer.BadParameter(f"an export is json or yaml, not {form.value}", param_hint="--format")
    document = export_document(open_catalog(db).engine, name)
    if out is None:
        show_document(document, form)
        return
    write_file(out, rendered_document(document, form), force=force)


@app.command("import")
def import_entries(
    file: Annotated[
        Path,
        typer.Argument(help="A file of 'catalog export', a price list (CSV), or a folder of kernel tables."),
    ],
    provider: Annotated[
        str | None, typer.Option("--provider", help="Whose prices a CSV of SkyPilot or gpuhunt lists.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="SLUG", help="Device whose kernel tables a folder holds.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="NAME", help="The device's folder among the kernel tables.")
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Add or replace entries, facts and prices: all of a file, or nothing and the list of what is wrong."""
    from meshplan.catalogs.database.transfer import import_document, read_document
    from meshplan.planner.core.reading.doors import ENTRIES, refuse_other

    catalog = open_catalog(db)
    if file.is_dir():
        show_document(_fitted_surfaces(catalog, file, device, system), form)
        return
    document = _price_document(catalog, file, provider) if file.suffix == ".csv" else read_document(file)
    if isinstance(document, dict):
        refuse_other(document, ENTRIES, name=str(file))
    changes = import_document(catalog.engine, document, name=str(file))
    show_document({"added": changes.added, "replaced": changes.replaced, "unchanged": changes.unchanged}, form)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Slug of an entry, or FRAMEWORK/ARCHITECTURE of constants.")],
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Take back what you imported or measured about an entry; numbers that ship with meshplan come back."""
    from meshplan.catalogs.errors import CatalogError

    catalog = open_catalog(db)
    removed = catalog.forget(name)
    if not removed:
        known = dict.fromkeys(row["subject"] for row in catalog.own_rows())
        if known:
            raise UnknownEntryError("entry of your own", name, known)
        raise CatalogError(f"nothing about {name!r} is your own: all numbers are those that ship with meshplan")
    show_document({"subject": name, "removed": removed}, form)


@app.command()
def history(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """List what you imported or measured, the newest first; 'catalog remove' takes it back."""
    show_rows(open_catalog(db, or_shipped=True).own_rows(), _HISTORY_COLUMNS, form)


@app.command("diff")
def diff_catalogs(
    first: Annotated[str, typer.Argument(metavar="A", help="A catalog: file or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    form: FormatOption = Format.TABLE,
) -> None:
    """List the numbers that count in two catalogs and differ, with their sources."""
    from meshplan.catalogs.measurements.compare import differences

    found = differences(open_catalog(first), open_catalog(second))
    show_rows([difference.row() for difference in found], _DIFFERENCE_COLUMNS, form)


@app.command()
def upgrade(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Bring the database to this version's schema and seed numbers; your own entries stay."""
    from meshplan.catalogs.database.upgrade import upgrade_database

    done = upgrade_database(db)
    document = {
        "database": done.database,
        "from_revision": done.from_revision or "new",
        "to_revision": done.to_revision,
        "seeds_refreshed": done.seeds_refreshed,
    }
    show_document(document, form)


def _fitted_surfaces(catalog: Catalog, folder: Path, device: str | None, system: str | None) -> dict[str, Any]:
    from meshplan.catalogs.surfaces.files import user_folder
    from meshplan.profiler.shipped.fit_device import fit_device

    if device is None:
        raise typer.BadParameter(f"say whose kernels {folder} times: a slug of 'catalog list'", param_hint="--device")
    catalog.device(device)  # an unknown name is better refused before minutes of fitting
    fitted = fit_device(folder, device=device, system=system)
    return {"device": device, "surfaces": fitted, "folder": str(user_folder())}


def _price_document(catalog: Catalog, file: Path, provider: str | None) -> Any:
    from datetime import UTC, datetime

    from meshplan.catalogs.importers.prices import read_prices

    if provider is None:
        raise typer.BadParameter(f"say whose prices {file.name} lists, e.g. --provider aws", param_hint="--provider")
    try:
        text = file.read_text(encoding="utf-8")
        read_on = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}") from error
    prices = read_prices(
        text, catalog.node_types(), provider=provider, source=f"price list {file.name}", date=read_on, name=file.name
    )
    unmatched = counted(prices.num_unmatched, "offer")
    sys.stderr.write(f"{counted(prices.num_prices, 'price')}; {unmatched} without a node type in the catalog\n")
    return prices.document


def _significant(value: float) -> str:
    return f"{value:.4g}"


def _readable(row: Row) -> str:
    """``3.4 TB/s``, with the spread and the number of samples where they are known."""
    from meshplan.catalogs.facts import format_value

    value, low, high = (
        None if row[key] is None else format_value(row["field"], row[key]) for key in ("value", "low", "high")
    )
    notes = []
    if low or high:
        notes.append(f"{low} … {high}" if low and high else f"from {low}" if low else f"to {high}")
    if row["num_samples"]:
        notes.append(f"n={row['num_samples']}")
    return f"{value} ({', '.join(notes)})" if notes else str(value)


def _level(row: Row) -> str:
    return row["level"] if row["rules"] else f"{row['level']} (overruled)"


def _reference(row: Row) -> str:
    return f"{row['date']}, {row['source']}"


def _place(row: Row) -> str:
    return row["provider"] if row["region"] == "any" else f"{row['provider']} {row['region']}"


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} B"


_DEVICE_COLUMNS = (
    Column(key="slug", title="Device"),
    Column(key="architecture", title="Generation"),
    Column(key="memory_bytes", title="Memory", right=True, text=format_bytes),
    Column(key="memory_bandwidth_bytes_per_s", title="Bandwidth", right=True, text=format_bandwidth),
    Column(key="half_precision_flops_per_s", title="BF16/FP16", right=True, text=format_flops),
    Column(key="tdp_w", title="W", right=True),
)
_LINK_COLUMNS = (
    Column(key="slug", title="Link"),
    Column(key="name", title="Name"),
    Column(key="bandwidth_bytes_per_s", title="Bandwidth", right=True, text=format_bandwidth),
    Column(key="latency_s", title="Latency", right=True, text=format_duration),
)
_NODE_COLUMNS = (
    Column(key="slug", title="Node type", wrap=False),
    Column(key="device", title="Device", wrap=False),
    Column(key="num_devices", title="#", right=True),
    Column(key="scale_up_link", title="Inside"),
    Column(key="scale_out_bytes_per_s_per_device", title="Net/device", right=True, text=format_bandwidth, wrap=False),
    Column(key="on_demand_usd_per_hour", title="From/h", right=True, text=format_usd, wrap=False),
)
_MODEL_COLUMNS = (
    Column(key="slug", title="Model"),
    Column(key="name", title="Name"),
    Column(key="family", title="Family"),
)
_DIFFUSION_COLUMNS = (
    Column(key="slug", title="Model"),
    Column(key="makes", title="Makes"),
    Column(key="parameters", title="Parameters", right=True, text=_billions),
    Column(key="width", title="Pixels", right=True, derive=lambda row: f"{row['width']} × {row['height']}"),
    Column(key="frames", title="Frames", right=True),
    Column(key="steps", title="Steps", right=True),
)
_MACHINE_COLUMNS = (
    Column(key="slug", title="Machine"),
    Column(key="name", title="Name"),
    Column(key="cores", title="Cores", right=True),
    Column(key="memory_bytes", title="Memory", right=True, text=format_bytes),
    Column(key="memory_bandwidth_bytes_per_s", title="Bandwidth", right=True, text=format_bandwidth),
    Column(key="source", title="", footnote=True, wrap=False),
)
_DIFFERENCE_COLUMNS = (
    Column(key="kind", title="Kind"),
    Column(key="subject", title="Subject"),
    Column(key="field", title="Field"),
    Column(key="first", title="A", right=True),
    Column(key="second", title="B", right=True),
    Column(key="change", title="Change", right=True, text="{:+.1%}".format),
)
_PRICE_COLUMNS = (
    Column(key="node_type", title="Node type", wrap=False),
    Column(key="usd_per_hour", title="Price/h", right=True, text=format_usd, wrap=False),
    Column(key="provider", title="Provider", derive=_place),
    Column(key="terms", title="Terms", wrap=False),
    Column(key="date", title="Date", wrap=False),
    Column(key="source", title="", footnote=True, wrap=False),
)
_HISTORY_COLUMNS = (
    Column(key="subject", title="Entry", wrap=False),
    Column(key="what", title="What"),
    Column(key="value", title="Value, SI", right=True),
    Column(key="date", title="Date", wrap=False),
    Column(key="imported_at", title="Imported", text=lambda text: text[:16].replace("T", " "), optional=True),
    Column(key="source", title="", footnote=True, wrap=False),
)
_FACT_COLUMNS = (
    Column(key="field", title="Field", wrap=False),
    Column(key="value", title="Value", right=True, derive=_readable),
    Column(key="value", title="SI", right=True, text=_significant, wrap=False),
    Column(key="level", title="Level", derive=_level),
    Column(key="source", title="", derive=_reference, footnote=True, wrap=False),
)
# What people read of a section.
LISTINGS = {
    Section.DEVICES: _DEVICE_COLUMNS,
    Section.LINKS: _LINK_COLUMNS,
    Section.NODES: _NODE_COLUMNS,
    Section.MODELS: _MODEL_COLUMNS,
    Section.DIFFUSION_MODELS: _DIFFUSION_COLUMNS,
    Section.MACHINES: _MACHINE_COLUMNS,
    Section.PRICES: _PRICE_COLUMNS,
}
