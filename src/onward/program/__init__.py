"""Programs: a model's forward as one native call (or CUDA graph) a step."""

from onward.program.compiled import ProgramCache
from onward.program.cuda_graph import CudaGraphExecutable
from onward.program.leaves import NamedDims
from onward.program.program import BACKENDS, Missing, Program, Report, Row, compile
from onward.program.step import Executable, ForwardBatch, SamplingKernel, StepResult, read_eagerly
from onward.program.store import programs_of
from onward.program.trace import TraceError

__all__ = [
    "BACKENDS", "CudaGraphExecutable", "Executable", "ForwardBatch", "Missing", "NamedDims", "Program", "ProgramCache",
    "Report", "Row", "SamplingKernel", "StepResult", "TraceError", "compile", "programs_of", "read_eagerly",
]  # fmt: skip
