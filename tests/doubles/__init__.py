"""Servers that act for a third party in the tests, as strict as the real one where we lean on it."""
