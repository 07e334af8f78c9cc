"""Fits every surface of one device to a folder of kernel tables, as files that take the place of the shipped ones.

The door is ``meshplan catalog import FOLDER --device SLUG``.
"""

from __future__ import annotations

from pathlib import Path

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.perf_tables import SYSTEMS, data_folder
from meshplan.catalogs.surfaces import attention as attention_surfaces
from meshplan.catalogs.surfaces import experts as expert_surfaces
from meshplan.catalogs.surfaces import gemm as gemm_surfaces
from meshplan.catalogs.surfaces import latent_attention as latent_surfaces
from meshplan.catalogs.surfaces.files import user_file, user_folder
from meshplan.profiler.shipped.expert_tables import expert_samples
from meshplan.profiler.shipped.fit_attention import SOURCE, attention_rows, latent_rows, projection_rows, write_tables
from meshplan.profiler.shipped.fit_experts import fit_experts, write_surfaces
from meshplan.profiler.shipped.fit_gemm import document_of, wheel_tables


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
    attention = list(attention_rows(folder, systems))
    latent = [*latent_rows(folder, systems), *projection_rows(folder, systems)]
    experts = [
        fit_experts(samples, device=device, quantization=quantization, framework=framework)
        for _, framework, quantization, samples in expert_samples(folder, systems)
    ]
    products = wheel_tables(folder, systems)
    if not (attention or latent or experts or products):
        raise CatalogError(f"{folder / system} holds no table that surfaces are fitted to, or too few measurements")
    try:
        user_folder().mkdir(parents=True, exist_ok=True)
        if attention:
            write_tables(user_file(attention_surfaces.SURFACE_FILE, device), SOURCE, attention)
        if latent:
            write_tables(user_file(latent_surfaces.SURFACE_FILE, device), SOURCE, latent)
        if experts:
            write_surfaces(user_file(expert_surfaces.SURFACE_FILE, device), experts)
        if products:
            user_file(gemm_surfaces.SURFACE_FILE, device).write_text(document_of(products), encoding="utf-8")
    except OSError as error:
        raise CatalogError(f"cannot write surfaces to {user_folder()}: {error.strerror or error}") from error
    return {"attention": len(attention), "latent": len(latent), "experts": len(experts), "products": len(products)}
