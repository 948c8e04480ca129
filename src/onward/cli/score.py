"""`onward score`: how likely a model finds a text."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.flags import AdapterFlags, ModelFlags
from onward.cli.json_output import finite
from onward.cli.loading import load_model
from onward.cli.prompt import parse_ids, read_prompt
from onward.cli.streaming import count
from onward.cli.terminal import waiting


def score(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; '-' or none reads standard input.")
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from FILE.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The text is token ids.")] = False,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", help="For a text longer than the context: windows N tokens apart."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Print a text's perplexity under a model.

    The first token is given: nothing predicts it, and it counts for nothing.
    The log-likelihood is the sum of the others' logprobs, in nats; the
    perplexity is exp of its mean, with the sign turned.

    With --stride N windows as long as the context, each N tokens after the
    one before, score what is new in them: every token once, given at least
    context - N tokens before it. A smaller N is nearer the truth and slower.
    """
    written = read_prompt(text, file)
    prompt = parse_ids(written) if ids else written
    lm = load_model(model, adapting=adapting)
    with waiting("scoring …"):
        score = lm.score(prompt, stride=stride, adapter=adapting.first().get("adapter"))
    assert not isinstance(score, list)
    scored = len(score.token_ids) - 1
    if as_json:
        numbers = {"perplexity": finite(score.perplexity), "log_likelihood": finite(score.log_likelihood)}
        typer.echo(json.dumps(numbers | {"tokens": scored}))
    else:
        typer.echo(
            f"perplexity {score.perplexity:.6g} · log-likelihood {score.log_likelihood:.6g} · {count(scored, 'token')}"
        )
