"""Prometheus for the tests of this folder."""

from tests.fixtures.prometheus import prometheus_programs

__all__ = ["prometheus_programs"]
