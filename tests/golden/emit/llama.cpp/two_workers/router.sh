#!/usr/bin/env bash
# meshplan plan af2c100a3dd4
# plan digest: af2c100a3dd42ea3085a73b3e072cc0b1a43fb8590ac234e7b579ed7ca0c05b8
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
