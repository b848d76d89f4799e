"""The crash campaign: gateway, engine and ClickHouse are killed, again and again, under load. See `campaign.py`."""
