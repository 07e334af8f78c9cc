"""How the link probes talk: point-to-point messages and collectives over torch.distributed, behind a small interface.

The interface lets tests put a simulated network in its place. NCCL carries the data on GPUs and Gloo on CPUs; control
messages (which size comes next, results to rank 0) always go through Gloo, so that they never wait behind a kernel.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.links.launch import RankEnvironment

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
RANDOM_BLOCK_BYTES = 2**20
# Interfaces that the two libraries use for a rail.
_RAIL_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Transport(Protocol):
    """A rank's connection to all others. Messages of one pair arrive in order."""

    rank: int
    size: int
    name: str

    def prepare(self, num_bytes: int) -> None:
        """Have buffers of that size ready, so that no allocation is timed."""

    def send(self, target: int, num_bytes: int) -> None:
        """Send random bytes; returns when the buffer may be used again."""

    def receive(self, source: int, num_bytes: int) -> None:
        """Receive bytes; returns when they are here."""

    def send_control(self, target: int, value: int) -> None:
        """Send a control number."""

    def receive_control(self, source: int) -> int:
        """Receive a control number."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, on every rank."""

    def broadcast_value(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def barrier(self) -> None:
        """Wait for all."""

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int) -> bool:
        """Run a collective with a full buffer of ``num_bytes``; False where the library has none."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def versions(self) -> dict[str, Any]:
        """Versions of the libraries that carry the data; ranks that disagree on them are rejected."""


class TorchTransport:
    """torch.distributed over NCCL or Gloo.

    Args:
        place: which rank this is.
        store: result of :func:`rendezvous_store`; one serves all rails, one after the other.
        number: of this rail among those of the run, from 0: the store keeps what earlier ones wrote into it.
        rail: network interface; None lets the library choose.
        use_gpu: NCCL and device memory instead of Gloo and host memory.
        timeout_s: after which a silent peer counts as lost.
    """

    def __init__(
        self,
        place: RankEnvironment,
        store: Any,
        *,
        number: int = 0,
        rail: str | None = None,
        use_gpu: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        import torch  # optional, and slow to import
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._place = place
        self.rank, self.size = place.rank, place.world_size
        self.name = "nccl" if use_gpu else "gloo"
        self._device = _own_gpu(torch, place) if use_gpu else torch.device("cpu")
        # Groups made later do not inherit it: NCCL's would wait ten minutes for a rank that died.
        self._timeout = timedelta(seconds=timeout_s)
        if use_gpu:
            torch.cuda.set_device(self._device)
        for variable in _RAIL_VARIABLES if rail else ():
            os.environ[variable] = str(rail)
        with _explained(place, "joining the process group"):
            dist.init_process_group(
                "gloo",
                # A prefix of its own: a rank that is early would find addresses of the group before, which is gone.
                store=dist.PrefixStore(f"meshplan/{number}", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=self._timeout,
            )
            self._data = dist.new_group(backend="nccl", timeout=self._timeout) if use_gpu else dist.group.WORLD
        self._buffers: dict[str, Any] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._number = torch.zeros(1, dtype=torch.int64)

    def prepare(self, num_bytes: int) -> None:
        """Have buffers of that size ready."""
        for role in ("send", "receive"):
            self._buffer(role, num_bytes)

    def send(self, target: int, num_bytes: int) -> None:
        """Send random bytes."""
        with self._explained(f"sending to rank {target}"):
            self._dist.send(self._buffer("send", num_bytes), target, group=self._data)
            self._synchronize()

    def receive(self, source: int, num_bytes: int) -> None:
        """Receive bytes."""
        with self._explained(f"receiving from rank {source}"):
            self._dist.recv(self._buffer("receive", num_bytes), source, group=self._data)
            self._synchronize()

    def send_control(self, target: int, value: int) -> None:
        """Send a control number."""
        with self._explained(f"talking to rank {target}"):
            self._number[0] = value
            self._dist.send(self._number, target)

    def receive_control(self, source: int) -> int:
        """Receive a control number."""
        with self._explained(f"listening to rank {source}"):
            self._dist.recv(self._number, source)
        return int(self._number[0])

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value."""
        values: list[Any] = [None] * self.size
        with self._explained("gathering results"):
            self._dist.all_gather_object(values, value)
        return values

    def broadcast_value(self, value: Any) -> Any:
        """Rank 0's value."""
        values = [value]
        with self._explained("hearing from rank 0"):
            self._dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for all."""
        with self._explained("waiting for all ranks"):
            self._dist.barrier()

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int) -> bool:
        """Run one collective in a group; every rank of the world must call this with the same ranks."""
        group = self._group(tuple(ranks))
        if self.rank not in ranks:
            return True
        try:
            self._run_collective(name, len(ranks), ranks[0], num_bytes, group)
            self._synchronize()
        except (RuntimeError, NotImplementedError) as error:
            if "support" in str(error).lower() or "not implemented" in str(error).lower():
                return False
            raise ProfileError(f"{name} over {len(ranks)} ranks failed: {_first_line(error)}") from error
        return True

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def versions(self) -> dict[str, Any]:
        """Versions of torch, of NCCL where it carries the data, and of what they were built for."""
        torch = self._torch
        found = {"torch": torch.__version__}
        if self._device.type == "cuda":
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            found["cuda"] = str(torch.version.cuda or torch.version.hip)
        return found

    def close(self) -> None:
        """Leave the process group, so that another rail can be joined."""
        self._dist.destroy_process_group()
        # Its threads end with the last reference: left to the end of the interpreter, they sometimes abort it.
        self._data = None
        self._groups.clear()

    def _run_collective(self, name: str, size: int, root: int, num_bytes: int, group: Any) -> None:
        dist = self._dist
        share = max(1, num_bytes // size)
        whole = self._buffer("send", share * size)
        part = self._buffer("receive", share)
        match name:
            case "all_reduce":
                dist.all_reduce(whole, group=group)
            case "all_gather":
                # Renamed in torch 2.13; the old names warn there.
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                gather(whole, part, group=group)
            case "reduce_scatter":
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(part, whole, group=group)
            case "all_to_all":
                dist.all_to_all_single(self._buffer("receive", share * size), whole, group=group)
            case _:
                dist.broadcast(whole, src=root, group=group)

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks == tuple(range(self.size)):
            return self._data
        if ranks not in self._groups:
            with self._explained(f"making a group of {len(ranks)} ranks"):
                self._groups[ranks] = self._dist.new_group(list(ranks), backend=self.name, timeout=self._timeout)
        return self._groups[ranks]

    def _buffer(self, role: str, num_bytes: int) -> Any:
        buffer = self._buffers.get(role)
        if buffer is None or buffer.numel() < num_bytes:
            # Random, since some links compress; a block repeated, since drawing it all takes longer than sending it.
            # Small numbers: int8 sums of a collective then wrap around, which costs no time.
            block = self._torch.randint(-100, 100, (min(num_bytes, RANDOM_BLOCK_BYTES),), dtype=self._torch.int8)
            repeats = -(-num_bytes // block.numel())
            buffer = self._buffers[role] = block.repeat(repeats)[:num_bytes].to(self._device)
        return buffer[:num_bytes]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return _explained(self._place, what)


def rendezvous_store(place: RankEnvironment, *, use_gpu: bool = False, timeout_s: float = 60.0) -> Any:
    """Where the ranks find each other: the store of torchrun's agent, which is at one port only, or rank 0's own.

    Raises:
        ProfileError: no torch, or none that can do ``use_gpu``; nobody answers in time.
    """
    if importlib.util.find_spec("torch") is None:
        raise ProfileError(
            f"rank {place.rank}: links are measured through torch.distributed, and torch is not installed; install it "
            "on every rank (the CPU build is enough without --gpu), or import logs of nccl-tests with 'profile import'"
        )
    import torch  # optional, and slow to import
    from torch.distributed import rendezvous

    if use_gpu:
        _own_gpu(torch, place)

    url = f"tcp://{place.master_address}:{place.master_port}"
    with _explained(place, f"meeting the others at {url}"):
        store, _, _ = next(rendezvous(url, place.rank, place.world_size, timeout=timedelta(seconds=timeout_s)))
    return store


@contextmanager
def _explained(place: RankEnvironment, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProfileError(
            f"rank {place.rank} of {place.world_size} failed at {what}: {_first_line(error)}; a peer died, cannot be "
            "reached, or another job uses the port. What was measured is kept: start the same command again"
        ) from error


def _own_gpu(torch: Any, place: RankEnvironment) -> Any:
    """The GPU of this rank: its local rank's, or the only one that its launcher lets it see.

    Raises:
        ProfileError: no GPU, no NCCL (RCCL calls itself so), or fewer GPUs than ranks on this host.
    """
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise ProfileError(
            f"rank {place.rank}: torch {torch.__version__} sees no GPU or has no NCCL; leave --gpu out to measure the "
            "host network through Gloo, or install a GPU build"
        )
    count = torch.cuda.device_count()
    if count > 1 and place.local_rank >= count:
        raise ProfileError(
            f"rank {place.rank}: local rank {place.local_rank} has no GPU, this host shows {count}; start one process "
            "per GPU"
        )
    return torch.device("cuda", place.local_rank if count > 1 else 0)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
