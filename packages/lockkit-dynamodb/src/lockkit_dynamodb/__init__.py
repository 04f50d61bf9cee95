"""Locks in a DynamoDB table, for lockkit: ``dynamodb:/table?region=eu-central-1``."""

from lockkit_dynamodb.backend import DynamoBackend

__all__ = ["DynamoBackend"]
