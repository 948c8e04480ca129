"""Small files of a checkpoint, changed at random: each is read, or refused by Onward's own error in one line."""

import json
import random
from pathlib import Path

import pytest

import onward
from onward.chat import ChatTemplate
from onward.errors import OnwardError
from tiny_checkpoint import make_checkpoint

# Replacements for a value, or insertions between two pieces of text.
ODD_VALUES = [None, True, -1, 0, 2**31, 10**30, 1e308, 5e-324, "", "\ud800", "x" * 1000, [], {}, [[]], {"a": None}]
ODD_TEXTS = [
    "(",
    "{{",
    "}}",
    "%",
    "{% break %}",
    "~",
    "* 10 ** 9",
    "| sum",
    "\0",
    "''",
    "[0]",
    "| tojson",
    "\ud800",
    "é",
]
ODD_TEXTS += ["{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ messages | pprint }}", "+ 1"]


def changed(value: object, random_: random.Random) -> object:
    """A JSON value with one of its values, or one inside of them, replaced or taken away."""
    if isinstance(value, dict | list) and value and random_.random() < 0.9:
        copy = value.copy()
        key = random_.choice(list(copy)) if isinstance(copy, dict) else random_.randrange(len(copy))
        if random_.random() < 0.1:
            del copy[key]
        else:
            copy[key] = changed(copy[key], random_)
        return copy
    return random_.choice(ODD_VALUES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("mutations") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.filterwarnings("ignore::onward.errors.OnwardWarning")
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_a_mutated_file_is_read_or_refused(folder: Path, name: str) -> None:
    random_ = random.Random(f"mutations of {name}")
    whole = (folder / name).read_bytes()
    read = 0
    try:
        for _ in range(60):
            if name.endswith(".json"):
                content = json.dumps(changed(json.loads(whole), random_)).encode()
            else:
                content = bytearray(whole)
                content[random_.randrange(2000)] = random_.randrange(256)
            # A new file each time: the old one may still be mapped.
            (folder / "new").write_bytes(content)
            (folder / "new").rename(folder / name)
            try:
                lm = onward.load(folder, compile="eager")
                lm.generate("hello", max_new_tokens=2, temperature=0)
                read += 1
            except OnwardError as error:
                one_line(error)
    finally:
        (folder / name).write_bytes(whole)
    assert read < 60


def one_line(error: OnwardError) -> None:
    assert str(error)
    assert "\n" not in str(error)


TEMPLATE = """{% set ns = namespace(n=0, all=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{{ m.role ~ ': ' + m['content'] | trim | replace('a', 'b') }}{% set ns.all = ns.all + [m] %}{% if not loop.last %}
{{ '%s of %d' % (ns.n, messages | length) }}{% endif %}{% endfor %}{{ ns.all | tojson(indent=1) }}
{% macro turn(x) %}{{ x.upper().center(9) }}{% endmacro %}{{ turn('{:>3}'.format(ns.n)) }}"""


@pytest.mark.parametrize("seed", range(5))
def test_a_mutated_template_is_rendered_or_refused(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(150):
        source = TEMPLATE
        for _ in range(random_.randint(1, 3)):
            at, end = sorted(random_.randrange(len(source)) for _ in range(2))
            rest = source[end:] if random_.random() < 0.3 else source[at + random_.randint(0, 2) :]
            source = source[:at] + random_.choice([*ODD_TEXTS, source[at:end]]) + rest
        try:
            ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "a"}] * 3)
        except OnwardError as error:
            one_line(error)
