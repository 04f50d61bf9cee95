/*
 * Shared by the models of the locks. Not part of lockkit: nothing here runs in production.
 *
 * Time is discrete. A timer is a number of ticks that are left, and the process `Time` of each model takes one from all
 * timers of the model at once, at any moment. Time stands still when no timer runs, so that a model ends: a client that
 * still waits then is a violation of progress.
 *
 * Who has something to do (a message under way, a wake-up, a timer that has run out) does it before the next tick, but for
 * `pauses` ticks in all. Holders, and messages that nobody waits for any more, may take any time.
 *
 * A request and its answer are steps of the client's own process, with the server's step between them; that step is
 * atomic, as a script, a statement or a transaction is at the server. A message is lost at the cost of one of `losses`,
 * and may then still arrive late.
 *
 * Clocks: of a ttl of TTL ticks of the server, a client counts TTL - MARGIN. Its clock may be slow by DRIFT ticks in
 * that time; a fast one only gives up earlier. MARGIN >= DRIFT, as `drift_margin` of lockkit/engine/settings.py.
 *
 * A promise is a variable that is always true: a violated assertion then says its name. `check_NAME` is 1, but 0 where a
 * mutant must break another promise (tests/models/check.py).
 *
 * For the drawings of schedules (tests/models/drawing.py):
 *
 * @fact holds  client  left[c] > 0
 * @fact asks   client  since[c] > 0 && left[c] == 0
 * @fact renews client  since[c] > 0 && left[c] > 0
 * @tell asks+       asks for the lock
 * @tell renews+     renews its lease
 * @tell kept+       grants {who} the lock
 * @tell kept-       frees the lock of {who}
 * @tell Time.kept-  frees the lock of {who}: its ttl is over
 * @tell Network.kept+ grants {who} the lock: a late message
 * @tell Network.kept- frees the lock of {who}: a late message
 * @tell holds+      holds the lock
 * @tell holds-      ends its lease
 * @tell Time.holds- reaches its deadline: its lease ends
 * @tell crashes-    crashes
 * @tell losses-     sends a message that is lost, or late
 * @tell mark+       writes to storage
 * @tell exclusion-  holds the lock although another one does
 * @tell tokens-     gets token {token}, which is not above that of the grant before
 * @tell stale-      writes to storage, which takes the write although a newer lease has written
 * @tell confirmed-  gets its renewal confirmed although its lock was lost
 * @tell Time.woken- stays free although somebody waits, and nobody is woken
 */
#ifndef TTL
#define TTL 2
#endif
#ifndef DRIFT
#define DRIFT 1
#endif
#ifndef MARGIN
#define MARGIN DRIFT
#endif

#define promise(name, fact) name = (!check_##name || (fact)); assert(name)
#define take_one(timer) timer = (timer > 0 -> timer - 1 : 0)
#define max(a, b) (a > b -> a : b)
#define min(a, b) (a < b -> a : b)

/* Of a macro that takes the number of a client. */
#if CLIENTS == 3
#define ANY(is) (is(0) || is(1) || is(2))
#define COUNT(is) (is(0) + is(1) + is(2))
#else
#define ANY(is) (is(0) || is(1))
#define COUNT(is) (is(0) + is(1))
#endif

/* The client's clock is read before a request is sent: from then on it counts down what it may believe in. */
inline start(timer)
{
	if
	:: timer = TTL - MARGIN
	:: timer = TTL - MARGIN + DRIFT /* a slow clock */
	fi
}

/*
 * Replay: is a trace of the code an execution of the model? EVENT marks what can be seen from outside, here with what SHOWN
 * says of the servers. With -DREPLAY each must be the next event of the trace, at that time give or take a tick or two;
 * a client then asks again and time goes on whenever the trace needs it (tests/models/replay.py).
 */
#define ASKS 1
#define ACQUIRED 2
#define HOLDS 3
#define ENDS 4
#define RENEWS 5
#define RENEWED 6
#define RELEASED 7
#define ABANDONED 8
#define EXPIRES 9
#define CRASHED 10
#define WRITTEN 11
#define READS 12
#define STOPS 13
#define RESTARTED 14
#define LOOKED 15
#define ADMITTED 16

#ifdef REPLAY
#define REPLAYED 1
#define COUNTED 0
#define MOVES(next_client, in_time) provided (_pid == next_client || in_time)
#define LOOK_AHEAD(kind, owner) \
	event = kind * 64 + (owner); \
	c_code { now.comes = is_ahead(now.position, now.event); now.event = 0; };
#define COMES comes
#define NEXT eval(next_owner)
#define SET_NEXT owner = next_owner;
#define TICK ticks++;
#define IN_REPLAY(...) __VA_ARGS__
/* What ends in the same tick ends in the order of the trace: as a step of its own, before the next tick. */
#define KEY_IS_OVER (holder != 0 && key_left == 0)
#define BELIEF_IS_OVER(c) (believes[c] && left[c] == 0)
#define KEY_ENDS :: d_step { KEY_IS_OVER -> EVENT(EXPIRES, holder, 0) holder = 0 }
#define BELIEF_ENDS \
	:: d_step { next_owner > 0 && BELIEF_IS_OVER(client_of(next_owner)) -> \
		believes[client_of(next_owner)] = false; EVENT(ENDS, next_owner, 0) }
#define NEXT_TURN /* under a new owner, when it asks */ \
	next_owner == (current[_pid] == 0 -> 1 + _pid : current[_pid] + CLIENTS) -> current[_pid] = next_owner;
#define EVENT(kind, who, value) \
	event = ((kind * 64 + (who)) * 64 + (value)) * 1024 + SHOWN; \
	c_code { now.strayed = !is_next(now.position, now.event, now.ticks); now.position++; now.event = 0; \
		now.next_owner = owner_at(now.position); };
#define EVENT_IF(fact, kind, who, value) \
	if \
	:: fact -> EVENT(kind, who, value) \
	:: else \
	fi;

int event;
short position, ticks;
bool strayed, comes;
byte next_owner;
c_decl { \#include "replay.h" }

never {
	do
	:: c_expr { GOES_ON }
	od
}
#else
#define REPLAYED 0
#define COUNTED 1
#define MOVES(next_client, in_time)
#define LOOK_AHEAD(kind, owner)
#define COMES true
#define NEXT owner
#define SET_NEXT
#define TICK
#define IN_REPLAY(...)
#define KEY_IS_OVER false
#define BELIEF_IS_OVER(c) false
#define KEY_ENDS
#define BELIEF_ENDS
#define NEXT_TURN
#define EVENT(kind, who, value)
#define EVENT_IF(fact, kind, who, value)
#endif
