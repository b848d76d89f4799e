"""The mark of a data folder that is being restored: until it is gone nothing in the folder may be believed."""

MARKER = "restoring.json"
