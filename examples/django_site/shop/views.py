"""Views. ATOMIC_REQUESTS has a transaction around each, which ends after the view has returned."""

from django.http import HttpRequest, HttpResponse

from lockkit.integrations.django import client
from shop.models import Sale


def buy(request: HttpRequest, seat: str) -> HttpResponse:
    """Sell a seat, once. The lock is free when the sale has been committed."""
    customer = request.POST["customer"]
    with client().lock(f"seat:{seat}", timeout=60, until_commit=True) as lease:
        if Sale.objects.filter(seat=seat).exists():
            return HttpResponse(f"{seat} is sold", status=409)
        Sale.objects.create(seat=seat, customer=customer, token=lease.token)
    return HttpResponse(f"{seat} for {customer}")
