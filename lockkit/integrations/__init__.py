"""
Integrations of lockkit with other libraries. Each module needs the library of its name, which an extra installs.

- `lockkit.integrations.logging`: events of locks as records of the standard library's logging.
- `lockkit.integrations.prometheus`: metrics for Prometheus.
- `lockkit.integrations.opentelemetry`: spans and metrics for OpenTelemetry.
- `lockkit.integrations.celery`: tasks under a lock, and several beats of which only one sends.
- `lockkit.integrations.apscheduler`: several schedulers of APScheduler 3, only one of which runs the jobs.
- `lockkit.integrations.dramatiq`: actors under a lock.
- `lockkit.integrations.rq`: jobs under a lock.
- `lockkit.integrations.jobs`: what tasks, actors and jobs share.
- `lockkit.integrations.django`: clients in settings, release on commit, and commands for ``manage.py``.
- `lockkit.integrations.alembic`: one process at a time migrates a database.
- `lockkit.integrations.fastapi`, `.starlette`, `.idempotency`: locks, a leader and idempotency keys for web servers.
"""
