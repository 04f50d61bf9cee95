#!/bin/sh
# As the image of PostgreSQL begins: an empty directory becomes a database with one user, who must log in.
set -eu
case "${1:-}" in
    -*) set -- postgres "$@" ;;
esac
if [ "${1:-}" != postgres ]; then
    exec "$@"
fi

: "${PGDATA:=/var/lib/postgresql/data}"
: "${POSTGRES_USER:=postgres}"
: "${POSTGRES_DB:=$POSTGRES_USER}"
as_postgres="setpriv --reuid=postgres --regid=postgres --clear-groups --"

mkdir -p "$PGDATA" /var/run/postgresql
chown postgres:postgres "$PGDATA" /var/run/postgresql
chmod 700 "$PGDATA"

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
    if [ -z "${POSTGRES_PASSWORD:-}" ] && [ "$method" != trust ]; then
        echo "set POSTGRES_PASSWORD, or POSTGRES_HOST_AUTH_METHOD=trust" >&2
        exit 1
    fi
    password=$(mktemp)
    printf '%s\n' "${POSTGRES_PASSWORD:--}" >"$password"
    chown postgres "$password"
    $as_postgres initdb --pgdata "$PGDATA" --username "$POSTGRES_USER" --pwfile "$password" \
        --encoding UTF8 --no-locale --auth-local trust --auth-host "$method"
    rm "$password"
    echo "host all all all $method" >>"$PGDATA/pg_hba.conf"
    if [ "$POSTGRES_DB" != postgres ]; then
        # Without a server, so that nobody is let in before the database is there.
        echo "CREATE DATABASE \"$POSTGRES_DB\"" | $as_postgres postgres --single -D "$PGDATA" postgres
    fi
fi
shift
# The image asks Docker to end it by SIGINT, which `docker import` cannot say: an end that does not wait for clients.
$as_postgres postgres -D "$PGDATA" -c listen_addresses='*' "$@" &
server=$!
trap 'kill -INT $server' TERM INT
status=0
while kill -0 "$server" 2>/dev/null; do
    status=0
    wait "$server" || status=$?
done
exit "$status"
