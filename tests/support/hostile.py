"""Plans that somebody forged: any field replaced, and an id that fits. Shares no code with what reads plans."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

CLOCKS = ("wall_s", "cpu_s", "created_at")
CANARY = "meshplan_canary"
# Each would create the file CANARY, or leave its place, if some language took it for more than text.
HOSTILE_TEXTS = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"x; touch {CANARY};",
    f"x\ntouch {CANARY}\n",
    f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "',
    f"' $(touch {CANARY}) '",
    f"${{x:-$(touch {CANARY})}}",
    f"<(touch {CANARY})",
    f"& touch {CANARY} &",
    f"| touch {CANARY}",
    f"MESHPLAN_END\ntouch {CANARY}\n",
    f"a[$(touch {CANARY})]",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "--><script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "\x1b]0;owned\x07\x1b[2J",
    "\x9b31m",
    "\u202eevil",
    "../../etc/passwd",
    "{{7*7}}",
    "{x}",
    "%s%n",
    ": {a: b}",
    "- !!python/object/apply:os.system ['true']",
    "a\x00b",
    "x" * 100_000,
    "",
    "-rf",
    "~root",
    "*",
)
HOSTILE_VALUES: tuple[Any, ...] = (
    *HOSTILE_TEXTS,
    None,
    True,
    0,
    -1,
    1,
    3,
    10**6,
    10**18,
    10**400,
    1e308,
    -1e-308,
    0.5,
    [],
    {},
    [[]],
    {"x": 1},
    [None],
    [1, 2, 3],
)


def forged(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The plan with another value at ``path``, and the id that belongs to it."""
    changed = copy.deepcopy(document)
    inner = changed
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return signed(changed)


def without(document: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """The plan without one field."""
    changed = copy.deepcopy(document)
    inner = changed
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    return signed(changed)


def signed(document: dict[str, Any]) -> dict[str, Any]:
    """The plan under the id of its content; without one where it has no solution."""
    content = {key: value for key, value in document.items() if key != "plan_id"}
    solution = content.get("solution")
    if isinstance(solution, dict):
        content["solution"] = {key: value for key, value in solution.items() if key not in CLOCKS}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {**document, "plan_id": hashlib.sha256(text.encode()).hexdigest()[:12]}


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field, the inner ones too."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def leaves(document: Any) -> list[tuple[Any, ...]]:
    """Every text and number, one of each field: the others of a list look like its first."""
    found = {}
    for path in places(document):
        value = document
        for part in path:
            value = value[part]
        if not isinstance(value, dict | list):
            found.setdefault(tuple(part for part in path if not isinstance(part, int)), path)
    return list(found.values())


def random_forgery(document: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """One field replaced or taken away."""
    path = random_.choice(list(places(document)))
    if path == ("plan_id",):
        path = ("kind",)
    if random_.random() < 0.15:
        return without(document, path)
    return forged(document, path, random_.choice(HOSTILE_VALUES))
