"""How lockkit, other libraries and the baselines are used: one class each, made in the process that locks."""
