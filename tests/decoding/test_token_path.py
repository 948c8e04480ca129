"""The number of Onward's files that a decoded token passes through, so that no forwarding layers are added."""

import sys
from pathlib import Path

import pytest

import onward
from onward import native
from onward.testing import ByteTokenizer, tiny_model

ROOT = Path(onward.__file__).parent

# runner, loop, sequence, step, batch; cache/{manager, slot, paged}; models/run; program/{compiled, leaves,
# executable}; sampling/{sampler, draw}; tokenizer/text_stream. A tokenizer of Onward's own is one more.
MOST_FILES = 16


def entered(function) -> set[str]:
    """The files of Onward in which a function is called."""
    files = set()

    def note(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return {Path(file).relative_to(ROOT).as_posix() for file in files if Path(file).is_relative_to(ROOT)}


@pytest.mark.skipif(not native.available_isas(), reason="counts the files of native programs")
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}])
def test_a_decoded_token_passes_through_few_files(options):
    lm = onward.LanguageModel(tiny_model("qwen3", max_position_embeddings=128), ByteTokenizer(), compile="native")
    pieces = lm.stream("Once", max_new_tokens=40, ignore_eos=True, **options)
    for _ in range(10):
        next(pieces)
    files = entered(lambda: next(pieces))
    assert {"decoding/loop.py", "decoding/step.py", "program/executable.py"} <= files
    files = {file for file in files if not file.startswith("testing/")}
    assert len(files) <= MOST_FILES, sorted(files)
