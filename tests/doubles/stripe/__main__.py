"""`python -m tests.doubles.stripe --port 0`: serve until interrupted; the first line says where."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from tests.doubles.stripe.server import StripeDouble


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.doubles.stripe", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--api-key", default="sk_test_meterhouse", help="the only key it accepts")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with StripeDouble(api_key=options.api_key, port=options.port) as double:
        sys.stdout.write(f"listening on {double.url}\n")
        sys.stdout.flush()
        stop.wait()


if __name__ == "__main__":
    main()
