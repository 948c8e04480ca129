"""Hostile requests over HTTP, and bodies drawn from the server's own OpenAPI document.

`attacks.py` is the table of requests, `sending.py` the ways to send one, `program.py` the server under attack and
`neighbours.py` the other clients that must not feel it. `benchmarks/hostile.py` measures the same table.
"""
