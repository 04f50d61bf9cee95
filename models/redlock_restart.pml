/*
 * Which nodes of a Redlock may vote: marks, delayed restart, first start.
 *
 * Stands for DelayedRestart in lockkit/backends/redlock/delayed_restart.py with look.lua and admit.lua, and for the part of
 * acquire.lua that compares the mark in the same step as the vote. Tokens and late messages are in redlock.pml; there is
 * one ttl, which each mark knows.
 *
 * Two clients; nodes restart without their data, but never all three. Run `restart`: all nodes are marked, two restart, one
 * answer of the third is lost. Run `start`: no node is marked yet, and one restarts. Run `apart`: a third client looks and
 * admits too, and each node hears of it at a time of its own, as in a replay. Run `first`: so does a set with no marks, and
 * a lease takes two rounds, as the first one of each client does.
 *
 * Data are lost by restarts alone, which end a run; FLUSHALL between a look and a late first start is not modelled.
 *
 * @promise exclusion  never two believers
 * @promise progress   a node that was admitted votes in the end
 *
 * @run restart  -DCLIENTS=2 -DMARKED=1 -DRESTARTS=2 -DLOSSES=1 -DPAUSES=1
 * @run start    -DCLIENTS=2 -DMARKED=0 -DRESTARTS=1 -DLOSSES=0 -DPAUSES=1
 * @run apart    -DCLIENTS=2 -DMARKED=1 -DRESTARTS=2 -DLOSSES=0 -DPAUSES=1 -DDRIFT=0 -DMARGIN=1 -DAGAIN=0 -DAPART=1
 * @run first    -DCLIENTS=2 -DMARKED=0 -DRESTARTS=1 -DLOSSES=0 -DPAUSES=0 -DTTL=1 -DDRIFT=0 -DAGAIN=1 -DAPART=1 -DTWO_ROUNDS
 *
 * @mutant VOTES_AT_ONCE               restart  exclusion  a node votes as soon as it is back
 * @mutant FIRST_START_OF_THOSE_THERE  restart  exclusion  a first start is concluded although a node did not answer
 * @mutant MARK_READ_BEFORE            restart  exclusion  the mark is read before the vote, in a step of its own
 * @mutant FIRST_START_DECIDED_LATE    start    exclusion  admit.lua does not compare the run that was looked at
 * @mutant ONE_ROUND                   first    exclusion  no second round finds that a node has forgotten its vote (fencing=off)
 * @mutant OPENED_LATER                first    exclusion  a look opens a connection when other nodes have answered already
 * @mutant NEVER_ADMITTED              restart  progress   no client decides when a node votes again
 *
 * @fact kept      node[3]  key[n] == 1 + c
 * @fact silent    node[3]  (marked >> n) % 2 == 0 || wait_left[n] > 0
 * @fact restarted node[3]  (restarted >> n) % 2
 * @tell renews+      -
 * @tell losses-      gets no answer from one node
 * @tell kept+        -
 * @tell kept-        -
 * @tell Time.kept-   -
 * @tell restarted+   restarts without its data
 * @tell blank+       looks which nodes have restarted
 * @tell silent-      may vote
 * @tell Time.silent- may vote
 */
#include "common.h"

#ifdef REPLAY
#define APART CLIENTS
#else
#define WAIT TTL
#define FORGOTTEN TTL /* of a lease that no other node may know */
#endif
#define SHOWN marked
#define NODES 3
#define ALL_NODES 7
#define QUORUM 2
#define ATTEMPTS 2
#ifndef AGAIN
#define AGAIN CLIENTS /* so many clients have a second attempt */
#endif
#define count(set) ((set & 1) + ((set >> 1) & 1) + (set >> 2))
#define has(set, node) ((set >> node) & 1)

byte key[NODES], key_left[NODES], wait_left[NODES];
byte marked = ALL_NODES * MARKED; /* nodes with a mark of their present run */
byte restarted;
byte since[CLIENTS], left[CLIENTS];
bool trying[CLIENTS];
byte losses = LOSSES, pauses = PAUSES, restarts = RESTARTS;
bool exclusion = true;

#define BELIEVES(client) (left[client] > 0)

/* The next node of a set that is left to ask; in any order, but once: the nodes are numbered as the first client asks. */
inline choose(set, any_order)
{
	if
	:: has(set, 0) -> node = 0
	:: has(set, 1) && (any_order || !has(set, 0)) -> node = 1
	:: has(set, 2) && (any_order || !(set & 3)) -> node = 2
	fi;
	set = set & (ALL_NODES - (1 << node))
}

active [CLIENTS] proctype Client() MOVES(next_owner - 1, false)
{
	byte attempt, asked, yes, node, blank, silent, seen_restarted;
	bool at_once;
#ifdef MARK_READ_BEFORE
	byte seen;
#define MAY_VOTE has(seen, node)
#else
#define MAY_VOTE has(marked, node)
#endif

again:	atomic {
		attempt = attempt + COUNTED; trying[_pid] = true; asked = ALL_NODES; start(since[_pid]);
#ifdef MARK_READ_BEFORE
		seen = marked;
#endif
#ifdef REPLAY
		event = HOLDS * 64 + 1 + _pid;
		c_code { now.comes = comes_first(now.position + 1, now.event, ACQUIRED); now.event = 0; };
		since[_pid] = (comes -> since[_pid] : 0); comes = false; /* else it is never compared */
#endif
		EVENT(ASKS, 1 + _pid, 0)
	}
	do
	:: atomic { asked != 0 -> choose(asked, _pid == 1 || REPLAYED);
			if
			:: MAY_VOTE && wait_left[node] == 0 && key[node] == 0 ->
				key[node] = 1 + _pid; key_left[node] = TTL; yes = yes | (1 << node);
				EVENT(ACQUIRED, 1 + _pid, node * 2 + 1)
			:: else -> EVENT(ACQUIRED, 1 + _pid, node * 2) skip
			fi;
			node = 0 }
	:: atomic { asked == 0 || REPLAYED -> break } /* nodes that are down do not answer */
	od;
#if defined(TWO_ROUNDS) && !defined(ONE_ROUND)
	/* fence.lua: a node that has forgotten its vote writes no token. */
	yes = (key[0] == 1 + _pid) + 2 * (key[1] == 1 + _pid) + 4 * (key[2] == 1 + _pid);
#endif
	if
	:: d_step { count(yes) >= QUORUM && since[_pid] > 0 ->
			left[_pid] = since[_pid]; trying[_pid] = false; attempt = (REPLAYED -> attempt : ATTEMPTS);
			promise(exclusion, COUNT(BELIEVES) <= 1);
			EVENT(HOLDS, 1 + _pid, 1) }
	:: count(yes) < QUORUM || since[_pid] == 0 || REPLAYED /* the second round, which is in redlock.pml, may fail */
	fi;

	/* Released, lost, or taken back. */
#ifdef REPLAY
	if
	:: d_step { left[_pid] > 0 -> left[_pid] = 0; EVENT(ENDS, 1 + _pid, 0) }
	:: left[_pid] == 0
	fi;
#endif
	atomic {
		left[_pid] = 0; since[_pid] = 0; yes = 0; trying[_pid] = false; asked = ALL_NODES;
		do
		:: asked != 0 -> choose(asked, REPLAYED);
			if
			:: key[node] == 1 + _pid -> key[node] = 0; key_left[node] = 0; EVENT(RELEASED, 1 + _pid, node)
			:: else -> !REPLAYED
			fi
		:: asked == 0 || REPLAYED -> break
		od;
		asked = 0; node = 0
	}
#if !defined(NEVER_ADMITTED) && !defined(REPLAY)
	if
	:: atomic { marked != ALL_NODES ->
			/* look.lua; of one node the answer may be lost. */
			blank = ALL_NODES - marked; silent = 0; seen_restarted = restarted;
			if
			:: losses > 0 -> losses--; silent = 1; blank = blank & (ALL_NODES - 1)
			:: true
			fi;
#ifdef FIRST_START_OF_THOSE_THERE
			at_once = (blank == ALL_NODES - silent);
#else
			at_once = (silent == 0 && blank == ALL_NODES);
#endif
		}
		/* admit.lua, any time later. */
		d_step {
#ifndef FIRST_START_DECIDED_LATE
			blank = blank & (ALL_NODES - (seen_restarted ^ restarted));
#endif
#ifdef VOTES_AT_ONCE
			at_once = true;
#endif
			for (node : 0 .. NODES - 1) {
				if
				:: has(blank, node) && !has(marked, node) ->
					marked = marked | (1 << node); wait_left[node] = (at_once -> 0 : TTL)
				:: else
				fi
			}
			node = 0; blank = 0; silent = 0; at_once = false; seen_restarted = 0
		}
	:: marked == ALL_NODES
	fi;
#else
	marked == ALL_NODES || REPLAYED;
#endif
	if
	:: attempt < ATTEMPTS && _pid < AGAIN -> goto again
	:: else
	fi
}

#ifdef APART
/* A client looks and admits beside its requests. Of a node that restarts meanwhile its connection is cut. */
active [APART] proctype Admission() MOVES(next_owner - 1, false)
{
	byte asked, node, blank, heard, votes, runs, wait;

end:	do
	:: atomic { marked != ALL_NODES || REPLAYED -> asked = ALL_NODES; runs = restarted }
		do
		:: atomic { asked != 0 -> choose(asked, true);
#ifdef OPENED_LATER
				runs = (runs & (ALL_NODES - (1 << node))) | (restarted & (1 << node));
#endif
				if
				:: losses > 0 && !REPLAYED -> losses--
				:: has((runs ^ restarted), node)
				:: !has((runs ^ restarted), node) ->
					heard = heard | (1 << node);
					blank = blank | (!has(marked, node) << node);
					votes = votes + (REPLAYED && has(marked, node) && wait_left[node] == 0);
					EVENT(LOOKED, 1 + _pid, node * 4 + 2 * has(marked, node) - (has(marked, node) && wait_left[node] > 0))
				fi;
				node = 0 }
		:: atomic { asked == 0 || REPLAYED -> break }
		od;
		atomic {
			wait = (heard == ALL_NODES && blank == ALL_NODES -> 0 : 1 + (REPLAYED && votes < NODES - QUORUM + 1));
			asked = blank; heard = 0; blank = 0; votes = 0
		}
		do
		:: atomic { asked != 0 -> choose(asked, true);
				if
				:: !has(marked, node) && !has((runs ^ restarted), node) ->
					marked = marked | (1 << node);
					wait_left[node] = (wait == 0 -> 0 : (wait == 1 -> WAIT : FORGOTTEN));
					EVENT(ADMITTED, 1 + _pid, node * 8 + wait * 2 + 1)
				:: else -> EVENT(ADMITTED, 1 + _pid, node * 8 + wait * 2) skip
				fi;
				node = 0 }
		:: atomic { asked == 0 || REPLAYED -> asked = 0; runs = 0; wait = 0; break }
		od
	od
}
#endif

/* Nodes 1 and 2 restart without their data; each once. */
active proctype Restarts()
{
	byte node;
end:	do
	:: atomic { restarts > 0 && restarted != 6 -> restarts--;
			if
			:: !has(restarted, 1) -> node = 1
			:: !has(restarted, 2) -> node = 2
			fi;
			restarted = restarted | (1 << node);
			marked = marked & (ALL_NODES - (1 << node));
			key[node] = 0; key_left[node] = 0; wait_left[node] = 0;
			EVENT(RESTARTED, 0, node)
			node = 0 }
#ifdef REPLAY
	:: position == 0 && marked == 0 -> marked = ALL_NODES
#endif
	od
}

#define RUNS(c) (since[c] > 0 || left[c] > 0)
#define TRIES(c) (trying[c])
#define NODES_RUN (key_left[0] + key_left[1] + key_left[2] + wait_left[0] + wait_left[1] + wait_left[2] > 0)

active proctype Time()
{
	byte i;
end:	do
	:: d_step { (NODES_RUN || ANY(RUNS)) && (pauses > 0 || !ANY(TRIES)) || REPLAYED ->
		pauses = pauses - (ANY(TRIES) && !REPLAYED);
		TICK
		for (i : 0 .. NODES - 1) {
			take_one(key_left[i]); take_one(wait_left[i]);
			if
			:: key_left[i] == 0 -> key[i] = 0
			:: else
			fi
		}
		for (i : 0 .. CLIENTS - 1) {
			EVENT_IF(left[i] == 1, ENDS, 1 + i, 0)
			take_one(since[i]); take_one(left[i])
		}
		i = 0
	}
	od
}
