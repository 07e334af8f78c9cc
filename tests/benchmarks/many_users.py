"""Many processes on one store: first users, an upgrade race, writers, submitters, workers that are killed.

python tests/benchmarks/many_users.py [sqlite] [postgresql] --users 32 --writers 64 --plans 200 --kills 200
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from postgresql_server import postgresql_server
from store_crowd import crowd

from meshplan.catalogs.database.connection import connect, parse_url
from meshplan.catalogs.database.migrations import upgrade
from meshplan.catalogs.database.opening import open_database

TIMEOUT_S = 3600.0
SHOWN = (
    "failures",
    "plans",
    "sequences_differ",
    "tags",
    "jobs",
    "questions",
    "attempts",
    "done_without_plan",
    "kills",
)


@contextmanager
def sqlite_urls() -> Iterator[Callable[[], str]]:
    """URLs of databases that are not there yet."""
    numbers = count()
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: f"{folder}/{next(numbers)}.sqlite"


@contextmanager
def postgresql_urls() -> Iterator[Callable[[], str]]:
    """URLs of empty databases of a server."""
    with postgresql_server() as server:
        yield server.new_database


def run(urls: Callable[[], str], options: argparse.Namespace) -> None:
    """Every action on a store of its own."""
    print_line("first use", urls(), "first-use", options.users)
    url = urls()
    engine = connect(parse_url(url))
    upgrade(engine, "0001")
    engine.dispose()
    print_line("upgrade race", url, "upgrade", options.users)
    print_line("imports", seeded(urls), "import", options.users)
    print_line("writers", seeded(urls), "write", options.writers, options.plans)
    url = seeded(urls)
    print_line("submitters", url, "submit", options.users, options.plans)
    print_line("workers", url, "work", options.users)
    print_line("killed workers", seeded(urls), "kill", options.workers, options.kills)


def seeded(urls: Callable[[], str]) -> str:
    """A catalog."""
    url = urls()
    open_database(url).dispose()
    return url


def print_line(name: str, url: str, action: str, processes: int, each: int = 1) -> None:
    """One action and what came of it."""
    came = crowd(action, url, processes, each, timeout_s=TIMEOUT_S)
    figures = ", ".join(f"{key} {came[key]}" for key in SHOWN if came.get(key) not in (None, {}))
    print(f"  {name:15} {processes:3} × {each:3}  {came['seconds']:7.1f} s  {figures}", flush=True)
    if came["failures"]:
        print(came["errors"])


def main() -> None:
    """Print the figures of each store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="*", default=["sqlite", "postgresql"])
    for name, default in (("users", 32), ("writers", 64), ("plans", 200), ("workers", 8), ("kills", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for store in options.stores:
        print(store)
        with (postgresql_urls if store == "postgresql" else sqlite_urls)() as urls:
            run(urls, options)


if __name__ == "__main__":
    main()
