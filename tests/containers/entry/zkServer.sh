#!/bin/bash
# As in the image of ZooKeeper: runs the server, or asks it what it is.
set -eu
case "${1:-}" in
    start-foreground)
        # The jar names in its manifest most of what it needs.
        jars=$(printf '%s:' /usr/share/java/zookeeper.jar /usr/share/java/slf4j-simple.jar /usr/share/java/netty-*.jar)
        exec java -Dorg.slf4j.simpleLogger.defaultLogLevel=warn ${SERVER_JVMFLAGS:-} -cp "$jars" \
            org.apache.zookeeper.server.quorum.QuorumPeerMain /conf/zoo.cfg
        ;;
    status)
        port=$(sed -n "s/^server\.$(cat /data/myid)=.*;\(.*:\)\{0,1\}\([0-9]*\)$/\2/p" /conf/zoo.cfg)
        exec 3<>"/dev/tcp/127.0.0.1/${port:-2181}"
        printf srvr >&3
        # It answers without a mode while it has no leader.
        grep '^Mode: ' <&3
        ;;
    *)
        echo "usage: zkServer.sh start-foreground|status" >&2
        exit 2
        ;;
esac
