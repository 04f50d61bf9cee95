#!/bin/sh
# As the image of ZooKeeper begins: the configuration is made of the environment.
set -eu
if [ "${1:-}" != zkServer.sh ]; then
    exec "$@"
fi

mkdir -p /conf /data /datalog
if [ ! -s /conf/zoo.cfg ]; then
    {
        echo "dataDir=/data"
        echo "dataLogDir=/datalog"
        echo "tickTime=${ZOO_TICK_TIME:-2000}"
        echo "initLimit=${ZOO_INIT_LIMIT:-5}"
        echo "syncLimit=${ZOO_SYNC_LIMIT:-2}"
        echo "maxClientCnxns=${ZOO_MAX_CLIENT_CNXNS:-60}"
        echo "standaloneEnabled=${ZOO_STANDALONE_ENABLED:-true}"
        echo "admin.enableServer=${ZOO_ADMINSERVER_ENABLED:-true}"
        if [ -n "${ZOO_4LW_COMMANDS_WHITELIST:-}" ]; then
            echo "4lw.commands.whitelist=$ZOO_4LW_COMMANDS_WHITELIST"
        fi
        set -f # a whitelist may be a star
        for line in ${ZOO_SERVERS:-server.1=localhost:2888:3888;2181} ${ZOO_CFG_EXTRA:-}; do
            echo "$line"
        done
    } >/conf/zoo.cfg
fi
if [ ! -s /data/myid ]; then
    echo "${ZOO_MY_ID:-1}" >/data/myid
fi
exec "$@"
