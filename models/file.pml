/*
 * A lock in a file: the record under its flock, records that are removed, and clients that have ended.
 *
 * Stands for lockkit/backends/file: RecordStore._apply and update (record_store.py), Directory.has_ended and the client's
 * own flocked file (directory.py), and the parts of LockState that decide (lock_state.py); its shares are in shares.pml, a
 * queue with offers in redis.pml. A path leads to a record (an inode): who has opened one that was removed must notice.
 * The flock of a record is held for the steps between read and write.
 *
 * Two clients acquire, the first twice; one crashes; the record is removed twice when it is idle.
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order of grants, also over removed records
 * @promise at_once    no time passes while a dead client holds the lock and another one looks
 * @promise progress   whoever waits gets in, unless it has crashed
 *
 * @run file  -DCLIENTS=2 -DCRASHES=1 -DPAUSES=1 -DREMOVALS=2
 *
 * @mutant WITHOUT_FLOCK           file  exclusion  the record is read and written without its flock
 * @mutant PATH_NOT_CHECKED        file  exclusion  a client uses the record that it has open, removed or not
 * @mutant MARGIN=0                file  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant REMOVED_WHILE_HELD      file  exclusion  the cleaner does not look whether the record is in use
 * @mutant MARKER_WITHOUT_TOKEN    file  tokens     a removed record leaves no token behind
 * @mutant DEAD_HOLDER_BY_TTL      file  at_once    a dead holder is replaced after its ttl only
 * @mutant FLOCK_OUTLIVES_CLIENT   file  progress   the flock of a record stays when its client dies under it
 *
 * @fact kept   record  holder[at_path] == c && ends_in[at_path] > 0
 * @fact waits  client  waits[c]
 * @fact token  client  token[c]
 * @tell waits+       waits
 * @tell kept+        now names {who}
 * @tell kept-        names {who} no more
 * @tell Time.kept-   names {who} no more: its ttl is over
 * @tell Cleaner.kept- -
 * @tell at_path+     is removed: the path leads to a new one
 * @tell Time.at_once- names a dead holder, and the waiter is not woken
 */
#include "common.h"

#define NOBODY 9
#define RECORDS 3

byte at_path;                  /* the record that the path leads to */
byte holder[RECORDS] = NOBODY; /* as the record says */
byte ends_in[RECORDS], token_in[RECORDS];
byte flocked[RECORDS] = NOBODY;
byte marker;                   /* the largest token of the removed records */
bool dead[CLIENTS];            /* its own file is not flocked any more */
byte since[CLIENTS], left[CLIENTS];
bool busy[CLIENTS], waits[CLIENTS];
byte crashes = CRASHES, pauses = PAUSES, removals = REMOVALS;
byte newest_token;
bool exclusion = true, tokens = true, at_once = true;

#define BELIEVES(c) (left[c] > 0)
#define DEAD_HOLDER(r) (holder[r] != NOBODY && dead[holder[r] % CLIENTS])
#ifdef DEAD_HOLDER_BY_TTL
#define FREE(r) (holder[r] == NOBODY)
#else
#define FREE(r) (holder[r] == NOBODY || DEAD_HOLDER(r))
#endif
#ifdef WITHOUT_FLOCK
#define MAY_FLOCK(r) true
#else
#define MAY_FLOCK(r) (flocked[r] == NOBODY)
#endif

active [CLIENTS] proctype Client()
{
	byte record, token, turns = 2 - _pid;
	bool free;

again:	turns--;
try:	atomic { busy[_pid] = true; waits[_pid] = false; start(since[_pid]) }
open:	record = at_path;
	if
	:: atomic { MAY_FLOCK(record) -> flocked[record] = _pid }
	fi;
#ifndef PATH_NOT_CHECKED
	if
	:: record == at_path
	:: atomic { record != at_path -> flocked[record] = NOBODY; goto open }
	fi;
#endif
	free = FREE(record);
	if
	:: atomic { crashes > 0 -> goto crash }
	:: d_step { free ->
			token = max(token_in[record], marker) + 1;
			promise(tokens, token > newest_token); newest_token = token;
			token_in[record] = token; holder[record] = _pid; ends_in[record] = TTL }
	:: atomic { !free -> flocked[record] = NOBODY; since[_pid] = 0; busy[_pid] = false; waits[_pid] = true; goto wait }
	fi;
	atomic {
		if
		:: flocked[record] == _pid -> flocked[record] = NOBODY
		:: else
		fi;
		free = false
	}
	if
	:: d_step { since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; busy[_pid] = false;
			promise(exclusion, COUNT(BELIEVES) <= 1) }
	:: atomic { since[_pid] == 0 -> busy[_pid] = false }
	fi;

	if
	:: atomic { crashes > 0 -> goto crash }
	:: true
	fi;
	/* The release, at the record that it knows; its flock is held within this one step. */
	atomic {
		left[_pid] = 0;
		if
		:: record == at_path && holder[record] == _pid && flocked[record] == NOBODY ->
			holder[record] = NOBODY; ends_in[record] = 0
		:: else /* it ends by its ttl */
		fi
	}
	if
	:: turns > 0 -> goto again
	:: else -> goto over
	fi;

	/* inotify wakes it when the record or the file of the holder's client changes; or the ttl is over. */
wait:	FREE(at_path);
	goto try;

crash:	atomic {
		crashes--; dead[_pid] = true; left[_pid] = 0; since[_pid] = 0; busy[_pid] = false;
#ifndef FLOCK_OUTLIVES_CLIENT
		if
		:: flocked[record] == _pid -> flocked[record] = NOBODY
		:: else
		fi
#endif
	}
over:	skip
}

/* A client that removes idle records, under their flock; the next one to come makes a new record. */
active proctype Cleaner()
{
end:	do
	:: d_step { removals > 0 && flocked[at_path] == NOBODY &&
#ifdef REMOVED_WHILE_HELD
			token_in[at_path] > 0 ->
#else
			token_in[at_path] > 0 && holder[at_path] == NOBODY ->
#endif
			removals--;
#ifndef MARKER_WITHOUT_TOKEN
			marker = max(marker, token_in[at_path]);
#endif
			at_path++ }
	od
}

#define RUNS(c) (since[c] > 0 || left[c] > 0)
#define ACTS(c) (busy[c] || (waits[c] && FREE(at_path)))
#define ANY_WAITS (waits[0] || waits[1])

active proctype Time()
{
	byte i;
end:	do
	:: d_step { (ends_in[0] + ends_in[1] + ends_in[2] > 0 || ANY(RUNS)) && (pauses > 0 || !ANY(ACTS)) ->
		/* A waiter that nothing wakes, although its lock is held by nobody alive. */
		promise(at_once, !ANY_WAITS || ANY(ACTS) || !DEAD_HOLDER(at_path));
		pauses = pauses - ANY(ACTS);
		for (i : 0 .. RECORDS - 1) {
			take_one(ends_in[i]);
			if
			:: ends_in[i] == 0 -> holder[i] = NOBODY
			:: else
			fi
		}
		for (i : 0 .. CLIENTS - 1) { take_one(since[i]); take_one(left[i]) }
		i = 0
	}
	od
}
