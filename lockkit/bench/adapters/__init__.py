"""How lockkit, other libraries and the floors are used: one class each, made in the process that locks."""
