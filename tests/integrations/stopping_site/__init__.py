"""Settings and a management command of a site, for `test_stopping.py`."""

import os

INSTALLED_APPS = ["tests.integrations.stopping_site", "lockkit.integrations.django"]
LOCKKIT = {"default": os.environ["LOCKKIT_TEST_REDIS"]}
