"""Constraints of grammars depend only on the accepted ids, with tokenizers of every kind."""

import random
import re

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import LISTED

import onward
from onward.constraints import Choice, JsonSchema, Lark, Regex
from onward.constraints.compiler import CompiledGrammars, GrammarConstraint, Vocabulary
from onward.errors import RequestError
from onward.sampling.constraint import admits
from onward.testing import ByteTokenizer, tiny_model
from onward.tokenizer import JsonTokenizer
from tiny_checkpoint import byte_level_tokenizer, sentencepiece_tokenizer

GRAMMARS = [
    *map(JsonSchema, LISTED[:20]),
    JsonSchema(LISTED[-1], whitespace=False),
    Regex("(ab|a)*c?"),
    Regex("[^a-f]{0,9}"),
    Choice(["once", "once upon", "never"]),
    Lark('start: "(" start ")" | /[a-z]{1,3}/ " "'),
]
STOP = frozenset({3, 257})
TOKENIZERS = {
    "bytes": lambda: (ByteTokenizer(), {}),
    "byte level": lambda: (JsonTokenizer(byte_level_tokenizer(), {}), {}),
    "prepended space": lambda: (JsonTokenizer(sentencepiece_tokenizer(metaspace=False), {"bos_token": "<s>"}), {}),
    "metaspace": lambda: (JsonTokenizer(sentencepiece_tokenizer(metaspace=True), {"bos_token": "<s>"}), {}),
    "demo": lambda: (onward.load("demo").tokenizer, {}),
}
KEPT = {name: make()[0] for name, make in TOKENIZERS.items()}


def state_of(constraint):
    """All properties of a constraint's state."""
    if constraint.is_done:
        return None
    return np.trim_zeros(constraint.mask(), "b").tolist(), list(constraint.forced())


@settings(max_examples=150)
@given(st.sampled_from(list(KEPT)), st.sampled_from(GRAMMARS), st.integers(0, 2**32))
def test_a_constraint_depends_only_on_its_ids(name, grammar, seed):
    """After any walk with steps back, forks and questions it says what a new one says after the same ids."""
    chance = random.Random(seed)
    constraint, ids = grammar(KEPT[name], STOP), []
    for _ in range(12):
        step = chance.choice(["on", "on", "on", "back", "fork", "ask", "force"])
        if step == "on" and not constraint.is_done:
            mask = constraint.mask()
            admitted = [token for token in range(32 * len(mask)) if admits(mask, token) and token not in STOP]
            if admitted:
                ids.append(chance.choice(admitted))
                constraint.accept(ids[-1])
        elif step == "force" and not constraint.is_done:
            for token in list(constraint.forced())[: chance.randint(0, 4)]:
                if not constraint.is_done and admits(constraint.mask(), token):
                    ids.append(token)
                    constraint.accept(token)
        elif step == "back" and ids:
            count = chance.randint(1, len(ids))
            constraint.rollback(count)
            del ids[len(ids) - count :]
        elif step == "fork":
            other = constraint.fork()
            if chance.random() < 0.5:
                constraint, other = other, constraint
            if not other.is_done:
                mask = other.mask()
                token = next((one for one in range(32 * len(mask)) if admits(mask, one) and one not in STOP), None)
                if token is not None:
                    other.accept(token)  # which is nothing to the constraint
        elif step == "ask":
            state_of(constraint)
    fresh = grammar(KEPT[name], STOP)
    for token in ids:
        fresh.accept(token)
    assert state_of(constraint) == state_of(fresh)


@pytest.mark.parametrize("name", list(KEPT))
def test_texts_of_every_tokenizer_match(name):
    tokenizer = KEPT[name]
    lm = onward.LanguageModel(tiny_model("llama", seed=3, vocab_size=tokenizer.vocab_size + 7), tokenizer)
    ends = 0
    for seed in range(4):
        sampled = {"temperature": 1.0, "seed": seed, "max_new_tokens": 60}
        text = lm.generate("hello", regex=r" ?(hello|é雪😀){1,3}\n\d", **sampled)
        assert text.finish_reason == "stop"
        # A tokenizer may take the space in front of a text off again.
        assert re.fullmatch(r" ?(hello|é雪😀){1,3}\n\d", text.text), text.text
        assert lm.generate([5, 6], choice=[" world", "hello"], **sampled).text in (" world", "hello")
        schema = {"type": "array", "items": {"enum": ["hello", "é"]}, "minItems": 1, "maxItems": 2}
        found = lm.generate("hello", json_schema=schema, **sampled)
        if found.finish_reason == "stop":
            assert set(found.parsed) <= {"hello", "é"}
            ends += 1
        assert max(found.token_ids) < tokenizer.vocab_size
    assert ends


def test_special_tokens_are_not_text_but_can_be_named():
    tokenizer = onward.load("demo").tokenizer
    end = tokenizer.eos_id
    free = Regex("(?s:.*)")(tokenizer)
    assert not admits(free.mask(), end)
    assert admits(Regex("(?s:.*)")(tokenizer, {end}).mask(), end)
    name = tokenizer.tokens()[end]
    assert admits(Lark(f'start: "a" | {name} "b"')(tokenizer).mask(), end)


def test_compiled_grammars_are_cached_and_evicted():
    grammars, tokenizers = CompiledGrammars(), [ByteTokenizer() for _ in range(6)]
    sources = [Regex("a" * (number + 1)).source() for number in range(140)]
    for source in sources:
        grammars.constraint(source, tokenizers[0], frozenset(), "x")
    assert len(grammars._matchers) == 128
    first = grammars.constraint(sources[-1], tokenizers[0], frozenset(), "x")
    first.accept(ord("a"))
    again = grammars.constraint(sources[-1], tokenizers[0], frozenset(), "x")
    assert again.mask()[3] == 1 << ord("a") % 32
    again.rollback(0)
    assert len(grammars._matchers) == 128
    for tokenizer in tokenizers[1:]:
        grammars.constraint(sources[0], tokenizer, frozenset(), "x")
    assert len(grammars._vocabularies) == 4
    assert {key for key, _ in grammars._matchers} <= set(grammars._vocabularies)
    assert len(grammars._matchers) == 4


def test_a_grammar_over_a_limit_ends_its_request_alone():
    """A limit of llguidance's that is met in the middle of a text."""
    lm = onward.LanguageModel(tiny_model("qwen3", seed=1), ByteTokenizer())
    vocabulary = Vocabulary.of(lm.tokenizer)
    limits = llguidance.LLParserLimits(max_items_in_row=30, verbose_errors=False)
    source = Lark("start: /[ab]{3}/ rest\nrest: " + " | ".join(f'"{number}x"' for number in range(90))).source()
    matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
    assert not matcher.is_error()
    hard = {"constraint": GrammarConstraint(matcher, vocabulary.end), "temperature": 1.0, "seed": 1}
    with onward.Engine(lm) as engine:
        failing, going = engine.submit([1], **hard), engine.submit([1], max_new_tokens=40)
        with pytest.raises(RequestError, match="the grammar cannot be followed any further: "):
            failing.result(60)
        assert going.result(60).token_ids == lm.generate([1], max_new_tokens=40).token_ids


@pytest.mark.parametrize("mask", [[1, 2], np.ones(9, dtype=bool), np.ones((1, 2), dtype=np.int32), None])
def test_masks_of_another_kind_are_refused(mask):
    class Wrong(onward.Constraint):
        def mask(self):
            return mask

        def accept(self, token_id):
            pass

        def rollback(self, count):
            pass

        def fork(self):
            return self

    with pytest.raises(RequestError, match=r"a constraint's mask must be int32 \[N\], 32 ids a word"):
        onward.LanguageModel(tiny_model("qwen3")).generate([1], constraint=Wrong())
