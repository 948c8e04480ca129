"""Load a model from the flags, and read the variables of its chat template."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, ModelFlags, TemplateFlags
from onward.cli.inputs import expanded, expanded_source
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError, TokenizerError
from onward.util.text import brief
from onward.util.text_input import TextError, parse_request_json

if TYPE_CHECKING:
    from onward.language_model import LanguageModel

# Names of the variable that turns reasoning on, in chat templates that have one.
_THINKING = ("enable_thinking", "thinking")


def load_model(
    flags: ModelFlags, drafting: DraftFlags | None = None, adapting: AdapterFlags | None = None
) -> "LanguageModel":
    """Call `onward.load` with the flags, and show a progress bar."""
    adapters = {} if adapting is None else adapting.sources()
    draft = None if drafting is None else drafting.draft
    if flags.threads is not None:
        onward.set_num_threads(flags.threads)
        with waiting("starting …"):
            import torch
        torch.set_num_threads(flags.threads)  # for operators that run in torch
    folder = find(flags.model)
    with waiting(f"loading {flags.model} …") as show:
        return onward.load(
            folder,
            dtype=flags.dtype,
            device=flags.device,
            progress=show,
            max_seq_len=flags.max_seq_len,
            quantize=flags.quantize,
            name_map=None if flags.name_map is None else expanded(flags.name_map),
            draft=None if draft is None else expanded_source(draft),
            compile=flags.compile,
            merge=None if flags.merge is None else expanded_source(flags.merge),
            pipeline=flags.pipeline,
            adapters={name: expanded_source(source) for name, source in adapters.items()},
        )


@contextmanager
def importing(needs: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra within the block; raise `RequestError` if one is missing."""
    with waiting("starting …"):
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("onward"):
                raise
            raise RequestError(f"{needs} the package {error.name}: pip install 'onward[{extra}]'") from error


def find(source: str) -> Path:
    """Return the folder of a model source; download it if needed."""
    with waiting("starting …"):
        from onward.checkpoint import find_folder
    # Outside the spinner: the hub client shows its own progress bars.
    return find_folder(expanded_source(source), progress=is_terminal(sys.stderr))


def template_variables(flags: TemplateFlags, lm: "LanguageModel", model: str) -> dict[str, Any]:
    """Return the chat template variables that the flags set. model: its name, for errors.

    Raises:
        TokenizerError: there is no chat template. RequestError: the template does not read a variable.
    """
    if lm.chat_template is None:
        raise TokenizerError(f"{model} has no chat template: use `onward generate` with a plain prompt")
    names = lm.chat_template.variables
    known = f"it reads {', '.join(sorted(names))}" if names else "it reads none"
    variables: dict[str, Any] = {}
    for text in flags.template_option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"--template-option takes NAME=VALUE, such as enable_thinking=false; got {text!r}")
        if name not in names:
            raise RequestError(f"the chat template of {model} has no variable {name!r}: {known}")
        variables[name] = as_json_or_text(name, value)
    if flags.thinking is not None:
        switch = next((name for name in _THINKING if name in names), None)
        if switch is None:
            flag = "--thinking" if flags.thinking else "--no-thinking"
            raise RequestError(f"{flag}: the chat template of {model} has no switch for thinking; {known}")
        variables[switch] = flags.thinking
    return variables


def as_json_or_text(name: str, value: str) -> Any:
    """Parse a value as JSON, or return it as text if it is not JSON.

    Raises:
        RequestError: JSON that is not allowed in requests.
    """
    try:
        return parse_request_json(value)
    except TextError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            return value
        raise RequestError(f"{name} cannot be {brief(value)}: {error}") from error
