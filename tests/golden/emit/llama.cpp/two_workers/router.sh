#!/usr/bin/env bash
# meshplan plan feb537c104b4
# plan digest: feb537c104b4db6ab8a5564faf38978f05072eb2f3d8c832674af864c1209af9
# Start this on one host once the workers are up; clients talk to it.
set -euo pipefail
addresses=(a b)
(( ${#addresses[@]} >= 1 )) || { echo "router.sh: 1 addresses are needed" >&2; exit 1; }
folder=$(mktemp -d)
router_file="$folder/nginx.conf"
cat > "$router_file" << MESHPLAN_END
# least_conn counts connections, one per request; answers stream, so nothing is buffered.
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
