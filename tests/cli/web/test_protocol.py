"""Clients that break HTTP while their answer is under way: no traceback, whatever has been sent by then."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from meshplan.cli.web.protocol import ForgivingProtocol

HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
NOT_A_CHUNK = b"zz\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


class Wire(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def exchange(begun: bool) -> tuple[Wire, list[str]]:
    """One request whose body turns out not to be HTTP, before or after its answer has ``begun``."""
    broken = asyncio.Event()
    read = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send(START)
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await broken.wait()
        read.append((await receive())["type"])
        if not begun:
            await send(START)
        await send({"type": "http.response.body", "body": b"rest"})

    config = Config(application, http=ForgivingProtocol, lifespan="off")
    config.load()
    protocol = ForgivingProtocol(config, ServerState(), {})
    wire = Wire()
    protocol.connection_made(wire)
    protocol.data_received(HALF_A_BODY)
    await asyncio.sleep(0)
    protocol.data_received(NOT_A_CHUNK)
    broken.set()
    await asyncio.gather(*protocol.server_state.tasks)
    return wire, read


@pytest.mark.parametrize(("begun", "statuses"), [(False, [b"400"]), (True, [b"200"])])
def test_a_breach_gets_one_answer_and_no_traceback(
    begun: bool, statuses: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as own_thread:  # the browser's tests leave a loop running in this one
        wire, read = own_thread.submit(lambda: asyncio.run(exchange(begun))).result()

    lines = [line for line in wire.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert [line.split()[1] for line in lines] == statuses
    assert wire.closed
    assert b"rest" not in wire.written
    assert len(read) == 1
    assert not [record for record in caplog.records if record.exc_info]
