/*
 * A queue of keys that belong to sessions: etcd and ZooKeeper.
 *
 * Stands for lockkit/backends/etcd: create_key, check_queue, deletions and delete_key of keys.py, Sessions.keep_alive of
 * session.py; and for lockkit/backends/zookeeper/queue.py (LockQueue._join, _decide, _wait_for), where a node is the key,
 * its czxid the revision, and the timeout of the session the ttl. The oldest key holds the lock, and each waiter watches
 * the one before it. Both servers apply a request to a quorum before they answer, which is one atomic step here.
 *
 * Run `queue`: three clients, of which one gives up waiting. Run `sessions`: two; the first acquires twice, under the same
 * key (etcd names it by the session), and sends a heartbeat; one crashes; one release comes late.
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order of grants
 * @promise progress   whoever waits gets in, unless it has crashed or its session has ended
 *
 * @run queue     -DCLIENTS=3 -DDRIFT=0 -DTURNS=1 -DBEATS=0 -DLOSSES=0 -DCRASHES=0 -DQUITS=1 -DPAUSES=1
 * @run sessions  -DCLIENTS=2 -DTURNS=2 -DBEATS=1 -DLOSSES=1 -DCRASHES=1 -DQUITS=0 -DPAUSES=1
 *
 * @mutant MARGIN=0                    sessions  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant ANCHOR_AT_ANSWER            sessions  exclusion  the ttl counts from the answer to a heartbeat
 * @mutant HELD_WHEN_PREDECESSOR_GONE  queue     exclusion  a waiter does not look who is before it now
 * @mutant DELETE_WITHOUT_REVISION     sessions  exclusion  a late release deletes the key of the next acquisition
 * @mutant TOKEN_BY_SEQUENCE           sessions  tokens     the token is the number within the directory, which is removed
 * @mutant WATCH_FROM_NOW              queue     progress   the watch misses what happened since the look
 * @mutant KEY_OUTLIVES_SESSION        sessions  progress   the key of a crashed client stays
 *
 * @fact kept    server  key[c] && (CLIENTS < 3 || key[2] == 0 || key[2] >= key[c]) && (key[0] == 0 || key[0] >= key[c]) && (key[1] == 0 || key[1] >= key[c])
 * @fact key     server  key[c]
 * @fact session server  session_left[c] > 0
 * @fact holds   client  holds[c] && left[c] > 0
 * @fact waits   client  waits[c]
 * @fact token   client  token[c]
 * @tell session+     begins a session for {who}
 * @tell key+         creates the key of {who}
 * @tell key-         deletes the key of {who}
 * @tell Network.key- deletes the key of {who}: a late message
 * @tell Time.key-    deletes the key of {who}: its session is over
 * @tell kept+        -
 * @tell kept-        -
 * @tell Time.kept-   -
 * @tell Network.kept- -
 * @tell waits+       waits for the key before its own
 * @tell renews+      sends a heartbeat
 */
#include "common.h"

#define NO_KEY 0

byte key[CLIENTS];        /* the revision at which the client's key was created */
byte session_left[CLIENTS];
byte revision, sequence;
byte left[CLIENTS], since[CLIENTS], watched[CLIENTS];
bool holds[CLIENTS], busy[CLIENTS], waits[CLIENTS], event[CLIENTS];
byte losses = LOSSES, crashes = CRASHES, pauses = PAUSES, quits = QUITS;
byte late_revision;       /* of a release of the first client */
byte newest_token;
bool exclusion = true, tokens = true;

#define HAS_KEY(client) (key[client] != NO_KEY)
#define IS_BEFORE(client) (key[client] == before)
#define BELIEVES(client) (holds[client] && left[client] > 0)

inline delete_key(client)
{
	if
	:: key[client] != NO_KEY ->
		for (other : 0 .. CLIENTS - 1) {
			if
			:: watched[other] == key[client] -> event[other] = true
			:: else
			fi
		}
		key[client] = NO_KEY
	:: else
	fi;
	if
	:: !ANY(HAS_KEY) -> sequence = 0
	:: else
	fi;
	other = 0
}

/* The newest key before one's own; NO_KEY: one holds the lock. */
inline look()
{
	before = NO_KEY;
	for (other : 0 .. CLIENTS - 1) {
		if
		:: key[other] != NO_KEY && key[other] < key[_pid] && key[other] > before -> before = key[other]
		:: else
		fi
	}
	other = 0
}

active [CLIENTS] proctype Client()
{
	byte turn, before, other, token, mine, beats = (_pid == 0 -> BEATS : 0);

	/* Its session begins. Its ttl counts from before the request. */
	atomic { busy[_pid] = true; start(left[_pid]) }
	session_left[_pid] = TTL;
again:	turn++;
	if
	:: d_step { session_left[_pid] > 0 ->
			revision++; sequence++; key[_pid] = revision; mine = revision;
			token = revision;
#ifdef TOKEN_BY_SEQUENCE
			token = sequence;
#endif
			look() }
	:: session_left[_pid] == 0 -> goto ended
	fi;
decide:	if
	:: d_step { before == NO_KEY && left[_pid] > 0 ->
			busy[_pid] = false; holds[_pid] = true;
			promise(exclusion, COUNT(BELIEVES) <= 1);
			promise(tokens, token > newest_token); newest_token = token }
		-> goto held
	:: before == NO_KEY && left[_pid] == 0 -> goto release
	:: atomic { before != NO_KEY -> watched[_pid] = before; busy[_pid] = false; waits[_pid] = true;
#ifdef WATCH_FROM_NOW
			event[_pid] = false
#else
			/* From the revision of the look on, so that nothing is missed in between. */
			event[_pid] = !ANY(IS_BEFORE)
#endif
		}
	fi;
wait:	if
	:: d_step { event[_pid] ->
			event[_pid] = false; watched[_pid] = NO_KEY; waits[_pid] = false; busy[_pid] = true;
#ifdef HELD_WHEN_PREDECESSOR_GONE
			before = NO_KEY
		} -> goto decide
#else
		} -> goto check
#endif
	:: atomic { quits > 0 && _pid == 1 -> quits--; waits[_pid] = false; event[_pid] = false; watched[_pid] = NO_KEY; goto release }
	:: atomic { crashes > 0 -> crashes--; waits[_pid] = false; watched[_pid] = NO_KEY; event[_pid] = false; left[_pid] = 0; goto over }
	fi;
#ifndef HELD_WHEN_PREDECESSOR_GONE
check:	if
	:: d_step { key[_pid] == mine -> look() } -> goto decide
	:: key[_pid] != mine -> goto ended
	fi;
#endif

held:	do
	:: atomic { beats > 0 && left[_pid] > 0 -> beats--; start(since[_pid]) };
		if
		:: d_step { session_left[_pid] > 0 -> session_left[_pid] = TTL }
		:: atomic { session_left[_pid] == 0 -> since[_pid] = 0; left[_pid] = 0; break }
		fi;
		d_step {
#ifdef ANCHOR_AT_ANSWER
			since[_pid] = TTL - MARGIN + DRIFT;
#endif
			left[_pid] = (left[_pid] > 0 -> max(left[_pid], since[_pid]) : 0); since[_pid] = 0;
			promise(exclusion, COUNT(BELIEVES) <= 1) }
	:: break /* released, or lost */
	:: atomic { crashes > 0 -> crashes--; holds[_pid] = false; left[_pid] = 0; goto over }
	od;

release: atomic { holds[_pid] = false; busy[_pid] = true }
	if
	:: d_step { key[_pid] == mine -> delete_key(_pid) }
	:: key[_pid] != mine
	/* Asked twice, as the first answer did not come; the first request comes late. */
	:: d_step { losses > 0 && _pid == 0 && key[_pid] == mine -> losses--; late_revision = mine; delete_key(_pid) }
	fi;
	if
	:: turn < TURNS && _pid == 0 && left[_pid] > 0 && key[_pid] == NO_KEY -> goto again
	:: else
	fi;
ended:	busy[_pid] = false;
over:	skip
}

active proctype Network()
{
	byte other;
end:	do
#ifdef DELETE_WITHOUT_REVISION
	:: d_step { late_revision != NO_KEY -> delete_key(0); late_revision = NO_KEY }
#else
	:: d_step { late_revision != NO_KEY && key[0] == late_revision -> delete_key(0); late_revision = NO_KEY }
	:: d_step { late_revision != NO_KEY && key[0] != late_revision -> late_revision = NO_KEY }
#endif
	od
}

/* A waiter keeps its session, unless it is paused when it is woken. */
#define KEEPS(c) (waits[c] && !event[c] && session_left[c] > 0)
#define RUNS(c) (!KEEPS(c) && (since[c] > 0 || left[c] > 0 || session_left[c] > 0))
#define ACTS(c) (busy[c] || event[c])

active proctype Time()
{
	byte c, other;
end:	do
	:: d_step { ANY(RUNS) && (pauses > 0 || !ANY(ACTS)) ->
		pauses = pauses - ANY(ACTS);
		for (c : 0 .. CLIENTS - 1) {
			if
			:: !KEEPS(c) ->
				if
#ifndef KEY_OUTLIVES_SESSION
				:: session_left[c] == 1 -> delete_key(c)
#endif
				:: else
				fi;
				take_one(session_left[c]); take_one(since[c]); take_one(left[c])
			:: else
			fi
		}
		c = 0
	}
	od
}
