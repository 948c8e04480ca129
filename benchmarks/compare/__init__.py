"""Onward compared with its peers: the same random weights, one machine, one run, in turns.

python -m benchmarks.compare --help

workers/ and models/ run in the peers' own environments, so nothing here imports more than the standard library.
"""
