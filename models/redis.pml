/*
 * A lease on one Redis server, with its queue: waiters, offers, wake-ups, and a fencing token.
 *
 * Stands for lockkit/backends/redis/scripts: acquire.lua, renew.lua, release.lua, abandon.lua, offer.lua,
 * for an exclusive lock; the client is Acquisition (lockkit/engine/acquisition.py), LeaseRecord.set_deadline and
 * Renewer (lockkit/engine/renewal.py).
 *
 * Run `locks`: two clients, of which one acquires twice and renews once; one message is lost or late. Run `queue`: three
 * clients, of which one crashes. Run `loss`: the server loses its data, which ends exclusion (docs/backends/redis.md):
 * tokens are promised. Its restart takes longer than the last token is ahead of its clock, µs in lockkit.
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order of grants
 * @promise confirmed  a renewal confirms only the newest grant
 * @promise woken      no time passes after a release that left the lock free while all who wait are asleep
 * @promise stale      storage that compares tokens takes no write of a lease that is older than one that wrote
 * @promise progress   whoever waits gets in, unless it has crashed
 *
 * @run locks  -DCLIENTS=2 -DTURNS=2 -DRENEWALS=1 -DLOSSES=1 -DCRASHES=0 -DPAUSES=1
 * @run queue  -DCLIENTS=3 -DTURNS=1 -DRENEWALS=0 -DLOSSES=0 -DCRASHES=1 -DPAUSES=1
 * @run loss   -DCLIENTS=2 -DTURNS=2 -DRENEWALS=0 -DLOSSES=0 -DCRASHES=0 -DPAUSES=1 -DLOSS
 *
 * @mutant DELETE_WITHOUT_COMPARING  locks  exclusion  release.lua deletes the key, whoever has it
 * @mutant MARGIN=0                  locks  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant DEADLINE_FROM_ANSWER      locks  exclusion  the deadline counts from the answer, not from before the request
 * @mutant LOST_ANSWER_HANDED_OUT    locks  exclusion  a request without an answer counts as granted
 * @mutant RENEWAL_RESTORES          locks  confirmed  renew.lua creates a key that is not there
 * @mutant RELEASE_WITHOUT_OFFER     queue  woken      release.lua only deletes the key
 * @mutant NO_LOOK_AFTER_TTL         queue  progress   a waiter waits for its wake-up only
 * @mutant TOKEN_WITHOUT_TIME        loss   tokens     the token is the last one plus 1
 * @mutant GUARD_WITHOUT_COMPARING   loss   stale      storage takes every write
 *
 * @storage mark
 * @fact kept    server  holder > 0 && (holder - 1) % CLIENTS == c && offered == 0
 * @fact offered server  holder > 0 && (holder - 1) % CLIENTS == c && offered
 * @fact ttl     server  key_left
 * @fact waits   client  state[c] == WAITING
 * @fact asks    client  state[c] == TRYING && since[c] > 0
 * @fact renews  client  state[c] == HOLDING && since[c] > 0
 * @fact token   client  token[c]
 * @tell waits+          waits
 * @tell offered+        offers the lock to {who}, and wakes it
 * @tell Time.lost_data+ restarts without its data
 */
#include "common.h"

#define GRACE 1
#ifndef LATE
#define LATE 1
#endif
#define owner_of(client, turn) (1 + client + CLIENTS * turn)
#define client_of(owner) ((owner - 1) % CLIENTS)
#define NOBODY 0
#define TURNS_OF(client) (client == 0 || REPLAYED -> TURNS : 1)
#define SHOWN ((holder * 2 + offered) * 8 + len(queue))

byte holder, key_left, last;  /* the key, its expiry, the last token */
bool offered, freed;          /* the key's value is next:OWNER; a release has deleted it */
chan queue = [CLIENTS + 2] of { byte };

mtype = { TRYING, WAITING, HOLDING, DONE, ACQUIRE, RELEASE, RENEW, ABANDON };
mtype state[CLIENTS] = TRYING;
byte since[CLIENTS], left[CLIENTS], look[CLIENTS], current[CLIENTS];
bool woken_up[CLIENTS], deaf[CLIENTS];

byte losses = LOSSES, crashes = CRASHES, pauses = PAUSES;
chan late = [LATE] of { mtype, byte, bool };  /* messages that their senders no longer wait for */
byte newest;                  /* owner of the newest grant */

bool exclusion = true, tokens = true, confirmed = true, woken = true, stale = true;

#ifdef LOSS
byte now, grants, mark; /* mark: of the storage */
byte newest_token, mark_grant; /* the number of the grant that wrote last */
bool lost_data;
#define BELIEVERS 1     /* whose exclusion ends with the data */
#else
#define BELIEVES(client) (state[client] == HOLDING && left[client] > 0)
#define BELIEVERS COUNT(BELIEVES)
#endif

inline notify(owner)
{
	woken_up[client_of(owner)] = COUNTED && (current[client_of(owner)] == owner || woken_up[client_of(owner)])
}

/* offer.lua: `next` is the waiter to whom the lock is offered, or `me`, who takes it now. */
inline offer(me)
{
	next = NOBODY;
	do
	:: next == NOBODY && len(queue) > 0 ->
		queue?entry;
		if
		:: entry == me -> next = entry
		:: entry != me && !deaf[client_of(entry)] ->
			next = entry;
			holder = entry; offered = true; key_left = GRACE;
			notify(entry);
			if
			:: len(queue) > 0 ->
				queue?<entry>;
				look[client_of(entry)] = min(look[client_of(entry)], GRACE)
			:: else
			fi
		:: else
		fi
	:: else -> break
	od
}

inline next_token()
{
#ifdef LOSS
	token = max(last + 1, now);
#ifdef TOKEN_WITHOUT_TIME
	token = last + 1;
#endif
	promise(tokens, token > newest_token);
	newest_token = token;
	grants++; grant = grants;
#else
	token = last + 1;
	newest = owner;
#endif
	last = token
}

inline take()
{
	next_token();
	holder = owner; offered = false; key_left = TTL; granted = true; freed = false
}

inline acquire_lua()
{
	granted = false;
	if
	:: holder == NOBODY ->
		offer(owner);
		if
		:: next == NOBODY || next == owner -> take()
		:: else
		fi
	:: holder == owner -> take() /* the answer was lost, or it is offered */
	:: else
	fi;
	if
	:: granted && queue??[eval(owner)] -> queue??eval(owner)
	:: !granted && enters && !queue??[eval(owner)] -> queue!owner
	:: else
	fi;
	told = key_left;
	EVENT(ACQUIRED, owner, (granted -> token : 0))
}

inline free_or_offer()
{
	holder = NOBODY; offered = false; key_left = 0;
	offer(NOBODY);
	freed = (holder == NOBODY)
}

inline release_lua(who)
{
	if
#ifdef DELETE_WITHOUT_COMPARING
	:: holder != NOBODY && !offered -> free_or_offer()
#elif defined(RELEASE_WITHOUT_OFFER)
	:: holder == who && !offered -> holder = NOBODY; key_left = 0; freed = true
#else
	:: holder == who && !offered -> free_or_offer(); EVENT(RELEASED, who, 0)
#endif
	:: else
	fi
}

inline abandon_lua(who)
{
	if
	:: queue??[eval(who)] || holder == who ->
		if
		:: queue??[eval(who)] -> queue??eval(who)
		:: else
		fi;
		if
		:: holder == who -> free_or_offer()
		:: else
		fi;
		EVENT(ABANDONED, who, 0)
	:: else
	fi
}

inline renew_lua(who)
{
	granted = (holder == who && !offered);
	if
	:: granted -> key_left = TTL
#ifdef RENEWAL_RESTORES
	:: holder == NOBODY -> holder = who; key_left = TTL; granted = true
#endif
	:: else
	fi
#ifndef LOSS
	; promise(confirmed, !granted || newest == who)
#endif
	; EVENT(RENEWED, who, granted)
}

/* The message is lost; or it is on its way, while its sender goes on. */
inline lose(kind, done)
{
	losses > 0 -> losses = losses - COUNTED;
	LOOK_AHEAD(done, owner)
	if
	:: nfull(late) && COMES -> late!kind, owner, enters
	:: true
	fi;
	enters = true
}

active [CLIENTS] proctype Client() MOVES(client_of(next_owner), left[_pid] > 0)
{
	byte owner, token, grant, turn, told, next, entry, renewals = (_pid == 0 || REPLAYED -> RENEWALS : 0);
	bool granted, first = true, enters = true; /* the queue, if it is refused */

again:	atomic {
		owner = owner_of(_pid, turn); turn++;
		current[_pid] = owner
	}
try:	if
	:: atomic { crashes > 0 -> crashes--; goto crash }
	:: atomic {
		state[_pid] = TRYING; woken_up[_pid] = false; look[_pid] = 0;
		start(since[_pid]);
#ifdef REPLAY
		LOOK_AHEAD(HOLDS, owner)
		since[_pid] = (comes -> since[_pid] : 0); /* else it is never compared */
		/* The first request of a client, which has no subscription yet, and a single try do not enter it. */
		if
		:: enters = true
		:: enters = false
		fi;
#endif
		EVENT(ASKS, owner, 0) }
	fi;
	if
	:: d_step { acquire_lua(); next = 0; entry = 0;
			if
			:: !granted -> state[_pid] = WAITING; since[_pid] = 0; look[_pid] = told * COUNTED
			:: else
			fi;
			told = 0; enters = true }
	:: atomic { lose(ACQUIRE, ACQUIRED) -> goto undo }
	:: atomic { crashes > 0 -> crashes--; goto crash }
	fi;
	if
#ifdef NO_LOOK_AFTER_TTL
	:: !granted && woken_up[_pid] -> goto try
#else
	:: !granted && (woken_up[_pid] || look[_pid] == 0 || REPLAYED) -> goto try
#endif
	:: atomic { crashes > 0 -> crashes--; goto crash }
	:: atomic { losses > 0 -> losses = losses - COUNTED; goto undo }
	:: d_step { granted && since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; state[_pid] = HOLDING;
#ifdef DEADLINE_FROM_ANSWER
			left[_pid] = TTL - MARGIN + DRIFT;
#endif
			promise(exclusion, BELIEVERS <= 1);
			EVENT(HOLDS, owner, 1)
		} -> goto held
	:: granted && since[_pid] == 0 -> goto undo
	fi;

undo:	
#ifdef LOST_ANSWER_HANDED_OUT
	if
	:: d_step { since[_pid] > 0 ->
			left[_pid] = since[_pid]; state[_pid] = HOLDING;
			promise(exclusion, BELIEVERS <= 1)
		} -> goto held
	:: else
	fi;
#endif
	atomic { state[_pid] = TRYING; since[_pid] = 0; look[_pid] = 0; granted = false }
	if
	:: d_step { abandon_lua(owner); next = 0; entry = 0 }
	:: atomic { lose(ABANDON, ABANDONED) }
	:: atomic { losses > 0 -> abandon_lua(owner); next = 0; entry = 0; lose(ABANDON, ABANDONED) } /* it is repeated */
	:: atomic { crashes > 0 -> crashes--; goto crash }
	fi;
	if
	:: turn < TURNS_OF(_pid) + LOSSES -> goto again
	:: else -> state[_pid] = DONE; goto over /* the caller's time limit */
	fi;

held:	do
	:: d_step { left[_pid] > 0 && renewals > 0 -> renewals = renewals - COUNTED; granted = false };
		atomic { start(since[_pid]); EVENT(RENEWS, owner, 0) }
		if
		:: d_step { renew_lua(owner) }
		:: atomic { lose(RENEW, RENEWED); goto unanswered }
		fi;
		if
		:: d_step { granted -> left[_pid] = (left[_pid] > 0 -> max(left[_pid], since[_pid]) : 0);
				promise(exclusion, BELIEVERS <= 1) }
		:: d_step { !granted -> EVENT_IF(left[_pid] > 0, ENDS, owner, 0) left[_pid] = 0 }
		:: atomic { losses > 0 -> losses = losses - COUNTED }
		fi;
unanswered:	since[_pid] = 0
	:: d_step { left[_pid] > 0 -> left[_pid] = 0; EVENT(ENDS, owner, 0) } -> break /* the holder releases */
	:: left[_pid] == 0 -> break                          /* the lease is lost: its holder ends, and releases in vain */
	:: atomic { crashes > 0 -> crashes--; goto crash }
#ifdef LOSS
	/* Also when the lease is lost: the client may be paused just before it writes. */
	:: d_step { first -> first = false;
			if
#ifdef GUARD_WITHOUT_COMPARING
			:: true ->
#else
			:: token >= mark ->
#endif
				promise(stale, grant >= mark_grant); mark_grant = grant; mark = token
			:: else
			fi }
#endif
	od;

	atomic { state[_pid] = DONE; current[_pid] = NOBODY; granted = false; left[_pid] = 0 };
	if
	:: d_step { release_lua(owner); next = 0; entry = 0 }
	:: atomic { lose(RELEASE, RELEASED) }
	:: atomic { losses > 0 -> release_lua(owner); next = 0; entry = 0; lose(RELEASE, RELEASED) }
	:: atomic { crashes > 0 -> crashes--; goto crash }
	fi;
	if
	:: turn < TURNS_OF(_pid) -> goto again
	:: else -> goto over
	fi;

	/* The server may notice at once that the connection has gone, or never. */
crash:	atomic {
		if
		:: deaf[_pid] = true
		:: true
		fi;
		EVENT(CRASHED, owner_of(_pid, 0), 0)
		state[_pid] = DONE; left[_pid] = 0; since[_pid] = 0; look[_pid] = 0; current[_pid] = NOBODY; granted = false
	};
over:	skip
}

/* What arrives late, or never. */
active proctype Network()
{
	byte next, entry, owner, token, grant, told;
	bool granted, enters;
end:	do
	:: d_step { late??ACQUIRE, NEXT, enters -> SET_NEXT acquire_lua(); next = 0; entry = 0; token = 0; grant = 0; told = 0; granted = false; owner = 0; enters = false }
	:: d_step { late??RELEASE, NEXT, enters -> SET_NEXT release_lua(owner); next = 0; entry = 0; owner = 0; enters = false }
	:: d_step { late??ABANDON, NEXT, enters -> SET_NEXT abandon_lua(owner); next = 0; entry = 0; owner = 0; enters = false }
	:: d_step { late??RENEW, NEXT, enters -> SET_NEXT renew_lua(owner); granted = false; owner = 0; enters = false }
	:: d_step { !REPLAYED && nempty(late) -> late?_, _, _ }
	od
}

#define RUNS(c) (since[c] > 0 || left[c] > 0 || look[c] > 0)
#define WAITS(c) (state[c] == WAITING)
#define LOOKS(c) (state[c] == TRYING || (WAITS(c) && (woken_up[c] || look[c] == 0)))

active proctype Time()
{
	byte c;
end:	do
	:: d_step { (key_left > 0 || ANY(RUNS) || REPLAYED) && (pauses > 0 || !ANY(LOOKS) || REPLAYED) ->
		pauses = pauses - (ANY(LOOKS) && !REPLAYED);
#ifndef LOSS
		promise(woken, !freed || !ANY(WAITS) || ANY(LOOKS));
#endif
		TICK
		for (c : 0 .. CLIENTS - 1) {
			EVENT_IF(left[c] == 1, ENDS, current[c], 0)
			take_one(since[c]); take_one(left[c]); take_one(look[c])
		}
		c = 0;
		EVENT_IF(key_left == 1, EXPIRES, holder, 0)
		take_one(key_left);
		if
		:: key_left == 0 -> holder = NOBODY; offered = false
		:: else
		fi
#ifdef LOSS
		; now++
#endif
	}
#ifdef LOSS
	/* The server restarts without its data, when its clock has passed the last token. */
	:: d_step { !lost_data && now > last ->
		lost_data = true; holder = NOBODY; offered = false; key_left = 0; last = 0;
		do
		:: len(queue) > 0 -> queue?c
		:: else -> break
		od;
		c = 0
	}
#endif
	od
}
