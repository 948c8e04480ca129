"""Programs: a forward as one call a step."""

from onward.program.cuda_graph import CudaGraphs
from onward.program.explain import Missing, Report, Row
from onward.program.program import BACKENDS, Program, compile
from onward.program.trace import TraceError

__all__ = ["BACKENDS", "CudaGraphs", "Missing", "Program", "Report", "Row", "TraceError", "compile"]
