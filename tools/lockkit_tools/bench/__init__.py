"""
``lockkit bench``: lock services and lock libraries measured side by side, in one run, as ratios.

======================  ==============================================================================
`subject`, `catalog`    who is measured: lockkit on a URL, other libraries, and hand-written baselines
`adapters`              how each of them is used
`workloads`             what is measured, one module each: the part that starts processes, and theirs
`worker_pool`, `worker` the processes, and the messages between them
`witness`               whether exclusion held, seen from outside every backend
`run`                   rounds, random order, what failed
`report`, `table`       figures and ratios over the rounds; for a person
`command`               the command line
======================  ==============================================================================

What makes the figures fair: every subject runs in its own process, all subjects take turns in random order in every
round, and ratios are taken within a round, so that other work on the machine affects all of them alike.
"""
