/*
 * An election: a leader stops before its deadline, and has its grace to stop in.
 *
 * Stands for Tenure (must_stop, stop_at) in lockkit/primitives/election.py and Renewer in lockkit/engine/renewal.py, over
 * an abstract lease; redis.pml and others check that. A leader acts from its grant until it has stopped, which takes up to
 * GRACE ticks after must_stop.
 *
 * Two candidates; the first campaigns twice, and renews twice; one renewal is lost, or its answer is.
 *
 * @promise acting    never do two leaders act, the time in which they stop included
 * @promise terms     the numbers of terms increase
 * @promise final     who was told to stop is never told to go on in the same term
 * @promise progress  a candidate leads once the leaders before it have ended, or are gone
 *
 * @run election  -DCLIENTS=2 -DTTL=4 -DGRACE=1 -DLOSSES=1 -DCRASHES=1 -DPAUSES=1
 *
 * @mutant STOP_AT_DEADLINE       election  acting    must_stop is True from the deadline on: nothing is left to stop in
 * @mutant MARGIN=0               election  acting    the deadline is the whole ttl, however the clocks run
 * @mutant STOP_BY_RENEWALS       election  acting    a leader stops when a renewal is refused, whatever its clock says
 * @mutant STOP_NOT_FINAL         election  final     a renewal that succeeds late lets a stopped leader go on
 * @mutant TERM_REUSED            election  terms     the term begins under the former number
 * @mutant RESIGN_WITHOUT_RELEASE election  progress  a leader that resigns goes on renewing
 *
 * @fact kept     server  holder > 0 && (holder - 1) % CLIENTS == c
 * @fact holds    client  acts[c] && told[c] == 0
 * @fact stopping client  acts[c] && told[c]
 * @fact token    client  term[c]
 * @tell kept+       grants {who} the leadership
 * @tell kept-       frees the leadership of {who}
 * @tell Time.kept-  frees the leadership of {who}: its ttl is over
 * @tell asks+       campaigns
 * @tell holds+      leads
 * @tell holds-      stops
 * @tell stopping-   has stopped
 * @tell Time.holds- must stop
 * @tell acting-     leads although another leader has not stopped
 * @tell terms-      begins term {token}, which is not above the term before
 * @tell final-      is told to go on after it was told to stop
 */
#include "common.h"

#define NOBODY 0
#define client_of(owner) ((owner - 1) % CLIENTS)
#define SHOWN holder

byte holder, key_left, last, newest_term;
byte since[CLIENTS], left[CLIENTS], stopping[CLIENTS];
bool acts[CLIENTS], told[CLIENTS], busy[CLIENTS];
byte losses = LOSSES, crashes = CRASHES, pauses = PAUSES;
bool acting = true, terms = true, final = true;
IN_REPLAY(byte current[CLIENTS];)

/* An interval ends just before its last tick: a leader that was told to stop has stopped when its grace is over. */
#define ACTS(c) (acts[c] && !(told[c] && stopping[c] == 0))
#ifdef STOP_AT_DEADLINE
#define STOP_LEFT 0
#else
#define STOP_LEFT GRACE
#endif

inline renew()
{
	d_step {
		yes = (holder == me);
		if
		:: yes -> key_left = TTL
		:: else
		fi;
		EVENT(RENEWED, me, yes)
	}
}

active [CLIENTS] proctype Candidate() MOVES(client_of(next_owner), left[_pid] > 0)
{
	byte me, turn, renewals, term;
	bool yes;

again:	atomic { NEXT_TURN turn++; me = 1 + _pid + CLIENTS * (turn - 1); renewals = (REPLAYED -> 1 : 2 - _pid) }
wait:	IN_REPLAY(if :: atomic { EVENT(ABANDONED, me, 0) goto again } :: true fi;) /* it gives up */
	atomic { holder == NOBODY || REPLAYED -> busy[_pid] = true; start(since[_pid]); EVENT(ASKS, me, 0) }
	if
	:: d_step { holder == NOBODY ->
			holder = me; key_left = TTL; last++; term = last;
#ifdef TERM_REUSED
			term = 1;
#endif
			promise(terms, term > newest_term); newest_term = term; EVENT(ACQUIRED, me, term) }
	/* It may also be offered to somebody else. */
	:: atomic { holder != NOBODY || REPLAYED -> busy[_pid] = false; since[_pid] = 0; EVENT(ACQUIRED, me, 0) goto wait }
	fi;
	if
	:: d_step { since[_pid] > STOP_LEFT ->
			left[_pid] = since[_pid]; since[_pid] = 0; busy[_pid] = false; acts[_pid] = true;
			promise(acting, COUNT(ACTS) <= 1);
			EVENT(HOLDS, me, 1) }
	:: atomic { since[_pid] <= STOP_LEFT || REPLAYED /* or its caller's time is over */ ->
			since[_pid] = 0; busy[_pid] = false; goto resign }
	fi;

	do
	:: d_step { acts[_pid] && renewals > 0 && since[_pid] == 0 && left[_pid] > 0 -> renewals = renewals - COUNTED };
		atomic { start(since[_pid]); EVENT(RENEWS, me, 0) }
		if
		:: renew()
		:: atomic { losses > 0 -> losses = losses - COUNTED; yes = false }
		:: atomic { losses > 0 -> losses = losses - COUNTED; renew(); yes = false } /* its answer is lost */
		fi;
		d_step {
			if
			:: yes && left[_pid] > 0 -> left[_pid] = max(left[_pid], since[_pid]);
#ifdef STOP_NOT_FINAL
				promise(final, !told[_pid]); told[_pid] = false; stopping[_pid] = 0
#endif
			:: else
			fi;
			since[_pid] = 0; yes = false }
#ifdef REPLAY
	:: !acts[_pid] -> break /* `Time` has noted it, perhaps while a renewal was under way */
#else
	/* must_stop: `Time` has told it. It takes up to its grace to stop. */
	:: atomic { told[_pid] -> acts[_pid] = false; break }
	/* Its work has ended by itself. */
	:: atomic { left[_pid] > 0 -> acts[_pid] = false; break }
#endif
	/* Crashed: it acts no more. */
	:: atomic { crashes > 0 -> crashes--; acts[_pid] = false; told[_pid] = false; stopping[_pid] = 0; left[_pid] = 0;
			EVENT(CRASHED, 1 + _pid, 0) goto over }
	od;

resign:	atomic { told[_pid] = false; stopping[_pid] = 0; left[_pid] = 0; since[_pid] = 0 }
#ifndef RESIGN_WITHOUT_RELEASE
	d_step {
		if
		:: holder == me -> holder = NOBODY; key_left = 0; EVENT(RELEASED, me, 0)
		:: else
		fi
	};
#else
	d_step {
		if
		:: holder == me -> key_left = 0
		:: else
		fi
	};
#endif
	if
	:: (turn == 1 && _pid == 0) || REPLAYED -> goto again
	:: else
	fi;
over:	skip
}

#define RUNS(c) (since[c] > 0 || left[c] > 0)
#define BUSY(c) (busy[c])
#define MUST_STOP_NOW(c) (told[c] && stopping[c] == 0)
#define IS_TO_BE_TOLD(c) (acts[c] && !told[c] && left[c] <= STOP_LEFT)

active proctype Time()
{
	byte c;
end:	do
	KEY_ENDS
#ifdef REPLAY
	:: d_step { next_owner > 0 && IS_TO_BE_TOLD(client_of(next_owner)) -> c = client_of(next_owner);
		told[c] = true; stopping[c] = GRACE; EVENT(STOPS, current[c], 0) c = 0 }
	:: d_step { next_owner > 0 && acts[client_of(next_owner)] -> c = client_of(next_owner);
		acts[c] = false; told[c] = false; left[c] = 0; EVENT(ENDS, current[c], 0) c = 0 }
#endif
	:: d_step { (REPLAYED || ((key_left > 0 || ANY(RUNS)) && (pauses > 0 || !ANY(BUSY)))) && !ANY(MUST_STOP_NOW) &&
			!KEY_IS_OVER && (COUNTED || !ANY(IS_TO_BE_TOLD)) ->
		pauses = pauses - (COUNTED && ANY(BUSY));
		TICK
		if
		:: COUNTED && key_left == 1 -> holder = NOBODY
		:: else
		fi;
		take_one(key_left);
		for (c : 0 .. CLIENTS - 1) {
			take_one(since[c]); take_one(left[c]); take_one(stopping[c]);
			if
#ifdef STOP_BY_RENEWALS
			:: acts[c] && !told[c] && left[c] == 0 && holder != NOBODY -> told[c] = true; stopping[c] = GRACE
#else
			:: COUNTED && acts[c] && !told[c] && left[c] <= STOP_LEFT -> told[c] = true; stopping[c] = GRACE
#endif
			:: else
			fi
		}
		c = 0
	}
	od
}
