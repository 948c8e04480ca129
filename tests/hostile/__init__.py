"""Hostile requests over HTTP, and bodies drawn from the server's own OpenAPI document.

`attacks.py` is the table of requests, `sending.py` has the ways to send one, `program.py` is the server under attack
and `neighbours.py` the other clients, which must not notice. `benchmarks/hostile.py` measures the same table.
"""
