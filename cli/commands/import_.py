"""``meshplan import``: a launch command or configuration as a spec, to be priced and compared with a better plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import EXIT_INFEASIBLE
from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.imports.spec import Imported

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_COMMENT_WIDTH = 118
_CURRENT, _PROPOSED = "current", "proposed"
WhatArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|COMMAND...",
        help="Launch script, configuration files, or the command itself after --.",
        show_default=False,
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="NAME",
        help="Framework or engine of the input, where it is not recognised.",
        show_default=False,
    ),
]
NodeTypeOption = Annotated[
    str | None,
    typer.Option("--node-type", metavar="NAME", help="Node type (catalog list nodes).", show_default=False),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Device, instead of a node type.", show_default=False),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes", metavar="N", min=1, help="Number of nodes, where the input does not give it.", show_default=False
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Model, or path of a config.json.", show_default=False),
]
SequenceLengthOption = Annotated[
    int | None, typer.Option("--sequence-length", metavar="N", min=1, help="Tokens per sequence.", show_default=False)
]
GlobalBatchSizeOption = Annotated[
    int | None,
    typer.Option("--global-batch-size", metavar="N", min=1, help="Sequences per step.", show_default=False),
]
MicroBatchSizeOption = Annotated[
    int | None,
    typer.Option("--micro-batch-size", metavar="N", min=1, help="Sequences per micro-batch.", show_default=False),
]
InputLengthOption = Annotated[
    int | None,
    typer.Option("--input-length", metavar="N", min=1, help="Prompt tokens (serving).", show_default=False),
]
OutputLengthOption = Annotated[
    int | None,
    typer.Option("--output-length", metavar="N", min=1, help="Generated tokens (serving).", show_default=False),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", metavar="N", min=1, help="Requests in flight (serving).", show_default=False),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="A shell variable from outside.", show_default=False),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the spec there.", show_default=False)
]
FreeOption = Annotated[
    bool, typer.Option("--free", help="Leave 'fixed' out, so that planning may change every choice.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Price it, search for a better plan, store both, and show the differences.")
]


@app.command(name="import")
def import_(
    what: WhatArgument,
    source: SourceOption = None,
    node_type: NodeTypeOption = None,
    device: DeviceOption = None,
    nodes: NodesOption = None,
    model: ModelOption = None,
    sequence_length: SequenceLengthOption = None,
    global_batch_size: GlobalBatchSizeOption = None,
    micro_batch_size: MicroBatchSizeOption = None,
    input_length: InputLengthOption = None,
    output_length: OutputLengthOption = None,
    concurrency: ConcurrencyOption = None,
    env: EnvOption = None,
    out: OutOption = None,
    free: FreeOption = False,
    compare: CompareOption = False,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Read a current launch command or configuration into a spec that pins its choices; nothing is executed.

    The spec is YAML on stdout, with comments that list what was assumed and what was not understood. Next:
    'meshplan estimate SPEC' prices it; with --free nothing is pinned, and 'meshplan plan SPEC' finds a better plan.
    """
    from meshplan.cli.render import show_document, show_text
    from meshplan.planner.imports.command import import_command
    from meshplan.planner.imports.spec import Answers

    catalog = open_catalog(db, or_shipped=True)
    found = import_command(
        what,
        catalog,
        Answers(
            model=model,
            device=device,
            node_type=node_type,
            nodes=nodes,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            input_length=input_length,
            output_length=output_length,
            concurrency=concurrency,
        ),
        source=source,
        variables=_variables(env or []),
    )
    if free and not compare:
        found = replace(found, spec={name: part for name, part in found.spec.items() if name != "fixed"})
    if out is not None:
        _write(spec_text(found), out, force=force)
    if compare:
        _compare(found, catalog, form, _keeper(catalog))
    elif form in (Format.JSON, Format.YAML):
        show_document(found.to_document(), form)
    else:
        show_text(spec_text(found) if out is None else _next_commands(found, out))


def _variables(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise typer.BadParameter(f"--env {pair!r}: write NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def spec_text(found: Imported) -> str:
    """The spec as YAML, with what a reader has to know as comments."""
    from meshplan.catalogs.untrusted.quoting import yaml_text  # start-up: as the others of this module
    from meshplan.planner.imports.sources.idle_flags import idle_text

    is_pinned = "fixed" in found.spec
    held = "'fixed' pins its choices: meshplan estimate prices them" if is_pinned else "its choices are left free"
    notes = [f"Imported from {found.source}; {held}."]
    if found.assumed:
        notes += ["Assumed, because the input does not give it:"]
        notes += [f"  {one.term} = {one.value}: {one.why}" for one in found.assumed]
    if found.left_out:
        notes += ["Understood, but not expressible in a spec:", *(f"  {text}" for text in found.left_out)]
    if found.unread:
        notes += ["Not understood, so not in the estimate:", *(f"  {text}" for text in found.unread)]
    if found.idle:
        notes += [f"{idle_text(found.idle)}."]
    return "".join(_comment(note) for note in notes) + yaml_text(_plain(found.spec))


def _comment(text: str) -> str:
    """Comment lines, whatever signs the imported text holds."""
    import textwrap

    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    body = shown.lstrip()
    indent = " " * (len(shown) - len(body))
    return (
        textwrap.fill(
            body,
            width=_COMMENT_WIDTH,
            initial_indent=f"# {indent}",
            subsequent_indent=f"# {indent}  ",
            break_on_hyphens=False,
        )
        + "\n"
    )


def _plain(spec: Mapping[str, Any]) -> dict[str, Any]:
    import json

    return dict(json.loads(json.dumps(spec)))


def _next_commands(found: Imported, out: Path) -> str:
    counts = f"{len(found.assumed)} assumed, {len(found.left_out)} not expressible, {len(found.unread)} not understood"
    counts += f", {len(found.idle)} without influence" if found.idle else ""
    text = f"{out}: read from {found.source} ({counts}; the file lists them). Next:\n\n"
    if "fixed" not in found.spec:
        return text + f"  meshplan plan {out} --tag better    # a better plan\n  meshplan compare current better\n"
    return text + (
        f"  meshplan estimate {out}             # predicted time and memory\n"
        f"  meshplan plan {out} --tag current   # the same, stored\n"
        "  meshplan import … --free --out free.yaml; meshplan plan free.yaml --tag better\n"
        "  meshplan compare current better\n"
    )


def _write(text: str, out: Path, *, force: bool) -> None:
    from meshplan.catalogs.writing import write_file

    write_file(out, text, force=force)


def _keeper(catalog: Catalog) -> Callable[[Plan, str], None]:
    """Stores a plan under a name; plans that found nothing are not stored."""
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.cli.reports.plan import is_infeasible
    from meshplan.planner import store

    rows = PlanRows(catalog.engine)

    def keep(made: Plan, name: str) -> None:
        if not is_infeasible(made):
            store.save(made, rows, name=name)

    return keep


def _compare(found: Imported, catalog: Catalog, form: Format, keep: Callable[[Plan, str], None]) -> None:
    from meshplan.cli.progress import progress_line
    from meshplan.cli.render import show_document, show_text, terminal_width
    from meshplan.cli.reports.comparison import comparison_report
    from meshplan.cli.reports.plan import is_infeasible, show_plan
    from meshplan.planner.compare import compare_plans
    from meshplan.planner.imports.sources.idle_flags import idle_text
    from meshplan.planner.service import estimate_plan, make_plan

    mine = estimate_plan(found.spec, catalog)
    freed = {name: part for name, part in found.spec.items() if name != "fixed"}
    with progress_line() as on_progress:
        better = make_plan(freed, catalog, on_progress=on_progress)
    if is_infeasible(better):
        show_plan(better, form)
        raise typer.Exit(EXIT_INFEASIBLE)
    for made, name in ((mine, _CURRENT), (better, _PROPOSED)):
        keep(made, name)
    comparison = compare_plans([mine, better])
    changes = _changes(found, mine, better, catalog)
    if form in (Format.JSON, Format.YAML):
        ids = {_CURRENT: mine.plan_id, _PROPOSED: better.plan_id}
        document = {"plans": ids, "comparison": comparison.to_document(), "changes": changes}
        show_document({**found.to_document(), **document}, form)
        return
    lines = (
        ["the imported configuration does not fit the devices' memory, by the estimate\n"]
        if is_infeasible(mine)
        else []
    )
    lines += [f"assumed: {one.term} = {one.value} ({one.why})" for one in found.assumed]
    lines += [f"not understood: {text}" for text in found.unread]
    lines += [idle_text(found.idle)] if found.idle else []
    named = replace(comparison, plan_ids=(_CURRENT, _PROPOSED))
    text = "".join(f"{line}\n" for line in lines) + "\n" + comparison_report(named, width=terminal_width())
    if changes:
        text += "\nYour command, with the flags of the proposal:\n\n" + "".join(f"  {line}\n" for line in changes)
    text += (
        f"\n{_CURRENT} is plan {mine.plan_id}, {_PROPOSED} is plan {better.plan_id}. "
        f"Next: meshplan emit {better.plan_id} --out DIR\n"
    )
    show_text(text)


def _changes(found: Imported, mine: Plan, better: Plan, catalog: Catalog) -> list[str]:
    """``- flag`` and ``+ flag`` for each setting that the proposal changes; none where one has no files."""
    from meshplan.catalogs.errors import EmitError
    from meshplan.planner.imports.changes import changed_lines, settings_of
    from meshplan.planner.service import emit_plan, plan_target

    target = plan_target(better)
    if target is None:
        return []
    try:
        before, after = (settings_of(emit_plan(plan, target, catalog).artifacts) for plan in (mine, better))
    except EmitError:
        return []
    written = [part for text in found.source_flags.values() for part in text.split(", ")]
    return [f"{sign} {setting}" for sign, setting in changed_lines(before, after, written)]
