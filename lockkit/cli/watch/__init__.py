"""
``lockkit watch``: who holds which locks, as it changes.

`looking` asks the backend, `changes` compares what was seen with what was seen before and knows no backend, `table`
draws it, `screen` has the terminal, and `command` is the two loops: the table on a terminal, else lines.
"""
