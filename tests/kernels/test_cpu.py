"""The CPU forms against the references."""

from tests.kernels.forms import *  # noqa: F403  (the cases are the tests)
