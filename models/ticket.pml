/*
 * The ticket of a hand-over: one client ends its lease without releasing it, another takes the lock.
 *
 * Stands for lockkit/backends/redis/scripts/take_over.lua (and LockState.take_over, Statements.take_over) and
 * lockkit/engine/ticket.py. The ticket reaches two takers, as a queue does that delivers twice; each asks again once if
 * its answer is lost. A waiter acquires beside them.
 *
 * @promise exclusion  never two believers: the giver, two takers, a waiter
 * @promise tokens     tokens increase in the order of grants
 * @promise once       at most one taker gets the lock by the ticket
 * @promise stale      storage that compares tokens takes no write of a lease that is older than one that wrote
 * @promise progress   the waiter gets in if nobody takes the lock, and when its takers end
 *
 * @run ticket  -DCLIENTS=4 -DLOSSES=1 -DPAUSES=1
 *
 * @mutant OWNER_KEPT             ticket  once       a taker goes on under the owner of the ticket
 * @mutant TOKEN_KEPT             ticket  tokens     a taker goes on under the token of the ticket
 * @mutant GIVER_BELIEVES         ticket  exclusion  the giver's lease does not end with the ticket
 * @mutant TAKEN_WITHOUT_COMPARING ticket exclusion  whoever has the ticket gets the lock, whoever holds it
 * @mutant DEADLINE_FROM_REPEAT   ticket  exclusion  the deadline counts from the request that was answered, not the first
 * @mutant TICKET_WITHOUT_END     ticket  progress   the lock stays held until somebody takes it
 * @mutant GUARD_WITHOUT_COMPARING ticket stale      storage takes every write
 *
 * @names ticket giver, taker, taker 2, waiter
 * @storage mark
 * @fact kept   server  holder == 1 + c
 * @fact token  client  token_of[c]
 * @fact ticket server  handed
 * @fact ttl    server  key_left
 * @tell ticket+   passes the lock on to whoever has the ticket
 * @tell kept-     -
 * @tell once-     takes the lock by a ticket that was used
 */
#include "common.h"

#define GIVER 0
#define TAKER 1   /* and 2 */
#define WAITER 3
#define owner_of(client) (client + 1)
#define client_of(owner) (owner - 1)
#define SHOWN holder
#define BELIEVERS ((left[0] > 0) + (left[1] > 0) + (left[2] > 0) + (left[3] > 0))

byte holder = COUNTED, key_left, last = COUNTED; /* replayed, the giver acquires it */
byte since[CLIENTS], left[CLIENTS], token_of[CLIENTS];
bool busy[CLIENTS];
bool handed;
byte losses = LOSSES, pauses = PAUSES;
byte taken, newest_token = COUNTED, mark;
byte grants = 1, grant_of[CLIENTS], mark_grant;
bool exclusion = true, tokens = true, once = true, stale = true;
IN_REPLAY(bool believes[CLIENTS];) /* until its end has been noted */

inline believe()
{
	left[_pid] = since[_pid]; since[_pid] = 0; busy[_pid] = false;
	promise(exclusion, BELIEVERS <= 1);
	IN_REPLAY(believes[_pid] = true;) EVENT(HOLDS, owner_of(_pid), 1)
}

inline granted_token()
{
	last++; token_of[_pid] = last;
#ifdef TOKEN_KEPT
	if
	:: _pid != WAITER -> last--; token_of[_pid] = last
	:: else
	fi;
#endif
	promise(tokens, token_of[_pid] > newest_token);
	newest_token = token_of[_pid];
	grants++; grant_of[_pid] = grants
}

/* Also after the lease has ended: a client may be paused just before it writes. */
inline write_and_end()
{
	if
	:: d_step {
#ifdef GUARD_WITHOUT_COMPARING
		true ->
#else
		token_of[_pid] >= mark ->
#endif
		promise(stale, grant_of[_pid] >= mark_grant);
		mark = token_of[_pid]; mark_grant = grant_of[_pid]; EVENT(WRITTEN, owner_of(_pid), 1) }
	:: true
#ifdef REPLAY
	:: d_step { token_of[_pid] < mark -> EVENT(WRITTEN, owner_of(_pid), 0) }
	fi;
	if
	:: d_step { believes[_pid] -> believes[_pid] = false; left[_pid] = 0; EVENT(ENDS, owner_of(_pid), 0) };
		if
		:: d_step { holder == owner_of(_pid) -> holder = 0; key_left = 0; EVENT(RELEASED, owner_of(_pid), 0) }
		:: holder != owner_of(_pid)
		fi
	:: !believes[_pid]
#else
	fi;
	if
	:: d_step { left[_pid] > 0 && holder == owner_of(_pid) -> left[_pid] = 0; holder = 0; key_left = 0 }
	:: left[_pid] == 0
#endif
	fi
}

active [CLIENTS] proctype Client() MOVES(client_of(next_owner), false)
{
	bool yes, repeated;

	if
	:: _pid == GIVER -> goto giver
	:: _pid == WAITER -> goto waiter
	:: else -> goto taker
	fi;

	/* It held the lock when all began; lease.ticket() renews once, and sends the ticket. */
giver:
#ifdef REPLAY
	goto waiter;
hands:	if
	/* Its answer comes later. */
	:: d_step { holder == owner_of(GIVER) -> key_left = TTL; EVENT(RENEWED, owner_of(GIVER), 1) }
	:: !believes[GIVER] -> goto lasts
	fi;
#else
	atomic { token_of[GIVER] = 1; grant_of[GIVER] = 1; key_left = TTL; start(left[GIVER]) }
#endif
	if
	:: d_step { holder == owner_of(GIVER) && left[GIVER] > 0 ->
			key_left = (REPLAYED -> key_left : TTL); handed = true;
			IN_REPLAY(believes[GIVER] = false;) EVENT(ENDS, owner_of(GIVER), 0)
#ifdef TICKET_WITHOUT_END
			key_left = 0;
#endif
#ifndef GIVER_BELIEVES
			left[GIVER] = 0
#endif
		}
	:: left[GIVER] == 0
	fi;
lasts:	write_and_end();
	goto over;

taker:	if
	:: handed -> skip
	:: !handed && left[GIVER] == 0 && token_of[GIVER] > 0 -> goto over /* no ticket */
	:: true -> goto over                                               /* the ticket never arrives */
	fi;
	atomic { busy[_pid] = true; start(since[_pid]); EVENT(ASKS, owner_of(_pid), 0) }
again:	if
	:: d_step {
		yes = (holder == owner_of(GIVER) || holder == owner_of(_pid));
#ifdef TAKEN_WITHOUT_COMPARING
		yes = true;
#endif
		if
		:: yes && holder != owner_of(_pid) ->
			granted_token();
			holder = owner_of(_pid); key_left = TTL; taken++;
#ifdef OWNER_KEPT
			holder = owner_of(GIVER);
#endif
			promise(once, taken <= 1)
		:: else
		fi;
		EVENT(ACQUIRED, owner_of(_pid), (yes -> token_of[_pid] : 0)) }
	:: atomic { losses > 0 -> losses = losses - COUNTED; goto lost }
	fi;
	if
	:: d_step { yes && since[_pid] > 0 -> believe() }
	:: d_step { !yes || since[_pid] == 0 -> busy[_pid] = false; since[_pid] = 0 } -> goto over
	:: atomic { losses > 0 -> losses = losses - COUNTED; goto lost }
	fi;
	write_and_end();
	goto over;
lost:	if
	:: atomic { !repeated || REPLAYED -> repeated = true;
#ifdef DEADLINE_FROM_REPEAT
			start(since[_pid]);
#endif
			goto again }
	:: atomic { busy[_pid] = false; since[_pid] = 0; goto over }
	fi;

waiter:	busy[_pid] = false;
	holder == 0 || REPLAYED; /* woken, or the ttl is over */
	atomic { busy[_pid] = true; start(since[_pid]); EVENT(ASKS, owner_of(_pid), 0) }
	if
	:: d_step { holder == 0 ->
			granted_token(); holder = owner_of(_pid); key_left = TTL; EVENT(ACQUIRED, owner_of(_pid), last) }
	:: atomic { holder != 0 -> since[_pid] = 0; EVENT(ACQUIRED, owner_of(_pid), 0) goto waiter }
	fi;
	if
	:: d_step { since[_pid] > 0 -> believe() }
	:: atomic { since[_pid] == 0 -> busy[_pid] = false; goto over }
	fi;
	IN_REPLAY(if :: _pid == GIVER -> goto hands :: else fi;)
	write_and_end();
over:	skip
}

#define RUNNING (key_left + since[0] + since[1] + since[2] + since[3] + left[0] + left[1] + left[2] + left[3] > 0)
#define ANY_BUSY (busy[0] || busy[1] || busy[2] || busy[3])

#define ALL_NOTED (!KEY_IS_OVER && !(BELIEF_IS_OVER(0) || BELIEF_IS_OVER(1) || BELIEF_IS_OVER(2) || BELIEF_IS_OVER(3)))

active proctype Time()
{
	byte c;
end:	do
	KEY_ENDS
	BELIEF_ENDS
	:: d_step { (REPLAYED || (RUNNING && (pauses > 0 || !ANY_BUSY))) && ALL_NOTED ->
		pauses = pauses - (COUNTED && ANY_BUSY);
		TICK
		if
		:: COUNTED && key_left == 1 -> holder = 0
		:: else
		fi;
		take_one(key_left);
		for (c : 0 .. CLIENTS - 1) { take_one(since[c]); take_one(left[c]) }
		c = 0
	}
	od
}
