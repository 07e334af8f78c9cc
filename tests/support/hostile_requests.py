"""HTTP requests that somebody made up to break a service, as the bytes that go over the wire; and what came back."""

from __future__ import annotations

import copy
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hostile import HOSTILE_TEXTS, HOSTILE_VALUES
from web_cases import SPEC

# Seconds after which an answer counts as a hang.
MOST_S = 10.0
IDS = (
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%00", "%ff%fe", "%2e%2e/", "latest/../latest", "x" * 5000, "%",
    "%zz", "*", "' OR 1=1 --", "\u202elatest", "%0d%0aset-cookie:%20a=b", "-1", "0", "con", "~root", "file:///etc/passwd",
)  # fmt: skip
PATHS = (
    "/api/v1/plans/{}", "/api/v1/plans/{}/explain", "/api/v1/plans/{}/explain?instead={}", "/api/v1/plans/{}/files",
    "/api/v1/plans/{}/files?target={}&framework={}&script={}&image={}", "/api/v1/plans?kind={}&limit={}&offset={}",
    "/api/v1/jobs/{}", "/api/v1/jobs/{}/events", "/api/v1/compare?plans={}", "/api/v1/schema/{}", "/api/v1/catalog/{}",
    "/api/v1/catalog/devices/{}", "/plans/{}", "/plans/{}/what-if", "/plans/{}/what-if/figures?price={}", "/{}",
    "/plans/{}/instead?choice={}", "/plans/{}/{}.svg", "/plans?kind={}&offset={}", "/jobs/{}", "/catalog/{}/{}",
    "/catalog/devices?search={}", "/static/{}/{}", "/?example={}&gpus={}",
)  # fmt: skip
POSTS = (
    "/api/v1/plans", "/api/v1/plans?top={}&seed={}&time_limit_s={}", "/api/v1/estimate", "/api/v1/validate",
    "/api/v1/plans/{}/record", "/api/v1/catalog", "/ask", "/ask/check", "/jobs/{}/cancel",
)  # fmt: skip
TYPES = (
    "application/json", "application/json", "application/yaml", "application/x-ndjson", "text/plain", "",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json; charset=utf-7",
    "a/b\x0bc",
)  # fmt: skip
METHODS = ("GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "BREW", "GET\x00")
# Small texts that grow, or that some reader would take for more than data.
_LAUGHS = b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 6)) for c in range(98, 112))
BODIES = (
    b"a: &a [x,x,x,x,x,x,x,x,x]\n" + _LAUGHS,
    b"[" * 200_000,
    b'{"kind":' * 20_000,
    b"\x1f\x8b\x08" + bytes(500),
    b'{"kind": "training", "kind": "serving"}',
    b"!!python/object/apply:os.system ['touch meshplan_canary']",
    b"%YAML 9.9\n---\n",
    b"\xff\xfe{\x00}\x00",
    b"NaN",
    b"1e400",
    b'{"model": "/etc/passwd", "kind": "training"}',
    b"spec=" + b"%41" * 50_000,
    b"x=1&" * 5000,
    b"\x00" * 1000,
    b"",
    b'{"kind": "training", "workload": {"sequence_length": ' + b"9" * 5000 + b"}}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request.

    Args:
        status: of the answer; 0 where the service closed the connection without one.
        seconds: until the answer, or until the end.
        content: everything that came back.
    """

    status: int
    seconds: float
    content: bytes

    def complaint(self) -> str | None:
        """What is wrong with it; None where it is an answer that may be given to anybody."""
        if self.seconds >= MOST_S:
            return f"no answer in {self.seconds:.1f} s"
        if self.status == 500 or b"Traceback" in self.content or b"root:x:" in self.content:
            return self.content[:400].decode("utf-8", "replace")
        return (
            "a control character" if b"\x1b" in self.content.partition(b"\r\n\r\n")[2] and not self._is_zip() else None
        )

    def _is_zip(self) -> bool:
        return b"application/zip" in self.content


def hostile_request(random_: random.Random) -> bytes:
    """One request: path, query, headers or body, or several of them, are hostile."""
    is_post = random_.random() < 0.5
    method = "POST" if is_post else "GET"
    if random_.random() < 0.08:
        method = random_.choice(METHODS)
    path = random_.choice(POSTS if is_post else PATHS)
    while "{}" in path:
        path = path.replace("{}", _word(random_), 1)
    body, media_type = (_body(random_), random_.choice(TYPES)) if is_post else (b"", "")
    headers = [("host", "127.0.0.1"), ("connection", "close"), ("content-length", str(len(body)))]
    headers += [("content-type", media_type)] if media_type else []
    headers += _headers(random_) if random_.random() < 0.35 else []
    if random_.random() < 0.03:
        headers = [(name, value) for name, value in headers if name not in ("host", "content-length")]
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
    sent = head.encode("utf-8", "replace") + body
    return sent[: random_.randrange(1, len(sent))] if random_.random() < 0.02 else sent


def _word(random_: random.Random) -> str:
    text = random_.choice([*IDS, *HOSTILE_TEXTS[:-8], "latest", "nan", "1e999", "9" * 400, "-0", "tensor_parallel=7"])
    return text if random_.random() < 0.2 and "\n" not in text and " " not in text else quote(text[:8000], safe="%/")


def _headers(random_: random.Random) -> Sequence[tuple[str, str]]:
    """Lies about the length, encodings, forged origins, and values that some log would take for more."""
    text = random_.choice([*IDS, *HOSTILE_TEXTS[:-8]]).replace("\n", " ").replace("\r", " ")
    return random_.choice(
        [
            [("content-length", random_.choice(["-1", "1e3", "99999999999999999999", "0", "5, 6", "\u0665"]))],
            [("transfer-encoding", random_.choice(["chunked", "gzip", "chunked, identity", "\x0bchunked"]))],
            [("host", random_.choice(["evil.example", "", "127.0.0.1:99999", "[::1", text]))],
            [("authorization", random_.choice(["Bearer " + text, "Basic " + text, "Basic \u00fc", "Bearer" * 2000]))],
            [("accept", "text/html"), ("x-forwarded-for", text), ("x-forwarded-host", text), ("forwarded", text)],
            [("accept", random_.choice(["text/html;q=" + "9" * 500, text, "*/*" * 3000]))],
            [("content-encoding", random_.choice(["gzip", "br", text])), ("expect", "100-continue")],
            [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site"), ("cookie", text * 3)],
            [(f"x-{number}", "y" * 50) for number in range(random_.choice([90, 400]))],
            [("range", "bytes=0-,-1,5-2"), ("if-modified-since", text), ("upgrade", "websocket"), ("te", "trailers")],
            [("x-long", "z" * 70_000)],
            [(text[:40] or "x", text)],
        ]
    )


def _body(random_: random.Random) -> bytes:
    kind = random_.random()
    if kind < 0.3:
        return random_.choice(BODIES)
    if kind < 0.4:
        return random_.randbytes(random_.randrange(2000))
    spec: dict[str, Any] = copy.deepcopy(SPEC)
    for _ in range(random_.choice([1, 1, 2, 4])):
        at: Any = spec
        while isinstance(at, dict) and at:
            key = random_.choice([*at, "slo", "files", "trace"])
            if not isinstance(at.get(key), dict) or random_.random() < 0.4:
                at[key] = copy.deepcopy(random_.choice(HOSTILE_VALUES))
                break
            at = at[key]
    text = json.dumps(spec, default=str, skipkeys=True)
    if kind < 0.6:
        place = random_.randrange(len(text))
        text = text[:place] + random_.choice([*'{}[]:,"\\', "\x00", "\u2028", "1e999", text]) + text[place + 1 :]
    return (text if kind < 0.9 else f"spec={quote(text)}").encode("utf-8", "replace")


def _is_whole(request: bytes) -> bool:
    """Whether a service has all that it may wait for; of a part it waits for the rest, rightly."""
    head, end, body = request.partition(b"\r\n\r\n")
    lengths = [
        line.partition(b":")[2].strip() for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    ]
    plain = b"transfer-encoding" not in head.lower() and len(lengths) == 1
    return bool(end) and plain and lengths[0] == str(len(body)).encode()


def asked(host: str, port: int, request: bytes) -> Outcome:
    """Send the bytes, and read until the service ends the connection or :data:`MOST_S` are over."""
    began, parts = time.monotonic(), []
    try:
        with socket.create_connection((host, port), timeout=MOST_S) as connection:
            connection.sendall(request)
            if not _is_whole(request):
                connection.shutdown(socket.SHUT_WR)
            while time.monotonic() - began < MOST_S and (part := connection.recv(65_536)):
                parts.append(part)
    except TimeoutError:
        pass
    except OSError:  # closed while we still sent: refused
        pass
    content = b"".join(parts)
    line = content[:12].split()
    status = int(line[1]) if len(line) > 1 and line[1].isdigit() else 0
    return Outcome(status=status, seconds=time.monotonic() - began, content=content)
