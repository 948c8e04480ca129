"""One contender a file, each a process of its own that answers JSON lines (server.py)."""
