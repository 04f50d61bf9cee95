/* Reads a trace from standard input, an event and its tick on each line, and follows it through a model (common.h). */
#include <stdlib.h>

#define EVENTS_MAX 4096

static struct { int event, tick; } trace[EVENTS_MAX];
static int length = -1, followed;

static void say_followed(void)
{
	printf("followed %d of %d\n", followed, length);
}

static void read_trace(void)
{
	for (length = 0; scanf("%d %d", &trace[length].event, &trace[length].tick) == 2; length++)
		if (length + 1 == EVENTS_MAX)
			abort();
	atexit(say_followed);
}

static int owner_at(int position)
{
	return position < length ? trace[position].event >> 16 & 63 : 0;
}

/* Whether a message that is lost comes late: else it need not be kept. */
static int is_ahead(int position, int event)
{
	for (; position < length; position++)
		if (trace[position].event >> 16 == event)
			return 1;
	return 0;
}

/* Whether an event is the next of its owner that is not of a certain kind. */
static int comes_first(int position, int event, int skipped)
{
	while (position < length && ((trace[position].event >> 16 ^ event) & 63 || trace[position].event >> 22 == skipped))
		position++;
	return position < length && trace[position].event >> 16 == event;
}

/* Spin takes no call in a c_expr for harmless. */
#define GOES_ON (length >= 0 || (read_trace(), now.next_owner = owner_at(0), 1)) && goes_on(now.position, now.ticks, now.strayed)

/* Whether an execution that has come so far may lead to the end of the trace; none need once one has. */
static int goes_on(int position, int tick, int strayed)
{
	return !strayed && followed < length && tick <= trace[position].tick + 1 /* a time between two ticks is either of them */;
}

static int is_next(int position, int event, int tick)
{
	if (position >= length || trace[position].event != event || tick < trace[position].tick)
		return 0;
	if (position + 1 > followed)
		followed = position + 1;
	return 1;
}
