"""Grammars that would take minutes, the memory or the stack are refused, and nothing goes on computing."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import onward
from onward.constraints import JsonSchema, Lark, Regex
from onward.constraints.compiler import CompiledGrammars, Vocabulary
from onward.constraints.trial import GrammarTrials, needs_trial
from onward.errors import RequestError
from onward.testing import ByteTokenizer

# The smallest number that all of them divide has eight digits: llguidance builds an automaton of as many states.
SLOW = JsonSchema({"allOf": [{"type": "integer", "multipleOf": number} for number in (101, 103, 107, 109)]})
DEEP = Lark("start: r0\n" + "\n".join(f'r{at}: r{at + 1} | "a"' for at in range(90_000)) + '\nr90000: "b"')


@pytest.fixture(params=["byte level", "bytes"])
def vocabulary(request):
    return Vocabulary.of(ByteTokenizer() if request.param == "bytes" else onward.load("demo").tokenizer)


def tried(trials, grammar, vocabulary):
    trials.check(grammar.source(), vocabulary.tokens, vocabulary.described, repr(grammar))


def test_what_takes_too_long_is_ended_and_refused(vocabulary, monkeypatch):
    monkeypatch.setattr("onward.constraints.trial.SECONDS", 0.5)
    trials = GrammarTrials()
    tried(trials, JsonSchema({"type": "integer", "multipleOf": 5}), vocabulary)
    process = trials._running[0]
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"cannot be compiled: that takes longer than 0\.5 seconds\. Make it"):
        tried(trials, SLOW, vocabulary)
    assert time.monotonic() - began < 9
    assert process.returncode is not None
    assert not trials._running
    with pytest.raises(RequestError, match="longer than"):
        tried(trials, SLOW, vocabulary)
    assert not trials._running, "it is known by now: no process tries it again"
    tried(trials, JsonSchema({"type": "integer", "multipleOf": 6}), vocabulary)


def test_what_takes_all_the_stack_is_refused(vocabulary):
    trials = GrammarTrials()
    with pytest.raises(RequestError, match="cannot be compiled: it nests too deep, or needs too much memory"):
        tried(trials, DEEP, vocabulary)
    tried(trials, Regex("(ab)*"), vocabulary)


def test_a_grammar_is_refused_before_anything_runs():
    lm = onward.load("demo")
    with pytest.raises(RequestError, match="nests too deep"):
        lm.generate("Once", grammar=DEEP.text, max_new_tokens=1)
    text = lm.generate("Once", json_schema={"type": "integer", "multipleOf": 50, "minimum": 1}, max_new_tokens=20)
    assert text.finish_reason == "length" or text.parsed % 50 == 0


def test_an_object_of_too_many_possibilities_is_refused_at_once():
    properties = {f"p{at}": {"type": "integer"} for at in range(1000)}
    kept = CompiledGrammars()
    wide = JsonSchema({"type": "object", "properties": properties})
    with pytest.raises(RequestError, match=r"cannot be followed: Parser Error: Current row has \d+ items; max is 2000"):
        kept.constraint(wide.source(), ByteTokenizer(), frozenset(), repr(wide))
    needed = JsonSchema({"type": "object", "properties": properties, "required": list(properties)})
    kept.constraint(needed.source(), ByteTokenizer(), frozenset(), repr(needed))


def test_what_is_tried():
    """What is short is compiled at once, unless it has what is not metered."""
    assert not needs_trial(JsonSchema({"type": "object"}).source())
    assert not needs_trial(Lark('start: "a"').source())
    assert needs_trial(SLOW.source())
    assert needs_trial(Lark('start: %json {"multiple\\u004ff": 7}').source())
    assert needs_trial(DEEP.source())


def test_a_forked_child_starts_a_process_of_its_own(vocabulary):
    trials = GrammarTrials()
    tried(trials, Regex("a"), vocabulary)
    parents = trials._running[0]
    child = os.fork()
    if not child:
        try:
            tried(trials, Regex("b"), vocabulary)
            os._exit(0 if trials._running[0].pid != parents.pid else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    tried(trials, Regex("c"), vocabulary)
    assert trials._running[0] is parents


def test_the_process_ends_with_its_owner(vocabulary):
    trials = GrammarTrials()
    tried(trials, Regex("a"), vocabulary)
    process = trials._running[0]
    del trials
    assert process.returncode is not None


def test_a_vocabulary_that_is_tried_with_is_not_mistaken_for_a_later_one():
    """An object that is freed gives its id to another; the key of the process is kept as long as it counts."""
    trials, grammar = GrammarTrials(), JsonSchema({"type": "integer", "multipleOf": 5})
    for tokenizer in (ByteTokenizer(), onward.load("demo").tokenizer, ByteTokenizer()):
        vocabulary = Vocabulary.of(tokenizer)
        tried(trials, grammar, vocabulary)
        assert trials._key is vocabulary.tokens
    process = trials._running[0]
    tried(trials, grammar, vocabulary)
    assert trials._running[0] is process


def test_threads_that_come_at_once_have_one_vocabulary(monkeypatch):
    together, before, tokenizer = threading.Barrier(4), Vocabulary.of, ByteTokenizer()

    def waits(tokenizer):
        together.wait(60)
        return before(tokenizer)

    monkeypatch.setattr(Vocabulary, "of", staticmethod(waits))
    kept = CompiledGrammars()
    with ThreadPoolExecutor(4) as pool:
        vocabularies = list(pool.map(lambda _: kept.vocabulary(tokenizer), range(4)))
    assert len(set(map(id, vocabularies))) == 1
