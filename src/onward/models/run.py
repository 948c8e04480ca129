"""A model for the decoding loop: compiled if its forward can be traced, else eager."""

import os
import sys
from functools import cache, partial

import torch

from onward import native
from onward.cache import AdaptedCache
from onward.errors import OptionError, RequestError, warn_once
from onward.models.contract import SelectingForward
from onward.models.model import Cache, Model
from onward.program import (
    BACKENDS,
    ForwardBatch,
    Program,
    ProgramCache,
    Report,
    SamplingKernel,
    StepResult,
    TraceError,
    programs_of,
    read_eagerly,
)
from onward.program import compile as compile_forward
from onward.util.process import call_in_forks


class Run:
    """An `Executable` of a model.

    compile: "auto" uses the best backend of `onward.compile`, and runs a forward that cannot be traced eagerly
        (`why_eager` says why). The name of a backend requires it. "eager" traces nothing.
    programs: of an earlier `Run` of the same forward and params.
    adapted: runs batches with adapters: the same model with updates beside its weights; None without adapters.
    """

    def __init__(self, model: Model, compile: str = "auto", programs: ProgramCache | None = None) -> None:
        if not isinstance(model, Model):
            raise RequestError(
                f"a model is an onward.Model; got {type(model).__name__}: onward.load reads a checkpoint, and "
                "onward.Model.from_module takes a module"
            )
        check_backend(compile)
        _limit_threads_in_forks()
        self.model = model
        self.compile = compile
        self.adapted: Run | None = None
        self._programs = ProgramCache() if programs is None else programs
        self.why_eager = self._programs.refused if model.compiles else model.why_eager
        self._eager = compile == "eager" or (compile == "auto" and bool(self.why_eager))
        self._program: Program | None = None
        if compile == "auto" and model.compiles and model.device.type == "cpu":
            _warn_without_kernels()

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        """See `onward.program.Executable`."""
        if sampler is None:  # otherwise all rows decode, after a step with their prompts
            self.model.refresh()
        with self.model.weights_lock.reading():
            return self._step(batch, sampler)

    def _step(self, batch: ForwardBatch, sampler: SamplingKernel | None) -> StepResult:
        if self.adapted is not None and isinstance(batch.cache, AdaptedCache):
            if sampler is None:
                self._programs.arena.calls += 1  # rows without an adapter may continue in programs of this run
            return self.adapted.step(batch, sampler)
        if self._eager:
            return self._eagerly(batch)
        try:
            return self._compiled(batch.cache).executable.step(batch, sampler)
        except TraceError as error:  # another shape of tokens may take another path
            if self.compile != "auto":
                raise
            result = self._eagerly(batch)  # errors of the forward itself are raised before any warning
            self._refuse(error)
            return result

    @torch.no_grad()
    def _eagerly(self, batch: ForwardBatch) -> StepResult:
        if batch.taps:
            return read_eagerly(partial(self.model, *batch[:4]), batch)
        logits, cache = self.model(*batch[:4])
        return StepResult(logits, None, cache)

    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """A report on how [batch, tokens] at `offset` runs, and where the time goes."""
        cache = self.model.new_cache(batch, padded_length(offset + tokens, self.model))
        if not self._eager:
            try:
                return self._compiled(cache).explain(cache, batch, tokens, offset)
            except TraceError as error:
                self._refuse(error)
        return Report("eager", [], [], self.why_eager)

    def _compiled(self, cache: Cache) -> Program:
        program = self._program  # another thread may reset it at any time
        if program is None:
            program = self._program = compile_forward(
                self.model.forward,
                params=self.model.params,
                cache=cache,
                tokens=0,  # each shape is traced when it first occurs
                backend=self.compile,  # type: ignore[arg-type]  # checked above
                programs=self._programs,
            )
        return program

    def _refuse(self, error: TraceError) -> None:
        if self.compile != "auto":
            raise error
        self.why_eager = self._programs.refused = str(error)
        self._eager, self._program = True, None
        warn_once(
            f"a forward runs eagerly, which is slower than as a program, since it cannot be traced: {error} "
            '(compile="eager" silences this)'
        )


@cache
def _limit_threads_in_forks() -> None:
    """Make future forked children run torch's operators on one thread.

    A child lacks the threads of torch's OpenMP pool and would wait for them forever. (`DataLoader` does the same to its
    workers.) The native kernels restart their threads themselves.
    """
    call_in_forks(lambda: torch.set_num_threads(1))


def _warn_without_kernels() -> None:
    """Warn if no kernels were built, unless they are disabled or unavailable on the system (Windows)."""
    if sys.platform != "win32" and os.environ.get("ONWARD_OPS") != "definition" and not native.built_isas():
        warn_once(
            f"no native kernels were built when onward was installed (none in {native.library_folder()}), so torch's "
            "operators run: many times slower on a CPU, and with rounding by the number of rows, so that a text may "
            'depend on its batch. Install a C++17 compiler, then onward again (compile="eager" silences this)'
        )


def check_backend(compile: str) -> None:
    if compile not in BACKENDS:
        raise OptionError("compile", f"must be one of {', '.join(BACKENDS)}; got {compile!r}")


def reused_run(model: Model, compile: str = "auto") -> Run:
    """A `Run` for one call, with the programs of earlier calls of the same forward and params. On a GPU "auto" is
    eager: a CUDA graph belongs to one cache, and a single call seldom repays capturing it."""
    if compile == "auto" and model.device.type != "cpu":
        compile = "eager"
    if compile == "eager" or not model.compiles:
        return Run(model, compile)
    forward = model.forward  # programs are freed with the user's own
    own = forward.forward if isinstance(forward, SelectingForward) else forward
    return Run(model, compile, programs_of(own, model.params))


# Cache lengths are rounded up to few values, since each length is another shape to compile. Memory is allocated only
# when it is written.
_MIN_LENGTH = 256


def padded_length(length: int, model: Model) -> int:
    """A cache length for `length` positions: a power of two, within the model's context."""
    if model.device.type != "cpu":
        return length
    padded = max(_MIN_LENGTH, 1 << (length - 1).bit_length())
    return padded if model.max_seq_len is None else max(length, min(padded, model.max_seq_len))
