/*
 * Once: a piece of work that runs at most once per key.
 *
 * Stands for Once.begin and Attempt in lockkit/primitives/once.py, over a lease and a note of the backend (write_note.lua,
 * read_note.lua): the note is written only by the present holder. The lease is abstract; redis.pml and others check it.
 * A key that is done is read without the lock.
 *
 * Three attempts, whose work may fail; one of them may crash, and one may be paused, anywhere, so that it loses its lease.
 *
 * @promise recorded  at most one run is recorded as done
 * @promise repeats   no run begins after one was recorded
 * @promise by_holder only the holder of the lock writes the note
 * @promise together  two runs are never under way under leases that are believed
 * @promise progress  every attempt ends, unless it crashes
 *
 * @run once  -DCLIENTS=3 -DCRASHES=1 -DPAUSES=2
 *
 * @mutant NO_SECOND_LOOK         once  repeats   who gets the lock after waiting runs without reading the note again
 * @mutant NOTE_WITHOUT_OWNER     once  recorded  the note is written without comparing the owner
 * @mutant RELEASE_BEFORE_NOTE    once  recorded  the lock is released before the note is written, by whoever ran
 * @mutant LATE_NOTE              once  by_holder a note is written by whoever has run
 * @mutant MARGIN=0                once  together  the deadline is the whole ttl, however the clocks run
 * @mutant LOCK_WITHOUT_TTL       once  progress  a crashed run keeps the key for ever
 *
 * @fact kept   server  holder == 1 + c
 * @fact note   server  notes
 * @tell note+      notes for {who} that the work is done
 * @tell running+   begins to run
 * @tell recorded-  has recorded a second run
 * @tell repeats-   runs although a run was recorded
 * @tell by_holder- writes the note although it does not hold the lock
 * @tell together-  runs while another run goes on
 */
#include "common.h"

#define NOBODY 0
#define client_of(owner) ((owner - 1) % CLIENTS)
#define SHOWN (holder * 2 + done)

byte holder, key_left, notes;
bool done;
byte left[CLIENTS], since[CLIENTS];
bool running[CLIENTS], busy[CLIENTS];
byte crashes = CRASHES, pauses = PAUSES;
bool recorded = true, repeats = true, by_holder = true, together = true;

IN_REPLAY(byte current[CLIENTS], last; bool believes[CLIENTS];) /* until its end has been noted */

#define RUNS(c) (running[c] && left[c] > 0)

inline write_note()
{
	if
#if defined(NOTE_WITHOUT_OWNER) || defined(LATE_NOTE)
	:: true ->
#else
	:: holder == me ->
#endif
		promise(by_holder, holder == me);
		notes++; done = true;
		promise(recorded, notes <= 1);
		EVENT(WRITTEN, me, 1)
	:: else -> EVENT(WRITTEN, me, 0) skip
	fi
}

active [CLIENTS] proctype Attempt() MOVES(client_of(next_owner), false)
{
	byte me = _pid + 1;

again:	if
	:: atomic { done -> EVENT(READS, 1 + _pid, 1) goto over }
	:: atomic { !done; EVENT(READS, 1 + _pid, 0) }
	fi;
	IN_REPLAY(asks: atomic { NEXT_TURN me = current[_pid] })
wait:	/* It may also give up, and may have lost its place before, because it missed its offer. */
	IN_REPLAY(if :: atomic { EVENT(ABANDONED, me, 0) goto over } :: goto over :: true fi;)
	atomic { holder == NOBODY || REPLAYED -> busy[_pid] = true; start(since[_pid]); EVENT(ASKS, me, 0) }
	if
#ifdef LOCK_WITHOUT_TTL
	:: d_step { holder == NOBODY -> holder = me }
#else
	:: d_step { holder == NOBODY -> holder = me; key_left = TTL; IN_REPLAY(last++;) EVENT(ACQUIRED, me, last) }
#endif
	/* It may also be offered to somebody else. */
	:: atomic { holder != NOBODY || REPLAYED -> busy[_pid] = false; since[_pid] = 0; EVENT(ACQUIRED, me, 0) goto wait }
	fi;
	if
	:: atomic { since[_pid] > 0 -> left[_pid] = since[_pid]; since[_pid] = 0 }
	:: atomic { since[_pid] == 0 || REPLAYED /* or its caller's time is over */ ->
			since[_pid] = 0; busy[_pid] = false; goto release }
	fi;
#ifndef NO_SECOND_LOOK
	if
	:: atomic { done -> busy[_pid] = false; EVENT(READS, 1 + _pid, 1) goto release }
	:: atomic { !done; EVENT(READS, 1 + _pid, 0) }
	fi;
#endif
	if
	/* The lease is looked at before the work; work that has begun goes on while it is paused. */
	:: d_step { left[_pid] > 0 -> running[_pid] = true; busy[_pid] = false;
			promise(repeats, !done);
			promise(together, COUNT(RUNS) <= 1);
			IN_REPLAY(believes[_pid] = true;) EVENT(HOLDS, me, 1) }
	:: atomic { left[_pid] == 0 -> busy[_pid] = false; goto release }
	IN_REPLAY(:: atomic { left[_pid] == 0 -> busy[_pid] = false; goto over }) /* what is lost is not released */
	:: atomic { crashes > 0 -> crashes--; busy[_pid] = false; left[_pid] = 0; goto over }
	fi;
	if
	:: atomic { crashes > 0 -> crashes--; running[_pid] = false; left[_pid] = 0;
			IN_REPLAY(believes[_pid] = false;) EVENT(CRASHED, 1 + _pid, 0) goto over }
#ifdef RELEASE_BEFORE_NOTE
	:: d_step { holder == me -> holder = NOBODY; key_left = 0 }; d_step { notes++; done = true; promise(recorded, notes <= 1) }
#else
	:: d_step { write_note() }
	:: true /* the work ends in an error */
#endif
	fi;

release: atomic {
		EVENT_IF(believes[_pid], ENDS, me, 0) IN_REPLAY(believes[_pid] = false;)
		running[_pid] = false; left[_pid] = 0
	}
	d_step {
		if
		:: holder == me -> holder = NOBODY; key_left = 0; EVENT(RELEASED, me, 0)
		:: else
		fi
	};
over:	IN_REPLAY(if :: goto again :: goto asks fi;) /* at once, if its answer came too late */
	skip
}

#define TIMED(c) (since[c] > 0 || left[c] > 0)
#define ACTS(c) (busy[c])

active proctype Time()
{
	byte c;
end:	do
	KEY_ENDS
	BELIEF_ENDS
	:: d_step { (REPLAYED || ((key_left > 0 || ANY(TIMED)) && (pauses > 0 || !ANY(ACTS)))) &&
			!KEY_IS_OVER && !ANY(BELIEF_IS_OVER) ->
		pauses = pauses - (COUNTED && ANY(ACTS));
		TICK
		if
		:: COUNTED && key_left == 1 -> holder = NOBODY
		:: else
		fi;
		take_one(key_left);
		for (c : 0 .. CLIENTS - 1) { take_one(since[c]); take_one(left[c]) }
		c = 0
	}
	od
}
