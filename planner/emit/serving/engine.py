"""A serving engine as an emit target: its table, how a node is started, what leads several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshplan.catalogs.constants.machines.device_shares import MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile
from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.releases import image_notes, release_notes, spelled
from meshplan.planner.emit.serving.hosts import nodes_per_worker
from meshplan.planner.emit.serving.job import (
    EVERY_INTERFACE,
    Argument,
    Flags,
    PoolProgram,
    RouterOf,
    RouterProgram,
    ServingJob,
    Template,
)
from meshplan.planner.emit.serving.nginx import nginx_router
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.terms import IN_CODE, refuse_serving
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Term, feature_rows, write_all
from meshplan.planner.serving.problem.config import KvConnector, Pool, Role, Router
from meshplan.planner.serving.problem.engines.rules import EngineRules

SERVE_ON: tuple[Argument, ...] = ("--host", EVERY_INTERFACE, "--port", Template(text="{port}"))
# vllm-router is a fork of sglang-router: the policies have the same names.
_POLICIES = {
    Router.ROUND_ROBIN: "round_robin",
    Router.LEAST_LOADED: "power_of_two",
    Router.PREFIX_AWARE: "cache_aware",
}
POLICIES_TEXT = "--policy round_robin, power_of_two (least loaded), cache_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What differs between engines.

    Args:
        rules: legality rules, with the engine's name.
        terms: the mapping table. Keys that begin with ``--`` are flags; others are left to ``files``.
        verified: parser that checked the flags; None where none has.
        program: (request, pool, flags, hosts of a worker) → how the pool's workers are started.
        router: request → what leads the workers; None where one worker serves clients itself.
        notes: request → what the user should know before launching.
        files: (request, pool) → files that the pool's servers read.
        more_features: further rows of the support matrix.
    """

    rules: EngineRules
    terms: tuple[Term, ...]
    verified: ParserVerified | None
    program: Callable[[ServingRequest, Pool, Flags, int], PoolProgram]
    router: Callable[[ServingRequest], RouterOf | None]
    notes: Callable[[ServingRequest], Sequence[str]]
    files: Callable[[ServingRequest, Pool], tuple[Artifact, ...]] = lambda *_: ()
    more_features: tuple[Feature, ...] = ()

    def arguments(self, request: ServingRequest, pool: Pool) -> Flags:
        """Every flag that the plan and the model decide for one pool, in the order of the table.

        Raises:
            CannotExpressError: the engine cannot express the plan.
        """
        refuse_serving(self.rules, request)
        written = write_all(self.terms, request, pool)
        flags = ((flag, value) if value else (flag,) for flag, value in written.items() if flag.startswith("--"))
        return spelled(self.rules.name, request.framework_version, flags)

    def job(self, request: ServingRequest) -> ServingJob:
        """Servers of every pool, and a router where there are several.

        Raises:
            CannotExpressError: the engine cannot express the plan.
            EmitError: the plan has no configuration, or nothing is known of its hosts or its checkpoint.
        """
        pools = request.config.pools
        name = self.rules.name
        programs = tuple(
            self.program(request, pool, self.arguments(request, pool), nodes_per_worker(request, pool, target=name))
            for pool in pools
        )
        for program in programs:  # what says which node this is has no older spelling
            words = (word for word in (*program.head, *program.follower) if isinstance(word, str))
            spelled(name, request.framework_version, ((word,) for word in words if word.startswith("--")))
        return ServingJob(
            target=name,
            request=request,
            verified=self.verified,
            programs=programs,
            router=self.router(request),
            files=tuple(file for pool in pools for file in self.files(request, pool)),
            notes=(
                *self.notes(request),
                *length_notes(request, self.terms),
                *prefix_notes(request),
                *power_cap_notes(request),
                *share_notes(request),
                *remote_code_notes(request),
                *release_notes(name, request.framework_version),
                *image_notes(name, request.framework_version, request.image),
            ),
        )

    def features(self) -> tuple[Feature, ...]:
        """Rows of the support matrix."""
        # Servers may not set it: the plan's notes name who does, see power_cap_notes.
        cap = Feature(
            name="power_cap_w", expressed_by="nvidia-smi --power-limit, named in the notes", verified_by="not written"
        )
        mig = Feature(
            name="mig",
            expressed_by="CUDA_VISIBLE_DEVICES of an instance; nvidia-smi mig, named in the notes, cuts the devices",
            verified_by="not run",
        )
        mps = Feature(
            name="mps",
            expressed_by="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; launch.sh starts the daemon, and servers in turn",
            verified_by="bash with stand-ins",
        )
        shares = (mig, mps) if self.rules.name == "vllm" else (mig,)
        return (*feature_rows(self.terms), *self.more_features, cap, *shares)


def length_notes(request: ServingRequest, terms: Sequence[Term]) -> tuple[str, ...]:
    """The longest request that the servers take: memory is kept for the plan's, and a surprise is worse than a note."""
    longest = request.max_sequence_length
    flags = (flag for term in terms if term.name == "max_sequence_length" for flag in term.keys)
    flag = next(flags, None)  # llama.cpp's is of all slots together, and no key of its table
    if longest is None or flag is None:
        return ()
    return (
        f"A request of more than {longest:,} tokens, prompt and answer together, is refused ({flag}): the plan is for "
        f"the lengths of its question. Where yours may be longer, ask again with them, or raise {flag}; fewer then run "
        "at once.",
    )


def prefix_notes(request: ServingRequest) -> tuple[str, ...]:
    """Several workers that each hold some of the prefixes: the plan counts on no router that knows which."""
    config, workload = request.config, request.plan.spec.get("workload", {})
    workers = sum(pool.num_workers for pool in config.pools if pool.role is not Role.DECODE)
    if workers == 1 or workload.get("num_prefixes") is None or config.router is not Router.LEAST_LOADED:
        return ()
    return (
        f"Requests share {workload['num_prefixes']:,} prefixes. The plan sends each to the worker with the least to "
        "do, whether or not it holds its prefix; a router that looks for it (--policy cache_aware of sglang-router and "
        "vllm-router) finds more, and may load workers less evenly.",
    )


def power_cap_notes(request: ServingRequest) -> tuple[str, ...]:
    """Power limits of the plan, which an administrator sets on the hosts: servers may not."""
    return tuple(
        f"The plan holds every device of the {name} pool to {pool.power_cap_w:g} W. These files do not set that: run "
        f"nvidia-smi --power-limit={pool.power_cap_w:g} as root on its hosts first, and again after a restart."
        for name, pool in zip(request.config.pool_names, request.config.pools, strict=True)
        if pool.power_cap_w is not None
    )


def remote_code_notes(request: ServingRequest) -> tuple[str, ...]:
    """That the servers run code which comes with the weights."""
    if request.shape.family not in IN_CODE:
        return ()
    return (
        "The checkpoint brings its tokenizer as Python files, which the servers run (--trust-remote-code): "
        "read them, or name a folder that holds a copy you have read (--model-path).",
    )


def share_notes(request: ServingRequest) -> tuple[str, ...]:
    """How the devices are shared: cut, which an administrator does before the servers start, or under MPS."""
    share = request.config.pools[0].share  # all pools have the same
    if isinstance(share, MpsShare):
        return (_mps_note(share),)
    return _mig_notes(request, share) if isinstance(share, MigProfile) else ()


def _mps_note(share: MpsShare) -> str:
    return (
        f"Every device in use runs {share.instances} servers at the same time under CUDA's MPS, each with "
        f"{share.thread_percentage} % of the threads and its part of the memory. launch.sh starts a daemon of its own "
        "and ends it (CUDA_MPS_PIPE_DIRECTORY names one that runs already), and starts the servers of a device one "
        "after the other, because vLLM measures what memory is free. Nothing keeps them apart: a fatal fault of one "
        "server can end the others of its device."
    )


def _mig_notes(request: ServingRequest, mig: MigProfile) -> tuple[str, ...]:
    """How the devices are cut, which an administrator does before the servers start."""
    instances = ",".join([mig.name] * mig.instances)
    uuids = (
        "vLLM 0.20.1 ended where CUDA_VISIBLE_DEVICES names an instance (vllm-project/vllm, issue 41848; its fix, pull "
        "request 46132, was open when it was read): if yours does too, start each server in a container that has one "
        "instance (docker run --gpus device=MIG-…).",
    )
    return (
        f"Every device in use is cut into {mig.instances} MIG instances {mig.name}, one server in each. These files do "
        f"not do that: run nvidia-smi -mig 1 and nvidia-smi mig -cgi {instances} -C as root on each host first (-i "
        "names the devices), while nothing runs on them. Instances are lost by a restart of the host.",
        *(uuids if request.config.engine == "vllm" else ()),
    )


def router_program(
    request: ServingRequest,
    *command: str,
    disaggregated: Sequence[str],
    verified: ParserVerified,
    bootstraps: bool = False,
) -> RouterOf | None:
    """vllm-router or sglang-router in front of several workers, nginx where they have weights; None where there is one.

    Args:
        request: the plan.
        command: how the router is started.
        disaggregated: its flags for separate prefill and decode workers.
        verified: parser that checked its arguments.
        bootstraps: a prefill worker is named with its bootstrap port.
    """
    config = request.config
    if not config.is_disaggregated and config.num_workers == 1:
        return None
    if config.router is Router.LEAST_CONNECTIONS:
        return nginx_router(request)

    def router(addresses: Mapping[Role, Sequence[Argument]]) -> RouterProgram:
        arguments: list[Argument] = [*command, "--host", EVERY_INTERFACE, "--port", str(request.port)]
        arguments += ["--policy", _POLICIES[config.router]]
        if Role.MIXED in addresses:
            arguments += ["--worker-urls", *map(_url, addresses[Role.MIXED])]
        else:
            arguments += disaggregated
            for number, address in enumerate(addresses[Role.PREFILL]):
                port = (Template(text=f"{{bootstrap_port_{number}}}"),) if bootstraps else ()
                arguments += ["--prefill", _url(address), *port]
            for address in addresses[Role.DECODE]:
                arguments += ["--decode", _url(address)]
        return RouterProgram(command=tuple(arguments), verified=verified)

    return router


def transfer_notes(request: ServingRequest) -> tuple[str, ...]:
    """What has to be installed for what moves caches between workers."""
    if not request.config.is_disaggregated or request.config.kv_connector is KvConnector.NIXL:
        return ()
    return ("Mooncake moves the KV caches: install mooncake-transfer-engine on every host; it needs RDMA.",)


def _url(address: Argument) -> Argument:
    """HTTP address of a server."""
    return Template(text=f"http://{address.text}") if isinstance(address, Template) else f"http://{address}"
