"""What an engine computes, in a few digits: a text of its own is made, and its bits are hashed.

A fingerprint says what the bits depend on. A probe says what they are: weights that were damaged on their way into
memory, or a library that is not what its file says, show here.
"""

import hashlib
import struct

from onward.engine.engine import Engine

# The ids of the prompt, and those that follow.
_ASKED, _MADE = 32, 8
# Spreads the ids of the prompt over a vocabulary (Knuth's multiplicative hashing).
_SPREAD = 2_654_435_761


def probe(engine: Engine) -> str:
    """8 hexadecimal digits of the ids and logprobs of a text: prompt and continuation, without an adapter.

    It waits for a request of 40 tokens.

    Raises:
        EngineError: the engine is closed or busy, or the model fails.
    """
    model = engine.lm.model
    context = _ASKED + _MADE if model.max_seq_len is None else model.max_seq_len
    made = min(_MADE, context // 2)
    asked = min(_ASKED, context - made)
    ids = [number * _SPREAD % model.vocab_size for number in range(1, asked + 1)]
    completion = engine.submit(
        ids, max_new_tokens=made, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, draft=None
    ).result()
    entries = (*(completion.prompt_logprobs or ()), *(completion.logprobs or ()))
    logprobs = [entry.chosen for entry in entries if entry is not None]
    bits = struct.pack(f"<{len(completion.token_ids)}q{len(logprobs)}d", *completion.token_ids, *logprobs)
    return hashlib.blake2b(bits, digest_size=4).hexdigest()
