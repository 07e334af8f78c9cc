"""``meshplan experts``: place the experts of a plan, or of given devices, by recorded routing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, SeedOption
from meshplan.cli.render import Format

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.expert_placement.placing import Placed
    from meshplan.planner.expert_placement.setting import ExpertSetting

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class ExpertTarget(StrEnum):
    """Framework that loads the map."""

    SGLANG = "sglang"
    TRTLLM = "trtllm"
    VLLM = "vllm"
    VLLM_ASCEND = "vllm-ascend"
    MEGATRON = "megatron"


class Dispatch(StrEnum):
    """How traffic is counted: device changes between layers, or distinct devices per layer (DeepEP)."""

    COHERENT = "coherent"
    DISTINCT = "distinct"


class RecordingFormat(StrEnum):
    """Framework or format that recorded the routing."""

    SGLANG = "sglang"
    VLLM = "vllm"
    TRTLLM = "trtllm"
    MEGATRON = "megatron"
    NPZ = "npz"
    CSV = "csv"


# --- the command's own options -------------------------------------------------------------------------------------

ExpertsArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[PLAN] [NAME=]LOADS...",
        help="A training or serving plan with expert_parallel > 1 (none with --devices), then recordings of its "
        "routing; "
        "several are scenarios, such as prefill=a.json decode=b.json.",
        show_default=False,
    ),
]
DevicesOption = Annotated[
    int | None,
    typer.Option("--devices", metavar="G", min=1, help="Number of devices, instead of a plan.", show_default=False),
]
DevicesPerNodeOption = Annotated[
    int | None,
    typer.Option("--devices-per-node", metavar="M", min=1, help="Devices per node.", show_default=False),
]
SlotsOption = Annotated[int, typer.Option("--slots", metavar="N", min=0, help="Redundant experts per layer.")]
RecordingFormatOption = Annotated[
    RecordingFormat | None,
    typer.Option("--from", help="Format of the recordings. Default: by their names.", show_default=False),
]
WindowsOption = Annotated[bool, typer.Option("--windows", help="Every time window is a scenario.")]
MinBalanceOption = Annotated[
    float | None,
    typer.Option(
        "--min-balance", metavar="B", min=0.0, max=1.0, help="Least traffic at this balance.", show_default=False
    ),
]
DispatchOption = Annotated[
    Dispatch,
    typer.Option(
        "--dispatch",
        help="Traffic for --min-balance: coherent counts changes of device from layer to layer, distinct the "
        "devices that a token visits in a layer (DeepEP; needs token traces).",
    ),
]
MaxMovesOption = Annotated[
    int | None,
    typer.Option(
        "--max-moves", metavar="N", min=0, help="Best balance with at most N moved experts.", show_default=False
    ),
]
AdviceOption = Annotated[
    bool, typer.Option("--advice", help="Curves: slots, traffic and moves against balance (takes longer).")
]
EmitOption = Annotated[
    ExpertTarget | None, typer.Option("--emit", help="Write the map for this framework.", show_default=False)
]
MapFolderOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the map.", show_default=False)
]
PictureOption = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE.svg", help="Draw load and traffic, before and after.", show_default=False),
]


@app.command()
def experts(
    arguments: ExpertsArguments,
    devices: DevicesOption = None,
    devices_per_node: DevicesPerNodeOption = None,
    slots: SlotsOption = 0,
    recorded_by: RecordingFormatOption = None,
    windows: WindowsOption = False,
    min_balance: MinBalanceOption = None,
    dispatch: DispatchOption = Dispatch.COHERENT,
    max_moves: MaxMovesOption = None,
    advice: AdviceOption = False,
    emit: EmitOption = None,
    out: MapFolderOption = None,
    picture: PictureOption = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Place the experts by recorded routing: which, in how many copies, on which device; with bound and advice."""
    from meshplan.catalogs.writing import write_file
    from meshplan.cli.reports.expert_placement import show_placement
    from meshplan.planner.emit.expert_maps import map_artifact, picture_artifact
    from meshplan.planner.emit.writer import write_artifacts
    from meshplan.planner.expert_placement.placing import place
    from meshplan.planner.expert_placement.setting import read_recordings

    if (emit is None) != (out is None):
        raise typer.BadParameter("--emit and --out go together")
    question = _question(min_balance, dispatch, max_moves)
    plan, files = _plan_and_files(arguments, devices, devices_per_node, db)
    question |= {"num_redundant_experts": slots, "separate_windows": windows, "advice": advice, "seed": seed}
    given_format = None if recorded_by is None else recorded_by.value
    if plan is not None and plan.kind == "serving":
        placed = _place_served(plan, files, given_format, db, question)
    else:
        setting = _training_setting(plan, db) if plan is not None else _given_setting(devices, devices_per_node)
        recordings = read_recordings(files, given_format=given_format, num_experts=setting.num_experts)
        placed = place(setting, recordings, **question)
    written: list[Path] = []
    if emit is not None and out is not None:
        written += write_artifacts([map_artifact(placed, emit.value)], out, force=force)
    if picture is not None:
        write_file(picture, picture_artifact(placed, picture.name).content, force=force)
        written.append(picture)
    show_placement(placed, form, files=written)


def _question(min_balance: float | None, dispatch: Dispatch, max_moves: int | None) -> dict[str, Any]:
    """Arguments of the placement that the options stand for; none for the best balance."""
    if min_balance is not None and max_moves is not None:
        raise typer.BadParameter("--min-balance and --max-moves are two questions; ask one of them")
    if dispatch is Dispatch.DISTINCT and min_balance is None:
        raise typer.BadParameter("--dispatch distinct needs --min-balance: the balance that may be given up for it")
    if max_moves is not None:
        return {"objective": "migrate", "max_moved_experts": max_moves}
    if dispatch is Dispatch.DISTINCT:
        return {"visits_at_balance": min_balance}
    if min_balance is not None:
        return {"objective": "balance+affinity", "min_balancedness": min_balance}
    return {}


def _plan_and_files(
    arguments: list[str], devices: int | None, devices_per_node: int | None, db: str | None
) -> tuple[Plan | None, Mapping[str, Path]]:
    """The plan, unless the devices are given by hand, and the recordings that the arguments name."""
    if devices is not None:
        return None, _files(arguments)
    if len(arguments) == 1:
        raise typer.BadParameter("name a plan and a recording, or --devices G and a recording")
    if devices_per_node is not None:
        raise typer.BadParameter("--devices-per-node goes with --devices; a plan knows its nodes")
    from meshplan.cli.database import open_catalog
    from meshplan.cli.stored import load_plan

    plan = load_plan(arguments[0], open_catalog(db))
    if plan.kind not in ("training", "serving"):
        raise typer.BadParameter(
            f"plan {plan.plan_id} is of the kind {plan.kind!r}; name a training or serving plan, or --devices G"
        )
    return plan, _files(arguments[1:])


def _given_setting(devices: int | None, devices_per_node: int | None) -> ExpertSetting:
    from meshplan.planner.expert_placement.setting import ExpertSetting

    num_devices = devices or 1
    return ExpertSetting(num_devices=num_devices, devices_per_node=min(devices_per_node or num_devices, num_devices))


def _training_setting(plan: Plan, db: str | None) -> ExpertSetting:
    from meshplan.cli.database import open_catalog
    from meshplan.planner.core.plan import shape_from_document
    from meshplan.planner.expert_placement.setting import setting_of_plan
    from meshplan.planner.training.service import resolve

    resolved = resolve(plan.spec, open_catalog(db), shape=shape_from_document(plan.provenance["model"]))
    return setting_of_plan(plan, resolved.problem.machine)


def _place_served(
    plan: Plan, files: Mapping[str, Path], given_format: str | None, db: str | None, question: Mapping[str, Any]
) -> Placed:
    """Place the experts of a serving plan; files that its spec names are looked up from here."""
    from meshplan.cli.database import open_catalog
    from meshplan.planner.core.plan import shape_from_document
    from meshplan.planner.expert_placement.setting import read_recordings
    from meshplan.planner.serving.expert_plan import place_served_experts
    from meshplan.planner.serving.problem.spec import read_serving_spec
    from meshplan.planner.serving.resolve import resolve_serving

    shape = shape_from_document(plan.provenance["model"])
    problem = resolve_serving(read_serving_spec(plan.spec), open_catalog(db), Path(), shape=shape).problem
    num_experts = None if shape.moe is None else shape.moe.num_experts
    recordings = read_recordings(files, given_format=given_format, num_experts=num_experts)
    return place_served_experts(plan, problem, recordings, **question)


def _files(arguments: list[str]) -> dict[str, Path]:
    """Scenario name → recording; NAME= before a path names it, else its stem does."""
    files: dict[str, Path] = {}
    for argument in arguments:
        name, mark, rest = argument.partition("=")
        path = Path(rest) if mark and not Path(argument).exists() else Path(argument)
        name = name if mark and not Path(argument).exists() else path.stem
        if name in files:
            raise typer.BadParameter(f"two recordings are called {name!r}; write NAME={path}")
        files[name] = path
    return files
