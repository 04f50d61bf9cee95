"""Make the table of sales."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Its first form."""

    initial = True
    operations = [
        migrations.CreateModel(
            "Sale",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("seat", models.CharField(max_length=10)),
                ("customer", models.CharField(max_length=40)),
                ("token", models.BigIntegerField()),
            ],
        )
    ]
