"""Tests, with locks of this process: ``python manage.py test``."""

from django.test import TransactionTestCase, override_settings

from lockkit.integrations.django import client
from shop.models import Sale


@override_settings(LOCKKIT={"default": "memory://"})
class BuyTest(TransactionTestCase):
    """Selling seats."""

    def test_seat_is_sold_once(self) -> None:
        """The second customer hears that it is sold, and no lock is left."""
        first = self.client.post("/seats/12A/buy", {"customer": "Ada"})
        second = self.client.post("/seats/12A/buy", {"customer": "Ben"})

        self.assertEqual((first.status_code, second.status_code), (200, 409))
        self.assertEqual(Sale.objects.get().customer, "Ada")
        self.assertFalse(client().lock("seat:12A").locked())
