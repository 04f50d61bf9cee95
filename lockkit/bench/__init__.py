"""
``lockkit bench``: lock services and lock libraries measured side by side, in one run, as ratios.

======================  ==============================================================================
`subject`, `catalog`    who is measured: lockkit on a URL, other libraries, and floors written by hand
`adapters`              how each of them is used
`workloads`             what is measured, one module each: the part that starts processes, and theirs
`crew`, `worker`        the processes, and what they say to each other
`nurseries`, `nursery`  the processes from which those are forked
`witness`               whether exclusion held, seen from outside every backend
`run`                   rounds, random order, what failed
`report`, `table`       figures and ratios over the rounds; for a person
`command`               the command line
======================  ==============================================================================

What makes the figures fair: every subject runs in a process of its own, all subjects take turns in random order in
every round, and ratios are taken within a round, so that what else the machine does meets all of them alike.
"""
