"""
For tests: the kit for code that uses lockkit, the conformance suite of backends, and what it is made of.

- `lockkit.testing.kit`: for tests of the application's own code; a pytest plugin.
- `lockkit.testing.conformance`: the suite, for any backend, from a URL or as a base class.
- `lockkit.testing.target`: which backend to test, as a value that can be sent to another process.
- `lockkit.testing.face_driver`: one test body for threads and for tasks.
- `lockkit.testing.processes`: other processes that hold and wait, to be stopped and killed.
- `lockkit.testing.fork_servers`: where such processes come from without importing anything.
- `lockkit.testing.witness`: tells whether two were inside at once, without asking the backend.
- `lockkit_tools.servers`: throw-away servers on this machine.
"""
