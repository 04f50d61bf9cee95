/*
 * The lock table of a SQL database: one statement decides, by the database's clock; waiters are notified.
 *
 * Stands for lockkit/backends/sql_table/statements.py: acquire_or_wait, renew, release and reap of
 * PostgresqlStatements; without its notification, MariaDB, MySQL and SQLite, where waiters poll. A statement may be
 * executed late, after its client has given it up.
 *
 * Two clients; the first acquires twice. The row of an idle lock may be removed once (idle_ttl: 1 tick here).
 *
 * @promise exclusion  never two believers
 * @promise tokens     tokens increase in the order of grants, also when the row was removed meanwhile
 * @promise confirmed  a renewal confirms only the newest grant
 * @promise woken      no time passes after a release that left the lock free while all who wait are asleep
 * @promise progress   whoever waits gets in
 *
 * @run table  -DCLIENTS=2 -DLOSSES=1 -DPAUSES=1
 *
 * @mutant READ_THEN_WRITE         table  exclusion  one statement reads the row, another one writes it
 * @mutant MARGIN=0                table  exclusion  the deadline is the whole ttl, however the clocks run
 * @mutant RELEASE_WITHOUT_OWNER   table  exclusion  the release clears the row, whoever has it
 * @mutant TOKEN_WITHOUT_TIME      table  tokens     a new row starts at token 1
 * @mutant RENEWAL_OF_FREE_ROW     table  confirmed  a renewal takes a row that is free
 * @mutant MARK_NOT_CHECKED        table  woken      a waiter sleeps although its mark met a row without an owner
 * @mutant NO_LOOK_AFTER_TTL       table  progress   a waiter waits for its notification only
 *
 * @fact kept   server  owner_now > 0 && row_left > 0 && (owner_now - 1) % CLIENTS == c
 * @fact ttl    server  row_left
 * @fact waits  client  state[c] == WAITING
 * @fact asks   client  state[c] == TRYING && since[c] > 0
 * @fact renews client  state[c] == HOLDING && since[c] > 0
 * @fact token  client  token[c]
 * @tell waits+       waits
 * @tell notified+    is notified
 * @tell removed+     removes the idle row
 */
#include "common.h"

#define NOBODY 0
#define owner_of(client, turn) (1 + client + CLIENTS * turn)

byte owner_now, row_left, last; /* the row: owner, time left, token; 0: no row, or no grant yet */
bool wanted;
byte now, idle_since;
mtype = { TRYING, WAITING, HOLDING, ENDED, RELEASE, RENEW };
mtype state[CLIENTS] = TRYING;
byte since[CLIENTS], left[CLIENTS], look[CLIENTS];
bool notified[CLIENTS], freed, removed;
byte losses = LOSSES, pauses = PAUSES;
mtype late; byte late_owner;
byte newest, newest_token;
bool exclusion = true, tokens = true, confirmed = true, woken = true;

#define BELIEVES(client) (state[client] == HOLDING && left[client] > 0)
#define HELD (owner_now != NOBODY && row_left > 0)

inline write_grant()
{
	/* Above last also without the clock, as several grants may be in one tick; µs in lockkit. */
	token = max(last + 1, now);
#ifdef TOKEN_WITHOUT_TIME
	token = last + 1;
#endif
	promise(tokens, token > newest_token);
	last = token; newest_token = token; newest = owner;
	owner_now = owner; row_left = TTL; wanted = false; freed = false; yes = true
}

/* Statement: free it, if that owner has it. */
inline release_row(who)
{
	if
#ifdef RELEASE_WITHOUT_OWNER
	:: owner_now != NOBODY ->
#else
	:: owner_now == who ->
#endif
		owner_now = NOBODY; row_left = 0; idle_since = now; freed = true;
		if
		:: wanted -> notified[0] = (state[0] == WAITING || state[0] == TRYING);
			notified[1] = (state[1] == WAITING || state[1] == TRYING)
		:: else
		fi
	:: else
	fi
}

inline renew_row(who)
{
	yes = (HELD && owner_now == who);
#ifdef RENEWAL_OF_FREE_ROW
	if
	:: !HELD -> owner_now = who; yes = true
	:: else
	fi;
#endif
	if
	:: yes -> row_left = TTL
	:: else
	fi;
	promise(confirmed, !yes || newest == who)
}

inline lose(kind)
{
	losses > 0 -> losses--;
	if
	:: late == 0 -> late = kind; late_owner = owner
	:: true
	fi
}

active [CLIENTS] proctype Client()
{
	byte owner, token, turn, renewals = 1 - _pid;
	bool yes, busy, marked;

again:	atomic { owner = owner_of(_pid, turn); turn++ }
try:	atomic { state[_pid] = TRYING; look[_pid] = 0; notified[_pid] = false; yes = false; start(since[_pid]) }
#ifdef READ_THEN_WRITE
	busy = HELD;
	if
	:: d_step { !busy -> write_grant() }
	:: d_step { busy -> wanted = true; state[_pid] = WAITING; look[_pid] = row_left; since[_pid] = 0 }
	fi;
#else
	/* What it reads, and, if that is held, the mark: the row may have changed between the two. */
	if
	:: d_step { !HELD -> write_grant() }
	:: d_step { HELD -> busy = true; look[_pid] = row_left };
		if
		:: d_step { owner_now != NOBODY || look[_pid] == 0 -> wanted = true;
				state[_pid] = WAITING; since[_pid] = 0; busy = false }
		:: d_step { owner_now == NOBODY -> busy = false;
#ifdef MARK_NOT_CHECKED
				state[_pid] = WAITING; since[_pid] = 0 }
#else
				look[_pid] = 0; since[_pid] = 0 } -> goto try
#endif
		fi
	fi;
#endif
	if
#ifdef NO_LOOK_AFTER_TTL
	:: !yes && notified[_pid] -> goto try
#else
	:: !yes && (notified[_pid] || look[_pid] == 0) -> goto try
#endif
	:: d_step { yes && since[_pid] > 0 ->
			left[_pid] = since[_pid]; since[_pid] = 0; state[_pid] = HOLDING;
			promise(exclusion, COUNT(BELIEVES) <= 1) }
	:: yes && since[_pid] == 0 -> goto ended
	fi;

	do
	:: d_step { left[_pid] > 0 && renewals > 0 -> renewals-- };
		start(since[_pid]);
		if
		:: d_step { renew_row(owner) };
			d_step { left[_pid] = (left[_pid] > 0 && yes -> max(left[_pid], since[_pid]) : 0);
				since[_pid] = 0;
				promise(exclusion, COUNT(BELIEVES) <= 1) }
		:: atomic { lose(RENEW); since[_pid] = 0 }
		fi
	:: break /* released, or lost */
	od;

ended:	atomic { state[_pid] = ENDED; left[_pid] = 0; since[_pid] = 0; look[_pid] = 0; yes = false };
	if
	:: d_step { release_row(owner) }
	:: atomic { lose(RELEASE) }
	fi;
	if
	:: turn == 1 && _pid == 0 -> goto again
	:: else
	fi
}

active proctype Network()
{
	bool yes;
end:	do
	:: d_step { late == RELEASE -> release_row(late_owner); late = 0 }
	:: d_step { late == RENEW -> renew_row(late_owner); late = 0; yes = false }
	/* reap: the row of an idle lock goes when the clock has passed its token. */
	:: d_step { !removed && !HELD && last > 0 && now > last && now > idle_since ->
			removed = true; last = 0; owner_now = NOBODY; wanted = false }
	od
}

#define RUNS(c) (since[c] > 0 || left[c] > 0 || look[c] > 0)
#define WAITS(c) (state[c] == WAITING)
#define LOOKS(c) (state[c] == TRYING || (WAITS(c) && (notified[c] || look[c] == 0)))

active proctype Time()
{
	byte c;
end:	do
	:: d_step { (row_left > 0 || ANY(RUNS)) && (pauses > 0 || !ANY(LOOKS)) ->
		promise(woken, !freed || !ANY(WAITS) || ANY(LOOKS));
		pauses = pauses - ANY(LOOKS);
		take_one(row_left);
		for (c : 0 .. CLIENTS - 1) { take_one(since[c]); take_one(left[c]); take_one(look[c]) }
		c = 0; now++
	}
	od
}
