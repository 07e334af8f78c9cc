"""A search on its page: its state in words, incumbent, bound and gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.database.job_rows import Job, JobState
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.text import counted

_WORDS = {
    JobState.QUEUED: "waiting for a worker",
    JobState.RUNNING: "searching",
    JobState.DONE: "done",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
# Before the model of a question.
_VERBS = {"training": "Train", "serving": "Serve", "gpu-allocation": "A fleet for"}
_OTHERS = "Others wait for this search, so it goes on; its answer will stand at this address."


def job_view(job: Job, *, is_asker: bool = True, num_ahead: int = 0) -> dict[str, Any]:
    """What the page of a job shows.

    Args:
        job: as it stands.
        is_asker: whether the one who looks has asked; others cannot stop it.
        num_ahead: jobs that wait before it.
    """
    reported = dict(job.progress or {})
    incumbent, bound, unit = reported.get("incumbent"), reported.get("bound"), str(reported.get("unit", ""))
    gap = None
    if isinstance(incumbent, int | float) and isinstance(bound, int | float) and incumbent:
        gap = abs(incumbent - bound) / abs(incumbent)
    spec: Mapping[str, Any] = job.document.get("spec", {})
    kind = str(spec.get("kind", ""))
    words = _WORDS[job.state]
    if num_ahead:
        words = f"{words}, {counted(num_ahead, 'question')} before it"
    if job.cancel_asked and not job.is_finished:
        words = "stopping: the best plan so far is kept"
    return {
        "job_id": job.job_id,
        "state": job.state.value,
        "words": words,
        "question": " ".join(part for part in (_VERBS.get(kind, kind), spec.get("model") or spec.get("name")) if part),
        "incumbent": value_text(incumbent, unit),
        "bound": value_text(bound, unit),
        "gap": "–" if gap is None else percent(gap),
        "closed": 0 if gap is None else round(100 * max(0.0, 1.0 - gap), 1),
        "note": str(reported.get("note", "")),
        "seconds": "–" if reported.get("seconds") is None else f"{reported['seconds']:.1f} s",
        "problem": None if job.problem is None else dict(job.problem),
        "can_stop": not job.is_finished and not job.cancel_asked and is_asker,
        "others": "" if job.is_finished or job.cancel_asked or is_asker else _OTHERS,
    }


def value_text(value: Any, unit: str) -> str:
    """An objective in its unit, as on the command line; a dash while there is none.

    >>> value_text(None, "s a step"), value_text(29.2474, "s a step"), value_text(0.004, "")
    ('–', '29.247 s a step', '0.004')
    """
    return f"{value:.5g} {unit}".strip() if isinstance(value, int | float) else "–"
