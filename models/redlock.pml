/*
 * Redlock: a lease on a majority of three independent nodes, with a token in one round or two.
 *
 * Stands for lockkit/backends/redlock/scripts (acquire.lua, fence.lua, release.lua, undo.lua) and, in backend.py,
 * RedlockBackend._attempt, _write_token and _take_back; Attempts.next_value in votes.py. Restarts are in
 * redlock_restart.pml. Instead of times the clients propose any token: a wrong proposal must cost a second round only.
 *
 * Two clients acquire; the first tries once more if it wins no majority. One message is lost; a release may come late.
 *
 * Run `apart`: each node hears of a release at a time of its own, as in a replay.
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order of grants
 *
 * @run rounds  -DCLIENTS=2 -DLOSSES=0 -DPAUSES=1 -DATTEMPTS=1 -DPROPOSALS
 * @run late    -DCLIENTS=2 -DLOSSES=1 -DPAUSES=1 -DATTEMPTS=2
 * @run apart   -DCLIENTS=2 -DLOSSES=0 -DPAUSES=1 -DATTEMPTS=1 -DPROPOSALS -DAPART
 *
 * @mutant QUORUM=1                   rounds  exclusion  one of three nodes is enough
 * @mutant MARGIN=0                   rounds  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant VALIDITY_FROM_ROUND_TWO    late    exclusion  the deadline counts from the second round
 * @mutant DELETE_WITHOUT_COMPARING   late    exclusion  release.lua and undo.lua delete the key, whoever has it
 * @mutant SAME_VALUE_EACH_ATTEMPT    late    exclusion  a late release of one attempt matches the next one
 * @mutant NO_WRITE_BACK              rounds  tokens     one round: the highest answer is the token, and is not written
 * @mutant WRITE_BACK_BY_MINORITY     late    tokens     one node that has written the token is enough
 *
 * @fact kept   node[3]  key[n] > 0 && (key[n] - 1) % CLIENTS == c
 * @fact last   node[3]  last[n]
 * @fact token  client   token[c]
 * @tell kept+      -
 * @tell Time.kept- -
 * @tell Network.kept- frees the lock of {who}: a late message
 */
#include "common.h"

#define NODES 3
#define ALL_NODES 7
#ifndef QUORUM
#define QUORUM 2
#endif
#ifdef WRITE_BACK_BY_MINORITY
#define WRITTEN_MIN 1
#else
#define WRITTEN_MIN QUORUM
#endif
#ifdef SAME_VALUE_EACH_ATTEMPT
#define value_of(client, attempt) (1 + client)
#else
#define value_of(client, attempt) (1 + client + CLIENTS * attempt)
#endif
#define client_of(value) ((value - 1) % CLIENTS)
#define SHOWN 0
#define count(set) ((set & 1) + ((set >> 1) & 1) + (set >> 2))
#define has(set, node) ((set >> node) & 1)

byte key[NODES], key_left[NODES], last[NODES];
byte since[CLIENTS], left[CLIENTS];
bool trying[CLIENTS];
byte losses = LOSSES, pauses = PAUSES;
byte late_value, late_node, late_token; /* a release or an undo; with a token, of round two */
byte newest_token;
bool exclusion = true, tokens = true;

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

inline acquire_lua()
{
	if
	:: key[node] == 0 ->
		key[node] = value; key_left[node] = TTL;
		yes = yes | (1 << node);
		if
		:: proposed > last[node] -> last[node] = proposed; written = written | (1 << node); token = max(token, proposed)
		:: else -> token = max(token, last[node] + 1)
		fi
		EVENT(ACQUIRED, value, node * 2 + 1)
	:: else -> EVENT(ACQUIRED, value, node * 2) skip
	fi
}

inline fence_lua()
{
	if
	:: key[node] == value -> last[node] = max(last[node], token); written = written | (1 << node); EVENT(WRITTEN, value, node * 2 + 1)
	:: else -> EVENT(WRITTEN, value, node * 2) skip
	fi
}

inline fence_late(on, who, its_token)
{
	if
	:: key[on] == who -> last[on] = max(last[on], its_token); EVENT(WRITTEN, who, on * 2 + 1)
	:: else -> EVENT(WRITTEN, who, on * 2) skip
	fi
}

inline release_lua(on, who)
{
	if
#ifdef DELETE_WITHOUT_COMPARING
	:: key[on] != 0 -> key[on] = 0; key_left[on] = 0
#else
	:: key[on] == who -> key[on] = 0; key_left[on] = 0; EVENT(RELEASED, who, on)
#endif
	:: else
	fi
}

#if defined(APART) || defined(REPLAY)
byte due[64]; /* on which nodes a value has been released, or will be: each message comes at a time of its own */
#endif
#ifdef REPLAY
byte current[CLIENTS], fence_of[64]; /* the token of round two, by value */
#endif

active [CLIENTS] proctype Client() MOVES(client_of(next_owner), left[_pid] > 0)
{
	byte value, attempt, proposed, token, asked, yes, written, voted, node, i;
	bool silent, unused;

again:	atomic {
		if
		:: unused -> attempt = attempt + COUNTED /* no node can have it */
		:: true -> value = value_of(_pid, attempt); attempt++
		fi;
		unused = false;
		trying[_pid] = true; asked = ALL_NODES;
#ifdef REPLAY
		current[_pid] = value;
		start(since[_pid]);
		LOOK_AHEAD(HOLDS, value)
		since[_pid] = (comes -> since[_pid] : 0); /* else it is never compared */
		proposed = (comes -> max(max(last[0], last[1]), last[2]) + 1 : 0);
		LOOK_AHEAD(WRITTEN, value)
		proposed = (comes -> 0 : proposed); /* which a second round has refuted */
#else
		if
		:: proposed = 0
#ifdef PROPOSALS
		:: proposed = 1
		:: proposed = 2
#endif
		fi;
		start(since[_pid]);
#endif
		EVENT(ASKS, value, 0)
	}
	do
	:: atomic { asked != 0 -> choose(asked, _pid == 1 || REPLAYED); voted = voted | (1 << node); acquire_lua(); node = 0 }
	:: atomic { asked != 0 && losses > 0 -> losses = losses - COUNTED; choose(asked, _pid == 1 || REPLAYED); voted = voted | (1 << node);
			if
			:: silent = true; acquire_lua(); yes = yes & (ALL_NODES - (1 << node)); written = written & yes /* no answer */
			:: silent = true
			fi;
			node = 0 }
	:: atomic { asked == 0 -> break }
	od;
	if
	:: atomic { count(yes) < QUORUM -> unused = (yes == 0 && !silent); goto undo }
	:: atomic { count(yes) >= QUORUM && token == proposed && count(written) >= QUORUM -> goto granted }
	:: atomic { count(yes) >= QUORUM && !(token == proposed && count(written) >= QUORUM) ->
			written = 0; asked = yes;
#ifdef REPLAY
			fence_of[value] = token;
#endif
#ifdef NO_WRITE_BACK
			goto granted;
#endif
#ifdef VALIDITY_FROM_ROUND_TWO
			start(since[_pid])
#endif
		}
	fi;
	do
	:: atomic { asked != 0 -> choose(asked, REPLAYED); fence_lua(); node = 0 }
	:: atomic { asked != 0 && losses > 0 -> losses = losses - COUNTED; choose(asked, REPLAYED);
			if
			:: fence_lua(); written = written & (ALL_NODES - (1 << node)) /* no answer */
			:: late_value == 0 && !REPLAYED -> late_value = value; late_node = node; late_token = token
			:: true
			fi;
			node = 0 }
	:: atomic { asked == 0 && count(written) >= WRITTEN_MIN -> goto granted }
	:: atomic { asked == 0 && count(written) < WRITTEN_MIN -> goto undo }
	od;

granted: if
	:: d_step { since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; trying[_pid] = false; attempt = (REPLAYED -> attempt : ATTEMPTS);
			promise(exclusion, COUNT(BELIEVES) <= 1);
			promise(tokens, token > newest_token);
			EVENT(HOLDS, value, token > newest_token)
			newest_token = token }
	:: since[_pid] == 0 -> goto undo
	fi;
	voted = ALL_NODES;
	if
	:: d_step { left[_pid] > 0 -> left[_pid] = 0; EVENT(ENDS, value, 0) } /* released, any time later */
	:: left[_pid] == 0 /* lost */
	fi;

	/* The order of these messages does not matter, but that one may come late. */
undo:	atomic {
		trying[_pid] = false; since[_pid] = 0; token = 0; yes = 0; written = 0; proposed = 0; silent = false;
#if defined(APART) || defined(REPLAY)
		due[value] = (REPLAYED -> ALL_NODES : voted);
#else
		if
		:: losses > 0 && late_value == 0 ->
			losses = losses - COUNTED; asked = voted; choose(asked, true); late_value = value; late_node = node; asked = 0
		:: node = NODES
		fi;
		for (i : 0 .. NODES - 1) {
			if
			:: i != node -> release_lua(i, value)
			:: else
			fi
		}
		i = 0;
#endif
		node = 0; voted = 0
	}
	if
	:: attempt < ATTEMPTS && (_pid == 0 || REPLAYED) -> goto again
	:: else
	fi
}

active proctype Network()
{
#ifdef APART
	byte value, node;
#endif
end:	do
#ifdef REPLAY
	:: d_step { fence_of[next_owner] != 0 -> fence_late(0, next_owner, fence_of[next_owner]) }
	:: d_step { fence_of[next_owner] != 0 -> fence_late(1, next_owner, fence_of[next_owner]) }
	:: d_step { fence_of[next_owner] != 0 -> fence_late(2, next_owner, fence_of[next_owner]) }
	:: d_step { has(due[next_owner], 0) && key[0] == next_owner -> release_lua(0, next_owner) }
	:: d_step { has(due[next_owner], 1) && key[1] == next_owner -> release_lua(1, next_owner) }
	:: d_step { has(due[next_owner], 2) && key[2] == next_owner -> release_lua(2, next_owner) }
#endif
#ifdef APART
	:: atomic { (due[1] | due[2] | due[3] | due[4] | due[5]) != 0 ->
		select (value : 1 .. 5);
		select (node : 0 .. 2);
		if
		:: has(due[value], node) -> due[value] = due[value] & (ALL_NODES - (1 << node)); release_lua(node, value)
		:: else
		fi;
		value = 0; node = 0 }
#endif
	:: d_step { late_value != 0 && late_token == 0 -> release_lua(late_node, late_value); late_value = 0; late_node = 0 }
	:: d_step { late_token != 0 -> fence_late(late_node, late_value, late_token); late_value = 0; late_node = 0; late_token = 0 }
	od
}

#define RUNS(c) (since[c] > 0 || left[c] > 0)
#define TRIES(c) (trying[c])

active proctype Time()
{
	byte i;
end:	do
	:: d_step { (key_left[0] + key_left[1] + key_left[2] > 0 || ANY(RUNS)) && (pauses > 0 || !ANY(TRIES)) || REPLAYED ->
		pauses = pauses - (ANY(TRIES) && !REPLAYED);
		TICK
		for (i : 0 .. NODES - 1) {
			take_one(key_left[i]);
			if
			:: key_left[i] == 0 -> key[i] = 0
			:: else
			fi
		}
		for (i : 0 .. CLIENTS - 1) {
			EVENT_IF(left[i] == 1, ENDS, current[i], 0)
			take_one(since[i]); take_one(left[i])
		}
		i = 0
	}
	od
}
