"""Batches of requests in OpenAI's format: lines through an engine, and over replicas on Ray.

serving.py   one line after another through an engine: what it answers
job.py       chunks of lines over replicas, each served again where its replica dies
results.py   what is answered so far, in shards; in the end the output, whole
replicas.py  replicas as actors of Ray
"""

from onward.batches.job import BatchJob, Progress
from onward.batches.serving import LineServer, fingerprint_of

__all__ = ["BatchJob", "LineServer", "Progress", "fingerprint_of"]
