"""What an emitter of serving launchers is asked: the plan, its model, the hosts, and what the plan does not decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.serving.load import Load
from meshplan.planner.emit.text import answering, published_name
from meshplan.planner.serving.problem.config import Pool, Role, ServingConfig, serving_config_from_document
from meshplan.planner.serving.problem.quantization import published_formats
from meshplan.planner.serving.problem.requests import Task

DEFAULT_SERVING_PORT = 8000  # of vllm serve and trtllm-serve


@dataclass(frozen=True, slots=True, kw_only=True)
class HostType:
    """The hosts of one node type.

    Args:
        devices_per_host: devices of a host, used or not.
        device: their type; None leaves out the checks of name and memory.
    """

    devices_per_host: int
    device: Device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of the fullest device of a worker as the plan expects it, for engines that count memory their own way.

    Args:
        weights_bytes: weights.
        activations_bytes: activations and graphs.
    """

    weights_bytes: float
    activations_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """Everything that an emitter of serving launchers needs.

    Args:
        plan: a plan of the kind ``serving`` that found a configuration. Its rank table, where it has one, lists (host,
            device) of pool after pool, worker after worker, in the engine's own order of ranks.
        shape: the model, as the planner saw it.
        host_types: hosts by the ``node_type`` of the pools.
        model_path: folder or Hugging Face name of the checkpoint; empty for where the catalog's entry was
            published.
        quantized_checkpoint: the checkpoint is in the plan's formats already; None: as the model is published.
        draft_model: checkpoint of the draft of speculative decoding, for models without prediction layers.
        max_sequence_length: longest prompt and answer together, tokens; None: as the model's configuration says.
        memory: of each pool's fullest device, by the name of the pool; pools may be missing.
        hosts: names or addresses by host number; empty: each launch reads MESHPLAN_HOSTS.
        port: TCP port that clients use.
        workers_beside: workers of other deployments that may run on its hosts: their ports are left free.
        image: container image; empty for a name that the user has to replace.
        framework_version: release of the engine that runs the files (:mod:`..releases`); empty for the one that was
            checked.
        load: what clients do, for the benchmark; None leaves it out.
        prefix_caching: of workers that prefill, whatever the plan says; None: as the plan says.
        pod_resources: what pods ask for besides devices, by Kubernetes' name: RDMA devices.
    """

    plan: Plan
    shape: ModelShape
    host_types: Mapping[str, HostType]
    model_path: str = ""
    quantized_checkpoint: bool | None = None
    draft_model: str = ""
    max_sequence_length: int | None = None
    memory: Mapping[str, WorkerMemory] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    port: int = DEFAULT_SERVING_PORT
    workers_beside: int = 0
    image: str = ""
    framework_version: str = ""
    load: Load | None = None
    prefix_caching: bool | None = None
    pod_resources: Mapping[str, int] = field(default_factory=dict)

    @property
    def config(self) -> ServingConfig:
        """The choices of the plan.

        Raises:
            EmitError: the plan is of another kind, or it has no configuration.
        """
        if self.plan.kind != "serving":
            raise EmitError(
                f"plan {self.plan.plan_id} is of the kind {self.plan.kind!r}; serving launchers need kind 'serving'"
            )
        if not self.plan.config:
            status = self.plan.solution.get("status", "unknown")
            raise EmitError(
                f"plan {self.plan.plan_id} has no configuration to launch (status {status}); "
                "emit a plan whose status is optimal or feasible"
            )
        config = serving_config_from_document(self.plan.config)
        if self.prefix_caching is None:
            return config
        pools = tuple(
            pool
            if pool.role is Role.DECODE
            else replace(pool, limits=replace(pool.limits, prefix_caching=self.prefix_caching))
            for pool in config.pools
        )
        return replace(config, pools=pools)

    def pool_name(self, pool: Pool) -> str:
        """The name of a pool of the plan, for files and objects; see :attr:`ServingConfig.pool_names`."""
        config = self.config
        return config.pool_names[config.pools.index(pool)]

    @property
    def task(self) -> Task:
        """What requests ask for."""
        return Task((self.plan.spec.get("workload") or {}).get("task", Task.GENERATE.value))

    @property
    def is_encoder(self) -> bool:
        """The model's tokens attend to those after them: prompts are not cut, and no KV cache is kept."""
        return self.shape.bidirectional

    @property
    def model(self) -> str:
        """Where the weights come from.

        Raises:
            EmitError: there is no name, or one that no file or command can hold.
        """
        name = self.model_path or answering(published_name(self.shape.source))
        if not name:
            raise EmitError(f"no checkpoint of {self.shape.name} is known; name its folder or Hugging Face name")
        for text in (name, self.draft_model):
            if any(ord(sign) < ord(" ") for sign in text) or text.startswith("-"):
                raise EmitError(f"{text!r} is no path of a model: it begins with a dash or holds control characters")
        return name

    def is_quantized(self, scheme: str) -> bool:
        """Whether the checkpoint already holds ``scheme``."""
        if self.quantized_checkpoint is not None:
            return self.quantized_checkpoint
        published = published_formats(self.shape)
        return published is not None and scheme in published.schemes

    def host_type(self, node_type: str) -> HostType:
        """The hosts that a pool lies on.

        Raises:
            EmitError: nothing is known of them.
        """
        if node_type not in self.host_types:
            known = ", ".join(sorted(self.host_types)) or "none"
            raise EmitError(f"nothing is known of hosts of the type {node_type!r}; known types: {known}")
        return self.host_types[node_type]
