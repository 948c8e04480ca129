"""Programs: a model's forward as one native call (or CUDA graph) a step."""

from onward.program.compiled import Programs
from onward.program.cuda_graph import CudaGraphs
from onward.program.explain import Missing, Report, Row
from onward.program.native import Pick
from onward.program.program import BACKENDS, Program, compile
from onward.program.reuse import programs_of
from onward.program.source_lines import TraceError

__all__ = [
    "BACKENDS",
    "CudaGraphs",
    "Missing",
    "Pick",
    "Program",
    "Programs",
    "Report",
    "Row",
    "TraceError",
    "compile",
    "programs_of",
]
