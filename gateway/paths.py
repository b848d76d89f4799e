"""What a server and its command line must agree on before they speak: addresses, and by what a server is told.

Imports nothing: the command line starts fast.
"""

ADMIN = "/admin/v1"
LIVE = "/health/live"
PRODUCT = "meterhouse"
"""What a live server calls itself, so that nobody sends an admin key to something else."""
