"""``python -m lockkit.cli``: the command where its script is not on the PATH."""

from lockkit.cli import main

main()
