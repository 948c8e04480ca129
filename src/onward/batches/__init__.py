"""Batches of requests in OpenAI's format, through an engine of this process or over replicas on Ray.

job.py       chunks of lines over replicas, each served again where its replica dies; an engine is a replica
results.py   the results so far, in journals; in the end the output, whole
replicas.py  replicas as actors of Ray
"""

from onward.batches.job import BatchJob, EngineReplica, Progress, Replica, ReplicaDiedError, fingerprint_of
from onward.batches.line import BatchInput, BatchLine
from onward.batches.results import BatchResults, LineResult

__all__ = [
    "BatchInput",
    "BatchJob",
    "BatchLine",
    "BatchResults",
    "EngineReplica",
    "LineResult",
    "Progress",
    "Replica",
    "ReplicaDiedError",
    "fingerprint_of",
]
