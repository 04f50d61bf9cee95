/*
 * Leases beside one another: readers and a writer, or permits; and the guard with two marks.
 *
 * Stands for LockState in lockkit/backends/lock_state.py (acquire, _is_next, _fits_beside, _free_slot, _end_shares), as
 * memory and file use it; shares.py of the lock table lets the same LockState decide, and shares.lua follows it. Storage is
 * TokenGuard.accept in lockkit/fencing.py. Each step is atomic: flock, script or mutex. Offers and their ends are in
 * redis.pml; here, a waiter that is next comes at once or is passed over when it gives up.
 *
 * Run `readers`: two readers and a writer. Run `permits`: three clients, two permits. One client crashes.
 *
 * @promise exclusion  no writer is believed beside anybody, nor more than two permits, nor two of one slot
 * @promise fifo       nobody is granted after one that fits no longer than it, but waits since before it
 * @promise tokens     tokens increase in the order of grants
 * @promise stale      storage takes no write that is older than what another lease has read or written
 * @promise readers    storage refuses no lease that is believed
 * @promise progress   whoever waits gets in, unless it has crashed
 *
 * @run readers  -DCLIENTS=3 -DLIMIT=9 -DWRITER=2 -DCRASHES=1 -DPAUSES=1
 * @run permits  -DCLIENTS=3 -DDRIFT=0 -DLIMIT=2 -DWRITER=9 -DCRASHES=1 -DPAUSES=1
 *
 * @mutant MARGIN=0               readers  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant READER_BESIDE_WRITER   readers  exclusion  a reader does not look whether a writer holds the lock
 * @mutant READER_OVERTAKES       readers  fifo       a reader gets in beside readers while a writer waits
 * @mutant TOKEN_BY_COUNT         readers  tokens     the token is the number of those who hold the lock
 * @mutant ONE_MARK               readers  readers    the guard has one mark: reader 7 shuts out reader 6
 * @mutant READS_NOT_MARKED       readers  stale      the guard remembers writes only
 * @mutant ONE_PERMIT_TOO_MANY    permits  exclusion  the limit is compared after the grant
 * @mutant SLOT_BY_COUNT          permits  exclusion  the slot is the number of those who hold a permit
 * @mutant SHARES_WITHOUT_END     readers  progress   the lease of a crashed reader stays
 *
 * @names readers reader, reader 2, writer
 * @storage write_mark read_mark
 * @fact kept   server  share[c]
 * @fact waits  client  queued[c] && since[c] == 0
 * @fact token  client  token[c]
 * @tell waits+       waits
 * @tell write_mark+  writes to storage
 * @tell read_mark+   reads from storage, which remembers its token
 * @tell fifo-        gets in before one that has waited longer
 * @tell readers-     is refused by storage although it holds the lock
 */
#include "common.h"

#define client_of(owner) ((owner - 1) % CLIENTS)
#define NO_SLOT 9
#define SLOTS (WRITER < CLIENTS -> 0 : (slot[0] & 1) + 2 * (slot[1] & 1) + 4 * (slot[2] & 1))
#define HEAD (queue?[0] -> 1 : (queue?[1] -> 2 : (queue?[2] -> 3 : 0)))
#define SHOWN ((((share[0] + 2 * share[1] + 4 * share[2]) * 8 + SLOTS) * 4 + len(queue)) * 4 + HEAD)

byte share_left[CLIENTS], slot[CLIENTS];
bool share[CLIENTS], queued[CLIENTS], busy[CLIENTS];
chan queue = [CLIENTS] of { byte };
byte since[CLIENTS], left[CLIENTS];
byte last, newest_token, write_mark, read_mark;
byte crashes = CRASHES, pauses = PAUSES;
bool exclusion = true, fifo = true, tokens = true, stale = true, readers = true;
IN_REPLAY(byte current[CLIENTS], newest_held; bool believes[CLIENTS];) /* until its end has been noted */

#define writes(c) (c == WRITER)
#define BELIEVES(c) (left[c] > 0)
#define HELD(c) (share[c])
#define SAME_SLOT(a, b) (BELIEVES(a) && BELIEVES(b) && slot[a] == slot[b])
#define HELD_BY_WRITER (WRITER < CLIENTS && share[WRITER % CLIENTS])
#define EXCLUDED (WRITER < CLIENTS && BELIEVES(WRITER % CLIENTS) && COUNT(BELIEVES) > 1)
#define ANY_SAME_SLOT (WRITER >= CLIENTS && (SAME_SLOT(0, 1) || SAME_SLOT(0, 2) || SAME_SLOT(1, 2)))

#define TAKEN(c) (share[c] && slot[c] == slot[_pid] && _pid != c)
#define WRITER_WAITS (WRITER < CLIENTS && queued[WRITER % CLIENTS])
#define FREE_BESIDE (!writes(_pid) && !HELD_BY_WRITER && COUNT(HELD) < LIMIT)

inline fits()
{
#ifdef READER_BESIDE_WRITER
	can = (writes(_pid) -> COUNT(HELD) == 0 : COUNT(HELD) < LIMIT);
#elif defined(ONE_PERMIT_TOO_MANY)
	can = (writes(_pid) -> COUNT(HELD) == 0 : !HELD_BY_WRITER && COUNT(HELD) <= LIMIT);
#else
	can = (writes(_pid) -> COUNT(HELD) == 0 : !HELD_BY_WRITER && COUNT(HELD) < LIMIT);
#endif
}

/* Not if a writer is before it in the queue, or if it does not fit together with all who are. */
inline is_next()
{
	for (i : 1 .. len(queue)) {
		queue?who; queue!who;
		found = (found || who == _pid); ahead = ahead + !found;
		blocked = (blocked || (!found && writes(who)))
	}
	first = (!blocked && (ahead == 0 || (WRITER < CLIENTS -> !writes(_pid) : COUNT(HELD) + ahead < LIMIT)));
	i = 0; who = 0; ahead = 0; found = false; blocked = false
}

inline take()
{
	if
	:: queued[_pid] -> queue??eval(_pid); queued[_pid] = false
	:: else
	fi;
	promise(fifo, first);
	slot[_pid] = 0;
#ifdef SLOT_BY_COUNT
	slot[_pid] = COUNT(HELD);
#else
	do
	:: ANY(TAKEN) -> slot[_pid]++
	:: else -> break
	od;
#endif
	share[_pid] = true; share_left[_pid] = TTL;
	last++; token = last;
#ifdef TOKEN_BY_COUNT
	token = COUNT(HELD);
#endif
	promise(tokens, token > newest_token); newest_token = token
}

active [CLIENTS] proctype Client() MOVES(client_of(next_owner), false)
{
	byte token, i, who, ahead, turns = (_pid == 0 -> 2 : 1);
	bool can, first, accepted, found, blocked;

again:	atomic { turns = turns - COUNTED; NEXT_TURN }
try:	atomic { busy[_pid] = true; start(since[_pid]);
		IN_REPLAY(LOOK_AHEAD(HOLDS, current[_pid]) since[_pid] = (comes -> since[_pid] : 0);) /* else it is never compared */
		EVENT(ASKS, current[_pid], 0) }
	d_step {
		fits();
		is_next();
#ifdef READER_OVERTAKES
		can = (can && (first || !writes(_pid)));
#else
		can = (can && first);
#endif
		if
		:: can -> take()
		:: !can && !queued[_pid] -> queue!_pid; queued[_pid] = true
		:: else
		fi;
		EVENT(ACQUIRED, current[_pid], (can -> token : 0))
	}
	if
	:: d_step { can && since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; busy[_pid] = false;
			promise(exclusion, !EXCLUDED && COUNT(BELIEVES) <= LIMIT && !ANY_SAME_SLOT);
			IN_REPLAY(believes[_pid] = true;) EVENT(HOLDS, current[_pid], token > newest_held)
			IN_REPLAY(newest_held = max(newest_held, token)) }
	:: can && since[_pid] == 0 -> goto release
	:: atomic { !can -> since[_pid] = 0; busy[_pid] = false; goto wait }
	fi;

	/* It writes to storage, once or not at all; perhaps late. */
	if
	:: d_step { writes(_pid) ->
			accepted = (token >= write_mark && token > read_mark);
#ifdef READS_NOT_MARKED
			accepted = (token >= write_mark);
#endif
			promise(readers, accepted || left[_pid] == 0);
			promise(stale, !accepted || (token >= write_mark && token > read_mark));
			write_mark = (accepted -> token : write_mark);
			EVENT(WRITTEN, current[_pid], accepted) }
	:: d_step { !writes(_pid) ->
			accepted = (token >= write_mark);
#ifdef ONE_MARK
			accepted = (token >= write_mark && token >= read_mark);
#endif
			promise(readers, accepted || left[_pid] == 0);
			read_mark = (accepted && token > read_mark -> token : read_mark);
			EVENT(WRITTEN, current[_pid], accepted) }
	:: true
	:: atomic { crashes > 0 -> crashes--; left[_pid] = 0;
			IN_REPLAY(believes[_pid] = false;) EVENT(CRASHED, 1 + _pid, 0) goto over }
	fi;

release:
	IN_REPLAY(if
	:: d_step { believes[_pid] -> believes[_pid] = false; left[_pid] = 0; EVENT(ENDS, current[_pid], 0) }
	:: else
	fi;)
	atomic {
		can = share[_pid];
		left[_pid] = 0; since[_pid] = 0; busy[_pid] = false; share[_pid] = false; share_left[_pid] = 0; slot[_pid] = 0;
		EVENT_IF(can, RELEASED, current[_pid], 0)
		token = 0; can = false; accepted = false; first = false
	}
	if
	:: turns > 0 -> goto again
	:: else -> goto over
	fi;

	/* Woken when it may get in. */
wait:	if
	IN_REPLAY(:: goto try
	:: d_step { queue??eval(_pid); queued[_pid] = false; EVENT(ABANDONED, current[_pid], 0) } -> goto again)
	:: queue?[eval(_pid)] && (COUNT(HELD) == 0 || FREE_BESIDE) -> goto try
	:: FREE_BESIDE && !WRITER_WAITS -> goto try
	/* Its channel is gone, and so is its place. */
	:: atomic { crashes > 0 -> crashes--; queue??eval(_pid); queued[_pid] = false }
	fi;
over:	skip
}

#define RUNS(c) (since[c] > 0 || left[c] > 0 || share_left[c] > 0)
#define ACTS(c) (busy[c])
#define SHARE_IS_OVER(c) (REPLAYED && share[c] && share_left[c] == 0)

active proctype Time()
{
	byte c;
end:	do
	BELIEF_ENDS
#ifdef REPLAY
	:: d_step { next_owner > 0 && SHARE_IS_OVER(client_of(next_owner)) -> c = client_of(next_owner);
		EVENT(EXPIRES, current[c], 0) share[c] = false; slot[c] = 0; c = 0 }
#endif
	:: d_step { (REPLAYED || (ANY(RUNS) && (pauses > 0 || !ANY(ACTS)))) && !ANY(SHARE_IS_OVER) && !ANY(BELIEF_IS_OVER) ->
		pauses = pauses - (COUNTED && ANY(ACTS));
		TICK
		for (c : 0 .. CLIENTS - 1) {
			if
#ifndef SHARES_WITHOUT_END
			:: COUNTED && share_left[c] == 1 -> share[c] = false; slot[c] = 0
#endif
			:: else
			fi;
			take_one(share_left[c]); take_one(since[c]); take_one(left[c])
		}
		c = 0
	}
	od
}
