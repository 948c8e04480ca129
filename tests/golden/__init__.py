"""The baseline of every refactoring: bits, programs, streams and statuses of this tree, compared with a recorded tree.

    python -m tests.golden record              # write record/*.json from this tree
    python -m tests.golden check               # compare this tree with record/*.json
    python -m tests.golden definitions OLD     # compare the definition path with the one in the source tree OLD

The native path gives the same bits on one instruction set, so its record is keyed by instruction set. torch's own
kernels vary by processor, so the definition path has no record: two source trees are run on one machine.
"""

from pathlib import Path

HERE = Path(__file__).parent
DEMO = HERE / "demo"
RECORD = HERE / "record"
# The instruction sets with the bits of another one, which has the record (docs/decisions/0025).
BITS = {"avx512vnni": "avx2", "avxvnni": "avx2", "neon": "avx2", "neon_i8mm": "avx2"}
