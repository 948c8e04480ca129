"""Bad words: sequences of ids that are never completed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onward.errors import OptionError
from onward.sampling.history import History, Ids
from onward.sampling.transforms.transform import Adjustment, Changes, ban
from onward.util.checks import as_tuple, check_id, plain
from onward.util.options import REPETITION, option


@dataclass(frozen=True, kw_only=True)
class BadWords(Adjustment):
    """bad_words: sequences of ids that are never completed; texts if there is a tokenizer."""

    bad_words: tuple[str | tuple[int, ...], ...] = option(
        (),
        takes=str | Sequence[str | Sequence[int]],
        help="Never generate TEXT.",
        group=REPETITION,
        flag="--bad-word",
    )

    def check(self) -> None:
        self._set("bad_words", tuple(_as_word(word) for word in as_tuple("bad_words", self.bad_words, str)))

    def is_on(self) -> bool:
        return bool(self.bad_words)

    def changes(self, history: History) -> Changes:
        return word_ends(history.ids, [word for word in self.bad_words if not isinstance(word, str)]), 0.0

    def named_ids(self) -> Mapping[str, Iterable[int]]:
        if texts := [word for word in self.bad_words if isinstance(word, str)]:
            raise OptionError("bad_words", f"holds the text {texts[0]!r}: a Sampler has no tokenizer, give its ids")
        return {"bad_words": [token for word in self.bad_words for token in word if isinstance(token, int)]}

    def can_ban(self) -> bool:
        return True

    adjust = staticmethod(ban)


def word_ends(ids: Ids, words: Collection[tuple[int, ...]]) -> Ids:
    """The ids that would complete one of `words`, sequences of ids: int64 [N], each once."""
    last_ids = [word[-1] for word in words if ids[max(0, len(ids) + 1 - len(word)) :].tolist() == list(word[:-1])]
    return np.unique(np.array(last_ids, dtype=np.int64))


def _as_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str) and word:
        return word
    if isinstance(word, str) or not isinstance(word, Iterable):
        raise OptionError("bad_words", f"must be non-empty texts or lists of ids; got {word!r}")
    ids = tuple(plain(token) for token in word)
    if not ids:
        raise OptionError("bad_words", "must be non-empty texts or lists of ids; got an empty list")
    for token in ids:
        check_id("bad_words", token)
    return ids
