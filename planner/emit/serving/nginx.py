"""nginx in front of whole workers: for engines without a router of their own, and for kinds of workers with weights.

``least_conn`` sends a request to the server with the fewest connections for its weight, among equals in turn by weight
(https://nginx.org/en/docs/http/ngx_http_upstream_module.html#least_conn). A connection carries one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.planner.emit.serving.job import Argument, RouterOf, RouterProgram, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.serving.problem.config import Role, Router

NGINX_METHODS = {
    Router.ROUND_ROBIN: "",
    Router.LEAST_LOADED: "    least_conn;\n",
    Router.LEAST_CONNECTIONS: "    least_conn;\n",
}
_FILE = "nginx.conf"
_NGINX = """\
# least_conn counts connections, one per request; answers stream, so nothing is buffered.
daemon off;
pid /tmp/meshplan-nginx.pid;
error_log stderr;
events {{ worker_connections 65536; }}
http {{
  access_log off;
  client_max_body_size 0;
  upstream workers {{
{method}{servers}  }}
  server {{
    listen {port};
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 3600s;
    }}
  }}
}}
"""


def nginx_router(request: ServingRequest) -> RouterOf:
    """Nginx in front of every mixed worker, each with the weight of its pool."""
    method = NGINX_METHODS[request.config.router]
    weights = [pool.weight for pool in request.config.pools for _ in range(pool.num_workers)]

    def router(addresses: Mapping[Role, Sequence[Argument]]) -> RouterProgram:
        servers = "".join(
            f"    server {address_text(address)}" + (f" weight={weight}" if weight > 1 else "") + ";\n"
            for address, weight in zip(addresses[Role.MIXED], weights, strict=True)
        )
        text = _NGINX.replace("{method}", method).replace("{servers}", servers).replace("{port}", str(request.port))
        return router_program_of(("nginx",), _FILE, text)

    return router


def router_program_of(command: tuple[str, ...], name: str, text: str) -> RouterProgram:
    """A router that reads its configuration from a file."""
    return RouterProgram(command=(*command, "-c", Template(text="{router_file}")), file=(name, Template(text=text)))


def address_text(address: Argument) -> str:
    """``host:port`` with its placeholders."""
    return address.text if isinstance(address, Template) else address
