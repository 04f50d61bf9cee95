#!/bin/sh
# As the image of Redis begins: options alone are for redis-server, and clients of other hosts are let in.
set -eu
case "${1:-}" in
    -* | *.conf) set -- redis-server "$@" ;;
esac
if [ "${1:-}" = redis-server ]; then
    set -- "$@" --protected-mode no
fi
exec "$@"
