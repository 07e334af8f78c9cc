"""Tasks of a Ray cluster: one core and one point each. Needs ``pip install 'meshplan[ray]'`` there and here.

The catalog and the files that specs name travel with the tasks, unless the catalog is a PostgreSQL database, which
every machine of the cluster opens for itself. Ray repeats nothing (``max_retries=0``): who asks again is the study.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from meshplan.catalogs.errors import SolverError, SpecError
from meshplan.planner.sweep.answer import Outcome, Setting, answer
from meshplan.planner.sweep.points import Question
from meshplan.planner.sweep.runners.runner import POINTS_OF_A_PROCESS, out_of_time

LOCAL_RAY = "local-ray"  # a cluster of this machine, for the time of the sweep
AUTO = "auto"  # the cluster that this machine belongs to
CLIENT = "ray://"  # a cluster elsewhere, by its client port
# Object store of a cluster that is started here. Measured: a catalog has 2 MB, an outcome 0.1 MB; Ray takes no less
# than 75 MB, and by itself 30 % of the machine's memory.
_STORE_BYTES = 100_000_000
# Seconds between two looks at the clock while tasks run.
_LOOK_S = 0.2


def is_ray(where: str) -> bool:
    """Whether ``--on`` names a Ray cluster."""
    return where in (LOCAL_RAY, AUTO) or where.startswith(CLIENT)


class RayRunner:
    """Tasks of one cluster.

    Args:
        address: ``ray://HOST:PORT``, ``auto`` or ``local-ray``.
        setting: what the tasks answer with; sent once.
        processes: cores of a cluster that is started here, or points at once elsewhere; None for all.

    Raises:
        SpecError: Ray is not installed.
        SolverError: the cluster cannot be reached.
    """

    def __init__(self, address: str, setting: Setting, processes: int | None = None) -> None:
        try:
            import ray  # optional: an extra of the package
        except ImportError as error:
            message = f"{address} needs Ray: pip install 'meshplan[ray]'"
            raise SpecError.at("--on", message, of="the options") from error
        self._ray: Any = ray
        self._address = address
        own = {"num_cpus": processes, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        place = own if address == LOCAL_RAY else {"address": address}
        try:
            ray.init(**place, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            self._most = processes or int(ray.cluster_resources().get("CPU", 1))
            self._setting = ray.put(setting)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            raise SolverError(f"the Ray cluster {address} cannot be used: {error}") from error
        self._answer: Any = ray.remote(num_cpus=1, max_retries=0, max_calls=POINTS_OF_A_PROCESS)(answer)
        self._running: dict[Any, tuple[Question, float]] = {}

    @property
    def where(self) -> str:
        """In words."""
        return f"Ray ({self._address}), {self._most} task{'' if self._most == 1 else 's'} at once"

    @property
    def room(self) -> int:
        """How many more questions can be taken now."""
        return self._most - len(self._running)

    def start(self, question: Question) -> None:
        """Begin to answer a question."""
        self._running[self._answer.remote(question, self._setting)] = (question, time.monotonic())

    def ended(self, wait_s: float) -> Sequence[tuple[str, Outcome]]:
        """Digest and outcome of the points that have ended, waiting for one at most so long."""
        if not self._running:
            time.sleep(wait_s)
            return []
        limited = any(question.limit_s is not None for question, _ in self._running.values())
        timeout = min(wait_s, _LOOK_S) if limited else wait_s
        try:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
            found = [(self._running.pop(one)[0].digest, self._outcome(one)) for one in ready]
        except ConnectionError as error:
            message = (
                f"the Ray cluster {self._address} is lost; what is answered is stored, go on with the same command"
            )
            self._running = {}
            raise SolverError(f"{message} ({error})") from error
        for one, (question, began_s) in list(self._running.items()):
            if question.limit_s is not None and time.monotonic() - began_s > question.limit_s:
                del self._running[one]
                self._ray.cancel(one, force=True)
                found.append((question.digest, out_of_time(question)))
        return found

    def close(self) -> None:
        """End the tasks, and a cluster that was started here."""
        for one in self._running:
            self._ray.cancel(one, force=True)
        self._running = {}
        self._ray.shutdown()

    def _outcome(self, one: Any) -> Outcome:
        try:
            found: Outcome = self._ray.get(one)
        except self._ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()
            return Outcome(died=f"its Ray task ended: {said[0] if said else type(error).__name__}")
        return found
