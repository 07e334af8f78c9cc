#!/usr/bin/env bash
# meshplan plan 6c74439397fc
# plan digest: 6c74439397fcdf7ff1db9e418c9e3319e842a8b748b825bd72810458b0055423
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
: "${MESHPLAN_HOSTS:?set MESHPLAN_HOSTS to the addresses of the 2 hosts, in order}"
read -r -a addresses <<< "$MESHPLAN_HOSTS"
(( ${#addresses[@]} >= 2 )) || { echo "router.sh: 2 addresses are needed" >&2; exit 1; }
folder=$(mktemp -d)
router_file="$folder/nginx.conf"
cat > "$router_file" << MESHPLAN_END
# One connection a request is what least_conn counts; answers stream, so nothing is buffered.
daemon off;
pid /tmp/meshplan-nginx.pid;
error_log stderr;
events { worker_connections 65536; }
http {
  access_log off;
  client_max_body_size 0;
  upstream workers {
    least_conn;
    server ${addresses[0]}:8100;
    server ${addresses[0]}:8101;
    server ${addresses[1]}:8100;
  }
  server {
    listen 8000;
    location / {
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 3600s;
    }
  }
}
MESHPLAN_END
exec nginx -c "$router_file" "$@"
