"""Settings: an SQLite file and locks in files, unless the environment names servers."""

import os
from pathlib import Path
from urllib.parse import urlsplit

DATA = Path(os.environ.get("SHOP_DATA", "."))
SECRET_KEY = "only for this example"  # noqa: S105
DEBUG = False
ALLOWED_HOSTS = ["testserver", "localhost"]
INSTALLED_APPS = ["shop", "lockkit.integrations.django"]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_database = urlsplit(os.environ.get("DATABASE_URL", ""))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _database.hostname,
        "PORT": _database.port,
        "USER": _database.username,
        "NAME": _database.path.lstrip("/"),
        "ATOMIC_REQUESTS": True,
    }
    if _database.scheme
    else {"ENGINE": "django.db.backends.sqlite3", "NAME": DATA / "shop.db", "ATOMIC_REQUESTS": True}
}

LOCKKIT = {"default": os.environ.get("SHOP_LOCKS", f"file://{DATA.absolute()}/locks")}
