"""Checks that two models' ids mean the same."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from onward.checkpoint import Tokenizer
from onward.errors import TokenizerError


@runtime_checkable
class TokenTable(Protocol):
    """A tokenizer that can write out its vocabulary."""

    def tokens(self) -> Sequence[str | None]:
        """The token of every id as the vocabulary spells it; None for an id that has none."""
        ...


def check_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise unless every id that both tokenizers have is the same token in both.

    Sizes may differ: an id that only one tokenizer has is a special token of its own, or pads the vocabulary.
    Where a tokenizer cannot write out its vocabulary, the texts of single ids are compared.

    Raises:
        TokenizerError: naming the first id that differs.
    """
    if isinstance(target, TokenTable) and isinstance(draft, TokenTable):
        ours, theirs = target.tokens(), draft.tokens()
    else:
        count = min(target.vocab_size, draft.vocab_size)
        ours, theirs = ([tokenizer.decode([token]) for token in range(count)] for tokenizer in (target, draft))
    for token, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our is not None and their is not None and our != their:
            raise TokenizerError(
                f"the draft model has another vocabulary than the model: id {token} is {their!r} there and {our!r} "
                "here. Take a draft of the same family, or 'lookup' or 'suffix', which need no model"
            )
