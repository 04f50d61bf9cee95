#!/bin/sh
# As in the image of MariaDB: whether clients can connect by TCP, and whether InnoDB has begun its work.
set -eu
ask() {
    mariadb --no-defaults --protocol=tcp --host=127.0.0.1 --user=healthcheck --batch --skip-column-names --execute="$1"
}
for check in "$@"; do
    case "$check" in
        --connect) ask 'SELECT 1' >/dev/null ;;
        --innodb_initialized)
            [ "$(ask "SELECT COUNT(*) FROM information_schema.ENGINES WHERE engine = 'InnoDB' AND support IN ('YES', 'DEFAULT')")" = 1 ]
            ;;
        *)
            echo "no such check: $check" >&2
            exit 1
            ;;
    esac
done
