"""
What joins lockkit to other libraries of an application. Each module needs the library of its name, an extra of lockkit.

- `lockkit.integrations.logging`: events of locks as records of the standard library's logging.
- `lockkit.integrations.prometheus`: metrics for Prometheus.
- `lockkit.integrations.opentelemetry`: spans and metrics for OpenTelemetry.
- `lockkit.integrations.fastapi`, `.starlette`, `.idempotency`: locks, a leader and idempotency keys for web servers.
"""
