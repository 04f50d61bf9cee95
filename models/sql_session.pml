/*
 * An open session of a database is the lock; the token is in a table beside it.
 *
 * Stands for lockkit/backends/sql_session (backend.py, session.py, row.py) with PostgresqlRowLocking.write_lease: the row
 * is locked in a transaction of its own connection, the lease is written on another one, and only while the session that
 * it names holds the row. The database ends a session that idles for a ttl. A grant that was found in the database's queue
 * may be old, so a statement that the session answers afterwards proves it, and from before that the ttl counts.
 *
 * Three clients acquire once each; one crashes. Storage compares tokens.
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order in which clients begin to believe
 * @promise named      the table names the newest session to which the row was granted, or an older one, never one back
 * @promise stale      storage takes no write of a lease that is older than one that wrote
 * @promise progress   whoever waits gets in, unless it has crashed or lost its session
 *
 * @run session  -DCLIENTS=3 -DCRASHES=1 -DPAUSES=2
 *
 * @mutant MARGIN=0                 session  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant GRANT_WITHOUT_PROOF      session  exclusion  the ttl counts from when the grant was found in the queue
 * @mutant LEASE_WRITTEN_UNCHECKED  session  named      the lease is written whether or not its session still holds the row
 * @mutant TOKEN_IN_TRANSACTION     session  tokens     the token is rolled back with the session that ends
 * @mutant GUARD_WITHOUT_COMPARING  session  stale      storage takes every write
 * @mutant SESSION_WITHOUT_LIMIT    session  progress   the session of a crashed client stays open
 *
 * @storage mark
 * @fact kept   server  holder == c
 * @fact waits  client  since[c] > 0 && holder != c && busy[c] == 0
 * @fact lease  server  last
 * @fact token  client  token[c]
 * @tell waits+      waits in the database's queue
 * @tell lease+      has the lease of {who} with token {token}
 * @tell Time.lease- rolls the token back
 * @tell kept+       gives {who} the row
 * @tell kept-       frees the row of {who}
 * @tell Time.kept-  ends the session of {who}, which frees the row
 * @tell Time.kept+  gives {who} the row
 * @tell named-      writes its lease although a newer session has the row
 */
#include "common.h"

#define NOBODY 9

byte holder = NOBODY;    /* whose session has locked the row */
byte idle_left[CLIENTS]; /* of the session of the holder: until the database ends it */
bool ended[CLIENTS];     /* its session was ended by the database */
chan queue = [CLIENTS] of { byte };
byte last, former;       /* the token in the table; the one before it */
byte grants, grant_of[CLIENTS], named_grant, mark, mark_grant, newest_token;
byte since[CLIENTS], left[CLIENTS];
bool busy[CLIENTS];
byte crashes = CRASHES, pauses = PAUSES;
bool exclusion = true, tokens = true, named = true, stale = true;

#define BELIEVES(c) (left[c] > 0)

/* The database gives the row to the next in its queue. */
inline free_row()
{
	holder = NOBODY;
	if
	:: len(queue) > 0 -> queue?holder; grants++; grant_of[holder] = grants; idle_left[holder] = TTL; busy[holder] = true
	:: len(queue) == 0
	fi
}

active [CLIENTS] proctype Client()
{
	byte token;
	bool yes;

	atomic { busy[_pid] = true; start(since[_pid]) }
	d_step {
		if
		:: holder == NOBODY -> holder = _pid; grants++; grant_of[_pid] = grants; idle_left[_pid] = TTL
		:: else -> queue!_pid; busy[_pid] = false
		fi
	}
	if
	:: holder == _pid || ended[_pid] -> skip
	:: atomic { crashes > 0 -> crashes--; goto crash }
	fi;

	/* The proof, unless the row was free: it was answered, so it began after the look. */
	busy[_pid] = true;
#ifdef GRANT_WITHOUT_PROOF
	start(since[_pid]);
#else
	start(since[_pid]);
	if
	:: d_step { !ended[_pid] && holder == _pid -> idle_left[_pid] = TTL }
	:: ended[_pid] -> goto lost
	fi;
#endif

	/* The lease is written on another connection. */
	d_step {
		yes = (holder == _pid && !ended[_pid]);
#ifdef LEASE_WRITTEN_UNCHECKED
		yes = true;
#endif
		if
		:: yes ->
			former = last; last++; token = last;
			promise(named, grant_of[_pid] >= named_grant);
			named_grant = grant_of[_pid]
		:: else
		fi
	}
	if
	:: d_step { yes && since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; busy[_pid] = false;
			promise(exclusion, COUNT(BELIEVES) <= 1);
			promise(tokens, token > newest_token); newest_token = token }
	:: !yes || since[_pid] == 0 -> goto lost
	fi;

	/* It writes to storage, perhaps late. */
	if
#ifdef GUARD_WITHOUT_COMPARING
	:: d_step { promise(stale, grant_of[_pid] >= mark_grant); mark = token; mark_grant = grant_of[_pid] }
#else
	:: d_step { token >= mark -> promise(stale, grant_of[_pid] >= mark_grant); mark = token; mark_grant = grant_of[_pid] }
#endif
	:: true
	:: atomic { crashes > 0 -> crashes--; goto crash }
	fi;

	/* COMMIT, or the end of the session. */
lost:	atomic {
		left[_pid] = 0; since[_pid] = 0; busy[_pid] = false; idle_left[_pid] = 0;
		if
		:: holder == _pid -> free_row()
		:: holder != _pid
		fi
	}
	goto over;

	/* The client stands still for good; its session stays open until the database ends it. */
crash:	atomic { left[_pid] = 0; since[_pid] = 0; busy[_pid] = false }
	holder == _pid || ended[_pid];
	busy[_pid] = false;
over:	skip
}

#define RUNS(c) (since[c] > 0 || left[c] > 0 || idle_left[c] > 0)
#define ACTS(c) (busy[c])

active proctype Time()
{
	byte c;
end:	do
	:: d_step { ANY(RUNS) && (pauses > 0 || !ANY(ACTS)) ->
		pauses = pauses - ANY(ACTS);
		for (c : 0 .. CLIENTS - 1) { take_one(idle_left[c]); take_one(since[c]); take_one(left[c]) }
#ifndef SESSION_WITHOUT_LIMIT
		if
		:: holder != NOBODY && idle_left[holder % CLIENTS] == 0 ->
			ended[holder % CLIENTS] = true;
#ifdef TOKEN_IN_TRANSACTION
			last = former;
#endif
			free_row()
		:: else
		fi;
#endif
		c = 0
	}
	od
}
