"""A model as the loop calls it: through its program, where its forward can be one."""

from functools import partial

from torch import Tensor

from onward.errors import ProgramError, RequestError
from onward.models.model import Cache, Model, run_plain
from onward.program import BACKENDS, Program, Report, TraceError
from onward.program import compile as compile_forward


class ModelRun:
    """Callable as (tokens int32 [B, T], offsets int32 [B], cache, logits_at int64 [B, N] or None) -> (logits, cache).

    compile: "auto" takes the best backend of `onward.compile` and, for a forward that cannot be traced, runs it
        eagerly (`why_eager` says why); a backend by name insists on it; "eager" traces nothing.
    """

    def __init__(self, model: Model, compile: str = "auto") -> None:
        if compile not in BACKENDS:
            raise RequestError(f"compile is one of {', '.join(BACKENDS)}; got {compile!r}")
        self.model = model
        self.compile = compile
        self.why_eager = "" if model.compiles else "the model says that it is not to be compiled"
        self._eager = compile == "eager" or (compile == "auto" and not model.compiles)
        self._program: Program | None = None

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        if not self._eager:
            program = self._prepared(cache, tokens)
            if program is not None:
                return self._run(program, tokens, offsets, cache, logits_at)
        return self.model(tokens, offsets, cache, logits_at)

    def explain(self, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """What runs for [batch, tokens] at `offset`, and where the time goes."""
        cache = self.model.new_cache(batch, padded_length(offset + tokens, self.model))
        if not self._eager:
            program = self._prepared(cache)
            if program is not None:
                return program.explain(cache, batch, tokens, offset)
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

    def _prepared(self, cache: Cache, tokens: Tensor | None = None) -> Program | None:
        if self._program is None:
            batch, length = (1, 1) if tokens is None else tokens.shape
            try:
                self._program = compile_forward(
                    self.model.forward,
                    params=self.model.params,
                    cache=cache,
                    batch=batch,
                    tokens=length,
                    backend=self.compile,  # type: ignore[arg-type]  # checked above
                    selects_logits=self.model.selects_logits,
                )
            except TraceError as error:
                self._refuse(error)
        return self._program

    def _refuse(self, error: ProgramError) -> None:
        if self.compile != "auto":
            raise error
        self.why_eager, self._eager, self._program = str(error), True, None


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
