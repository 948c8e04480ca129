"""`python -m onward.distributed RANK WORLD ADDRESS`: a rank started by rank 0 on the same host."""

import sys

from onward.distributed.launchers import end_with_parent
from onward.distributed.ranks import run_rank

if __name__ == "__main__":
    end_with_parent()
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
