"""Onward's engine compared with those of its peers, while requests come and go.

python -m benchmarks.serve --help

workload.py and workers/ run in the peers' own environments: they import the standard library, and each worker its peer.
"""
