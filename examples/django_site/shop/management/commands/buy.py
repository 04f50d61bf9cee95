"""``manage.py buy SEAT CUSTOMER``: sends one request to the site, in this process."""

import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.test import Client


class Command(BaseCommand):
    """One customer."""

    help = "Buys a seat. Exit status 1 if it is sold."

    def add_arguments(self, parser: Any) -> None:
        """See Django."""
        parser.add_argument("seat")
        parser.add_argument("customer")

    def handle(self, *, seat: str, customer: str, **_: object) -> None:
        """Send the request."""
        response = Client().post(f"/seats/{seat}/buy", {"customer": customer})
        self.stdout.write(response.content.decode())
        sys.exit(int(response.status_code != 200))
