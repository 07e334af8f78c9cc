"""TorchTitan, imported once: its parser, its ``ParallelDims`` and its models' checks."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from typing import Any


class Judge:
    """TorchTitan, imported once."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchtitan.config import ConfigManager
            from torchtitan.distributed.parallel_dims import ParallelDims
        self.manager, self.dims = ConfigManager, ParallelDims

    def parse(self, words: Sequence[str], *, world_size: int) -> tuple[Any, Any]:
        """(configuration, parallel dimensions)."""
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            config = self.manager().parse_args(list(words))
            dims = self.dims.from_config(config.parallelism, world_size)
            config.model_spec.model.update_from_config(config=config)
        return config, dims

    def layers_per_stage(self, config: Any, dims: Any) -> tuple[int, ...]:
        """Layers of each virtual stage, as TorchTitan names them; nothing is built."""
        from torchtitan.distributed import pipeline_parallel as stages

        if dims.pp == 1:
            return (len(config.model_spec.model.layers),)
        chunks, layers, *weights = stages._get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
        names = stages._generate_llm_fqn_per_model_part(chunks, layers, *weights)
        return tuple(sum(name.startswith("layers.") for name in part) for part in names)

    def refusal(self, words: Sequence[str], *, world_size: int) -> str | None:
        try:
            self.parse(words, world_size=world_size)
        except (SystemExit, AssertionError, ValueError, NotImplementedError, ImportError) as refusal:
            return f"{type(refusal).__name__}: {refusal}"
        return None
