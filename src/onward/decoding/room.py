"""Whether a prompt and its new tokens fit."""

from onward.errors import ContextOverflowError


def check_room(prompt: int, new: int, context: int | None, cache_len: int | None = None) -> None:
    """Raise `ContextOverflowError` unless a prompt and `new` tokens fit the context and the cache."""
    limits = [limit for limit in (context, cache_len) if limit is not None]
    if not limits or prompt + new <= min(limits):
        return
    limit = min(limits)
    holder = "context" if limit == context else "cache"
    if prompt > limit or new == 0:
        raise ContextOverflowError(
            f"the prompt is {prompt} tokens long, but the {holder} holds {limit}: shorten the prompt"
        )
    raise ContextOverflowError(
        f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new}, but the {holder} holds {limit}: "
        f"ask for at most {limit - prompt} new tokens or shorten the prompt"
    )
