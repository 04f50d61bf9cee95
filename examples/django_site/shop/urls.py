"""URLs."""

from django.urls import path

from shop.views import buy

urlpatterns = [path("seats/<str:seat>/buy", buy)]
