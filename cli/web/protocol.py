"""HTTP/1.1 of the service, for clients that break it in the middle of an answer.

uvicorn answers every breach with 400, also when half of another answer has gone out already, or when the application
will still send one: h11 refuses both, and each is a traceback in the log. Here a begun answer is cut off, and what
the application sends after a breach goes nowhere, as it does after a client has left.
"""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol


class ForgivingProtocol(H11Protocol):
    """uvicorn's protocol, whose 400 is sent only where an answer may still begin."""

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to a request that is not HTTP, or close the connection if its answer has begun."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)
