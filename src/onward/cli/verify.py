"""`onward verify`: whether this model and build generate the text of a receipt."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.flags import AS_JSON, INPUT, TEXT_FILE, AdapterFlags, ModelFlags, flag
from onward.cli.inputs import load_model, read_prompt, read_text, starting
from onward.cli.terminal import waiting

# Exit codes besides 0 and 2, which is that of errors.
DIFFERENT_TEXT, OTHER_FINGERPRINT = 1, 3


def verify(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="JSON file of a receipt; '-' is standard input.")],
    *,
    prompt: str | None = flag("Prompt, for a receipt without one.", group=INPUT),
    file: Path | None = TEXT_FILE,
    as_json: bool = AS_JSON,
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Check that this model and build generate a text.

    The text is that of a receipt, which generate --receipt writes. One prefill
    computes which token the sampler draws at each position, and the logprobs,
    and compares them with the receipt's.

    Exit codes: 0, the text is verified. 1, another text: the first difference
    and its reason are shown. 3, the same text, but the receipt is of another
    build or model. 2, an error.
    """
    content = read_text(receipt)
    text = None if prompt is None and file is None else read_prompt(prompt, file, example="--prompt TEXT")
    with starting():
        from onward.language_model import Receipt
    read = Receipt.from_json(content)
    lm = load_model(model, adapting=adapting)
    with waiting("verifying …"):
        result = lm.verify(read, text)
    verdict = {"verified": result.is_verified, "same_text": result.is_same_text, "message": str(result)}
    typer.echo(json.dumps({**verdict, **asdict(result)}) if as_json else str(result))
    if not result.is_verified:
        raise typer.Exit(OTHER_FINGERPRINT if result.is_same_text else DIFFERENT_TEXT)
