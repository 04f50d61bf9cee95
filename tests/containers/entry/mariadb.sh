#!/bin/sh
# As the image of MariaDB begins: an empty directory becomes a server with one database, which one user may use.
set -eu
case "${1:-}" in
    -*) set -- mariadbd "$@" ;;
esac
if [ "${1:-}" != mariadbd ]; then
    exec "$@"
fi

user=${MARIADB_USER:-${MYSQL_USER:-}}
password=${MARIADB_PASSWORD:-${MYSQL_PASSWORD:-}}
database=${MARIADB_DATABASE:-${MYSQL_DATABASE:-}}
data=/var/lib/mysql

mkdir -p "$data" /run/mysqld
chown mysql:mysql "$data" /run/mysqld

if [ ! -d "$data/mysql" ]; then
    mariadb-install-db --no-defaults --user=mysql --datadir="$data" --skip-test-db --auth-root-authentication-method=socket
    # Read at the first start, before anybody is let in.  The data directory is gone with its volume, and so is this.
    umask 077
    {
        if [ -n "$database" ]; then
            echo "CREATE DATABASE IF NOT EXISTS \`$database\`;"
        fi
        if [ -n "$user" ]; then
            quoted=$(printf '%s' "$password" | sed "s/[\\\\']/\\\\&/g")
            echo "CREATE USER '$user'@'%' IDENTIFIED BY '$quoted';"
            if [ -n "$database" ]; then
                echo "GRANT ALL ON \`$database\`.* TO '$user'@'%';"
            fi
        fi
        # Whom the health check comes as.
        echo "CREATE USER healthcheck@'127.0.0.1';"
    } >"$data/first.sql"
    chown mysql:mysql "$data/first.sql"
    first=--init-file=$data/first.sql
fi
shift
exec mariadbd --no-defaults --user=mysql --datadir="$data" --socket=/run/mysqld/mysqld.sock --bind-address='*' \
    --skip-name-resolve ${first:+"$first"} "$@"
