"""Flags of serving engines on which no plan depends: who may call a server, under which name, what it logs.

Read in the engines' own documents: vLLM ("vllm serve", docs.vllm.ai, 0.12 to 0.18, and the engine arguments), SGLang
("Server Arguments", docs.sglang.io), trtllm-serve and llama-server. A flag stands here only if no value of it
changes weights, memory, batches or the time of a token beyond what is measured of a server. So these do not: what
chooses a checkpoint (``--revision``, ``--load-format``), tokens (``--tokenizer``), defaults of sampling
(``--generation-config``), what constrains answers, processes of the front end, LoRA modules, and any that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.planner.emit.terms import Arguments

_ADDRESS = ("--host", "--port", "--uds", "--root-path", "--fastapi-root-path", "--path", "--api-prefix")
_ACCESS = (
    *("--api-key", "--api-key-file", "--admin-api-key", "--allow-credentials", "--allowed-origins"),
    *("--allowed-methods", "--allowed-headers", "--allowed-local-media-path", "--allowed-media-domains"),
    *(
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--ssl-cert-reqs",
        "--ssl-ciphers",
        "--ssl-keyfile-password",
    ),
    *("--enable-ssl-refresh", "--ssl-key-file", "--ssl-cert-file", "--hf-token"),
)
_NAMES = ("--served-model-name", "--alias", "--trust-remote-code", "--download-dir", "--weight-version")
_LOGS = (
    *("--disable-log-requests", "--enable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log"),
    *("--disable-access-log-for-endpoints", "--uvicorn-log-level", "--log-config-file", "--max-log-len"),
    *("--enable-log-outputs", "--enable-log-deltas", "--aggregate-engine-logging", "--log-error-stack"),
    *("--log-level", "--log-level-http", "--log-requests", "--log-requests-level", "--decode-log-interval"),
    *("--show-time-cost", "--crash-dump-folder", "--log-file", "--log-disable", "--log-colors", "--log-prefix"),
    *("--log-timestamps", "--log-verbosity", "--verbose"),
)
_METRICS = (
    *("--show-hidden-metrics-for-version", "--enable-server-load-tracking", "--enable-request-id-headers"),
    *("--enable-prompt-tokens-details", "--enable-force-include-usage", "--otlp-traces-endpoint"),
    *("--enable-metrics", "--enable-metrics-for-all-schedulers", "--bucket-time-to-first-token"),
    *("--bucket-inter-token-latency", "--bucket-e2e-request-latency", "--collect-tokens-histogram"),
    *("--enable-cache-report", "--enable-trace", "--metrics", "--slots", "--props"),
)
_WORDS = (
    *("--chat-template", "--chat-template-file", "--chat-template-content-format", "--trust-request-chat-template"),
    *("--completion-template", "--response-role", "--jinja", "--enable-auto-tool-choice", "--tool-call-parser"),
    *("--tool-parser", "--tool-parser-plugin", "--tool-server", "--reasoning-parser", "--reasoning-format"),
    *("--return-tokens-as-token-ids", "--disable-fastapi-docs", "--webui", "--no-webui"),
)
_RUN = ("--seed", "--random-seed", "--watchdog-timeout", "--dist-timeout", "--skip-server-warmup", "--shutdown-timeout")
IDLE_FLAGS = frozenset((*_ADDRESS, *_ACCESS, *_NAMES, *_LOGS, *_METRICS, *_WORDS, *_RUN))


def idle_flags(arguments: Arguments) -> Mapping[str, Any]:
    """Those of a command's flags on which no plan depends, ``--no-`` before a switch included."""
    return {flag: value for flag, value in arguments.items() if _plain(flag) in IDLE_FLAGS}


def _plain(flag: str) -> str:
    """A flag spelled with dashes, without the negation of a switch."""
    dashed = flag.replace("_", "-")
    return dashed if dashed in IDLE_FLAGS else dashed.replace("--no-", "--", 1)


def idle_text(flags: tuple[str, ...]) -> str:
    """What is said of them: names without values, of which one may be a key.

    >>> idle_text(("--port", "--api-key"))
    '2 options that no plan depends on: --api-key, --port'
    """
    number = "1 option" if len(flags) == 1 else f"{len(flags)} options"
    return f"{number} that no plan depends on: {', '.join(sorted(flags))}"
