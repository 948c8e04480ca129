"""Sessions: a text that grows from call to call and reuses its KV cache."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

from onward.cache.slot import digest_of
from onward.decoding.pinned_prefix import PinnedPrefix
from onward.errors import RequestError, SessionError
from onward.language_model import session_file
from onward.language_model.completion import Completion, Piece
from onward.language_model.language_model import LanguageModel, Messages
from onward.language_model.options import ChatOptionsDict
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.request import Prompt, one_prompt
from onward.language_model.session_file import SavedSession
from onward.util.text import described


class Session:
    """A language model with the cache of one text, so that the common prefix of successive prompts is processed once.

    Each call takes the whole prompt, as `LanguageModel` does, and returns exactly the tokens of a fresh call. The
    cache is reused up to the first id that differs. So the next turn of a chat costs only its new tokens, and another
    question about the same document only the question. `Completion.cached_tokens` counts the reused positions.

        session = onward.Session(lm)
        first = session.chat(messages)
        messages += [first.message, {"role": "user", "content": "And then?"}]
        second = session.chat(messages)              # processes the new message only
        session.save("talk.safetensors")             # … onward.Session.load("talk.safetensors", lm)

    After an interrupted or abandoned stream the session contains what was processed. A session decodes one text at a
    time, and must not be used by two threads at once. A change of the model's weights clears it.

    lm: the model. notes: your own strings by name, which are saved with the session.
    """

    def __init__(self, lm: LanguageModel) -> None:
        if not isinstance(lm, LanguageModel):
            raise RequestError(f"a session needs a LanguageModel; got {type(lm).__name__}: see onward.load")
        self.lm = lm
        self.notes: dict[str, str] = {}
        self._text = PinnedPrefix(lambda *asked: lm._prefix_cache.lease(*asked))

    def __repr__(self) -> str:
        return described(self, f"{len(self.tokens):,} ids cached", repr(self.lm))

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a session cannot be copied or pickled with its cache: save it to a file, and load it elsewhere"
        )

    @property
    def tokens(self) -> list[int]:
        """The ids in the KV cache: the last prompt and the generated ids, except for the last one, which is not
        processed yet."""
        return self._text.tokens

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Completion:
        """`LanguageModel.generate` for one prompt. Invalid requests do not change the session."""
        return self.lm.generate(one_prompt(prompt, "a session holds one text and"), cache=self._text, **options)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Generator[Piece, None, Completion]:
        """`LanguageModel.stream`. Continuing it after another call has started raises `RequestError`."""
        return self.lm.stream(one_prompt(prompt, "a session holds one text and"), cache=self._text, **options)

    def chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Completion:
        """`LanguageModel.chat` with the whole conversation so far."""
        with_cache: Any = {**options, "cache": self._text}
        return self.lm.chat(messages, **with_cache)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Generator[Piece, None, Completion]:
        """`LanguageModel.stream_chat` with the whole conversation so far."""
        with_cache: Any = {**options, "cache": self._text}
        return self.lm.stream_chat(messages, **with_cache)

    def truncate(self, length: int = 0) -> None:
        """Forget the ids from position `length` on. The cache is not moved or cleared."""
        self._text.truncate(length)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the ids, their keys and values, and the notes to a safetensors file, atomically and readable only by
        its owner. The file is as large as the cache for these positions (see `onward info`). Raises `SessionError` if
        it cannot be written or is not a session, and if the model's cache is not a pytree of tensors."""
        if not self._text.is_of(self.lm.model):  # the cache was filled with other weights
            self.truncate(0)
        digest = digest_of(self._text.adapter) if self._text.tokens else ""
        saved = SavedSession(self._text.tokens, self._text.snapshot, self.notes, digest)
        session_file.save(Path(file), self.lm.model, saved)

    @classmethod
    def load(cls, file: str | os.PathLike[str], lm: LanguageModel) -> Self:
        """Load a session for the same model: the same weights in the same dtype or quantization. If it was computed
        with an adapter, one with the same content must be loaded, under any name.

        Raises:
            SessionError: the file cannot be read, is damaged, is not a session, or is of a newer Onward, another model
                or an adapter that is not loaded.
        """
        saved = session_file.load(Path(file), lm.model)
        adapter = lm.adapters.by_digest(saved.adapter)
        if saved.adapter and adapter is None:
            raise SessionError(
                f"{str(file)!r} was computed with an adapter of digest {saved.adapter}, which this model does not have "
                "loaded: use load_adapter"
            )
        session = cls(lm)
        session.notes = saved.notes
        if saved.snapshot is not None:
            session._text.adopt(lm.model, saved.snapshot, saved.tokens, adapter)
        return session
