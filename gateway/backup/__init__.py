"""Backups: everything durable of one gateway and of what it shares, as one checked folder; and back.

| file | what it knows |
|---|---|
| `manifest.py` | what a whole backup is: the list of its files, their sums, what they hold |
| `files.py` | the data folder's other files, which are copied as they are |
| `take.py` | the order in which the parts are copied beside a gateway that runs |
| `restore.py` | an empty target made of a backup, and its books compared |
"""
