"""Tables."""

from django.db import models


class Sale(models.Model):
    """A seat that is sold. No constraint: that no seat is sold twice is what the lock is for."""

    seat = models.CharField(max_length=10)
    customer = models.CharField(max_length=40)
    token = models.BigIntegerField()

    def __str__(self) -> str:
        """Show both."""
        return f"{self.seat} for {self.customer}"
