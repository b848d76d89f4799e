"""The commands of `meterhouse`, a file a noun."""
