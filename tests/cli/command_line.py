"""The arguments and the results of a command line."""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

# The program as its own process, from whatever environment runs the tests; one thread is enough for it.
PROGRAM = [sys.executable, "-c", "from onward.cli.main import main; main()"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]
