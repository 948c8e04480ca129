"""Checks of the lines of a batch before any work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onward.batches import BatchInput, BatchLine
from onward.batches.line import rows_of
from onward.protocols import BodyError
from onward.server.files.records import BatchProblem
from onward.server.models import ServedModels

# Lines of a batch (OpenAI's limit), and problems that are reported.
_MAX_LINES, _MAX_PROBLEMS = 50_000, 100


@dataclass
class CheckedLines:
    """The number of lines, the model that all of them name, and the first problems."""

    count: int = 0
    model: str | None = None
    problems: list[BatchProblem] = field(default_factory=list)


def checked_lines(file: Path, endpoint: str, models: ServedModels, is_over: Callable[[], bool]) -> CheckedLines:
    """Check the lines of a file: that they are valid, and for this endpoint and one model. Bodies are checked when they
    run. is_over: whether nobody needs the result any more."""
    checked = CheckedLines()
    for checked.count, _ in enumerate(rows_of(file), 1):
        if checked.count > _MAX_LINES:  # before all of them are in memory
            message = f"the file has more than {_MAX_LINES:,} lines"
            checked.problems.append(BatchProblem(code="too_many_lines", message=message))
            return checked
    if not checked.count:
        checked.problems.append(BatchProblem(code="empty_file", message="the file has no lines"))
    for line in BatchInput(file).lines():
        if is_over() or len(checked.problems) >= _MAX_PROBLEMS:
            break
        problem = _problem(line, endpoint, models, checked)
        if problem is not None:
            checked.problems.append(problem)
    return checked


def _problem(line: BatchLine, endpoint: str, models: ServedModels, checked: CheckedLines) -> BatchProblem | None:
    """What is wrong with a line. The first valid one determines the model."""
    if line.error is not None:
        return BatchProblem(**{name: line.error[name] for name in ("code", "message", "param", "line")})

    def problem(code: str, param: str, message: str) -> BatchProblem:
        return BatchProblem(code=code, message=f"line {line.number}: {message}", param=param, line=line.number)

    if line.url != endpoint:
        return problem("invalid_url", "url", f"url must be the endpoint of the batch, {endpoint}; got {line.url}")
    try:
        name = models.owner(line.body.get("model") if isinstance(line.body, dict) else None)
    except BodyError as error:
        return problem(error.code, "body.model", str(error))
    checked.model = checked.model or name
    if name != checked.model:
        message = f"all lines must be for one model, {checked.model!r}; got {name!r}"
        return problem("mismatched_model", "body.model", message)
    return None
