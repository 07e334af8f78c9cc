"""Questions that the tests of diffusion plans share."""

from __future__ import annotations

from typing import Any


def spec(model: str = "pixart-sigma", node: str = "dgx-h100", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"kind": "diffusion", "model": model, "cluster": {"nodes": [{"type": node, "count": count}]}, **more}
