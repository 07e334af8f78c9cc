"""Fits every surface of one device to a folder of kernel tables, as files that take the place of the shipped ones.

The command is ``meshplan catalog import FOLDER --device SLUG``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.perf_tables import SYSTEMS, data_folder
from meshplan.catalogs.surfaces import attention, gemm, latent_attention
from meshplan.catalogs.surfaces import experts as expert_surfaces
from meshplan.catalogs.surfaces.files import SurfaceFile, user_folder
from meshplan.profiler.shipped.command import AICONFIGURATOR
from meshplan.profiler.shipped.expert_tables import expert_samples
from meshplan.profiler.shipped.fit_attention import attention_rows, latent_rows
from meshplan.profiler.shipped.fit_experts import fit_experts, stored
from meshplan.profiler.shipped.fit_gemm import SOURCE as GEMM_SOURCE
from meshplan.profiler.shipped.fit_gemm import fitted_rows, wheel_tables


def fit_device(root: Path, *, device: str, system: str | None = None) -> dict[str, int]:
    """Fit and write the surfaces of a device; name of the file → number of its surfaces.

    Args:
        root: folder of the package ``aiconfigurator_core``, or of its ``systems/data``, or one of the same structure.
        device: slug that the surfaces are for.
        system: folder of the device's tables; None for the one that is known for the slug.

    Raises:
        CatalogError: no such folder, malformed tables, nothing to fit, or the files cannot be written.
    """
    system = system or next((name for name, slug in SYSTEMS.items() if slug == device), None)
    folder = root if system and (root / system).is_dir() else data_folder(root)
    if system is None or not (folder / system).is_dir():
        known = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise CatalogError(f"{folder} has no known folder of {device}; name one with --system: {known}")
    systems = {system: device}
    experts, shared = stored(
        [
            fit_experts(samples, device=device, quantization=quantization, framework=framework)
            for _, framework, quantization, samples in expert_samples(folder, systems)
        ]
    )
    products = fitted_rows(wheel_tables(folder, systems))
    fitted: dict[str, tuple[SurfaceFile, list[dict[str, Any]], dict[str, Any]]] = {
        "attention": (attention.SURFACES, list(attention_rows(folder, systems)), {"source": AICONFIGURATOR}),
        "latent": (latent_attention.SURFACES, list(latent_rows(folder, systems)), {"source": AICONFIGURATOR}),
        "experts": (expert_surfaces.SURFACES, experts, shared),
        "products": (gemm.SURFACES, products, {"source": GEMM_SOURCE}),
    }
    if not any(rows for _, rows, _ in fitted.values()):
        raise CatalogError(f"{folder / system} holds no table that surfaces are fitted to, or too few measurements")
    try:
        for surfaces, rows, shared in fitted.values():
            if rows:
                surfaces.write_for(device, rows, **shared)
    except OSError as error:
        raise CatalogError(f"cannot write surfaces to {user_folder()}: {error.strerror or error}") from error
    return {name: len(rows) for name, (_, rows, _) in fitted.items()}
