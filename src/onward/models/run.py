"""A model as the loop calls it: through its program, where its forward can be one."""

import os
import sys
from functools import cache, partial

import torch
from torch import Tensor

from onward import native
from onward.errors import ProgramError, RequestError, warn_once
from onward.forks import call_in_forks
from onward.models.model import Cache, Model, run_plain
from onward.program import BACKENDS, Pick, Program, Programs, Report, TraceError, programs_of
from onward.program import compile as compile_forward


class ModelRun:
    """Callable as (tokens int32 [B, T], offsets int32 [B], cache, logits_at int64 [B, N] or None) -> (logits, cache).

    compile: "auto" takes the best backend of `onward.compile` and, for a forward that cannot be traced, runs it
        eagerly (`why_eager` says why); a backend by name insists on it; "eager" traces nothing.
    programs: those of an earlier run of the same forward and params.
    """

    def __init__(self, model: Model, compile: str = "auto", programs: Programs | None = None) -> None:
        check_backend(compile)
        _mind_forks()
        self.model = model
        self.compile = compile
        self._programs = Programs() if programs is None else programs
        self.why_eager = self._programs.refused if model.compiles else "the model says that it is not to be compiled"
        self._eager = compile == "eager" or (compile == "auto" and bool(self.why_eager))
        self._program: Program | None = None
        if compile == "auto" and model.compiles and model.device.type == "cpu":
            _warn_without_kernels()

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        if not self._eager:
            return self._run(self._prepared(cache), tokens, offsets, cache, logits_at)
        return self.model(tokens, offsets, cache, logits_at)

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: Pick, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]:
        """A step of one token a row, with what `pick` finds in its logits (`Program.picked`)."""
        if not self._eager:
            try:
                return self._prepared(cache).picked(tokens, offsets, cache, pick, positions)
            except TraceError as error:
                self._refuse(error)
        logits, cache = self.model(tokens, offsets, cache, None)
        return logits, None, cache

    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """What runs for [batch, tokens] at `offset`, and where the time goes."""
        cache = self.model.new_cache(batch, padded_length(offset + tokens, self.model))
        if not self._eager:
            try:
                return self._prepared(cache).explain(cache, batch, tokens, offset)
            except TraceError as error:
                self._refuse(error)
        return Report("eager", [], [], self.why_eager)

    def _run(
        self, program: Program, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None
    ) -> tuple[Tensor, Cache]:
        try:
            if self.model.selects_logits:
                return program(tokens, offsets, cache, logits_at)
            bound = partial(_without_params, program)
            return run_plain(bound, None, tokens, offsets, cache, logits_at)
        except TraceError as error:  # another shape of tokens than the first, another path through the forward
            self._refuse(error)
            return self.model(tokens, offsets, cache, logits_at)

    def _prepared(self, cache: Cache) -> Program:
        if self._program is None:
            self._program = compile_forward(
                self.model.forward,
                params=self.model.params,
                cache=cache,
                tokens=0,  # the shapes that come are traced as they come
                backend=self.compile,  # type: ignore[arg-type]  # checked above
                selects_logits=self.model.selects_logits,
                programs=self._programs,
            )
        return self._program

    def _refuse(self, error: ProgramError) -> None:
        if self.compile != "auto":
            raise error
        self.why_eager = self._programs.refused = str(error)
        self._eager, self._program = True, None
        warn_once(
            f"a forward runs op by op, slower than as a program, since it cannot be traced: {error} "
            '(compile="eager" silences this)'
        )


@cache
def _mind_forks() -> None:
    """From now on forked children run torch's operators on one thread.

    The threads of torch's OpenMP pool are not in the child, which would wait for them forever. (`DataLoader` does the
    same to its workers.) The team of the native kernels starts anew by itself.
    """
    call_in_forks(lambda: torch.set_num_threads(1))


def _warn_without_kernels() -> None:
    """Where they could be: not where the user chose to do without, nor on a system that they are not written for."""
    if sys.platform != "win32" and os.environ.get("ONWARD_OPS") != "definition" and not native.built_isas():
        warn_once(
            f"no native kernels were built when onward was installed (none in {native.library_folder()}), so torch's "
            "operators run, many times slower on a CPU: install a C++17 compiler, then onward again "
            '(compile="eager" silences this)'
        )


def check_backend(compile: str) -> None:
    if compile not in BACKENDS:
        raise RequestError(f"compile is one of {', '.join(BACKENDS)}; got {compile!r}")


def reused_run(model: Model, compile: str = "auto") -> ModelRun:
    """A `ModelRun` for one call: what calls before it with the same forward and params have made is used again.

    On a GPU "auto" is eager: a CUDA graph belongs to a cache, and one call seldom repays capturing it.
    """
    if compile == "auto" and model.device.type != "cpu":
        compile = "eager"
    compiles = compile != "eager" and model.compiles
    return ModelRun(model, compile, programs_of(model.forward, model.params) if compiles else None)


def _without_params(
    program: Program, tokens: Tensor, offsets: Tensor, cache: Cache, params: None
) -> tuple[Tensor, Cache]:
    return program(tokens, offsets, cache)


# Lengths of caches are rounded up to few, for each is a shape of its own to compile for. Memory is only taken as
# it is written.
_SHORTEST = 256


def padded_length(length: int, model: Model) -> int:
    """A cache length for `length` positions: a power of two, within the model's context."""
    if model.device.type != "cpu":
        return length
    padded = max(_SHORTEST, 1 << (length - 1).bit_length())
    return padded if model.max_seq_len is None else max(length, min(padded, model.max_seq_len))
