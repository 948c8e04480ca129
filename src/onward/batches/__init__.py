"""Batches of requests in OpenAI's format, on an engine of this process or replicas on Ray.

job.py      distributes chunks of lines over replicas, and retries them if a replica dies
replica.py  serves lines: an engine, or Ray actors
line.py     reads input lines and formats output lines
results.py  stores results in journals, and finally writes the output
"""

from onward.batches.job import BatchJob, Progress
from onward.batches.line import BatchInput, BatchLine
from onward.batches.replica import EngineReplica, RayReplica, Replica, ReplicaDiedError, fingerprint_of
from onward.batches.results import BatchResults, LineResult

__all__ = [
    "BatchInput",
    "BatchJob",
    "BatchLine",
    "BatchResults",
    "EngineReplica",
    "LineResult",
    "Progress",
    "RayReplica",
    "Replica",
    "ReplicaDiedError",
    "fingerprint_of",
]
