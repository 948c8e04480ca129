"""Grammars that would exhaust time, memory or the stack are refused, and no computation is left running."""

import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import llguidance
import pytest

import onward
from onward.constraints import JsonSchema, Lark, Regex
from onward.constraints.compiler import CompiledGrammars, Vocabulary
from onward.constraints.trial import Trial, TrialPending, TrialProcesses, deferred, needs_trial
from onward.errors import RequestError
from onward.testing import ByteTokenizer

# The smallest number that all of them divide has eight digits: llguidance builds an automaton of as many states.
SLOW = JsonSchema({"allOf": [{"type": "integer", "multipleOf": number} for number in (101, 103, 107, 109)]})
DEEP = Lark("start: r0\n" + "\n".join(f'r{at}: r{at + 1} | "a"' for at in range(90_000)) + '\nr90000: "b"')


@pytest.fixture(params=["byte level", "bytes"])
def vocabulary(request):
    return Vocabulary.of(ByteTokenizer() if request.param == "bytes" else onward.load("demo").tokenizer)


def tried(trials, grammar, vocabulary):
    """Why a grammar is refused; empty if it compiles."""
    return trials.attempt(Trial(None), grammar.source(), vocabulary.tokens, vocabulary.described)


def test_slow_grammars_are_stopped_and_refused(vocabulary, monkeypatch):
    monkeypatch.setattr("onward.constraints.trial.SECONDS", 0.5)
    trials = TrialProcesses()
    assert not tried(trials, JsonSchema({"type": "integer", "multipleOf": 5}), vocabulary)
    (process,) = trials._all
    refusal = tried(trials, SLOW, vocabulary)
    assert refusal == "that takes longer than 0.5 seconds. Make it smaller"
    assert refusal.lasting
    assert process.returncode is not None
    assert not trials._all
    assert not tried(trials, JsonSchema({"type": "integer", "multipleOf": 6}), vocabulary)


def test_a_busy_machine_is_not_blamed_on_the_grammar(vocabulary, monkeypatch):
    """A process that gets no processor reaches the limit by the clock, and its grammar may be tried again."""
    monkeypatch.setattr("onward.constraints.trial.WALL_SECONDS", 0.3)
    refusal = tried(TrialProcesses(), SLOW, vocabulary)
    assert refusal == "that took longer than 0.3 seconds on a busy machine. Try again later"
    assert not refusal.lasting


def test_grammars_that_exhaust_the_stack_are_refused(vocabulary):
    trials = TrialProcesses()
    assert tried(trials, DEEP, vocabulary).startswith("it nests too deep, or needs too much memory")
    assert not tried(trials, Regex("(ab)*"), vocabulary)


class Counted:
    """Counts the grammars that are tried and compiled, by their source."""

    def __init__(self, monkeypatch):
        self.tried, self.compiled = Counter(), Counter()
        attempt, matcher = TrialProcesses.attempt, llguidance.LLMatcher

        def attempted(processes, trial, source, *others):
            self.tried[source] += 1
            return attempt(processes, trial, source, *others)

        def compiled(tokens, source, **options):
            self.compiled[source] += 1
            return matcher(tokens, source, **options)

        monkeypatch.setattr(TrialProcesses, "attempt", attempted)
        monkeypatch.setattr("onward.constraints.compiler.llguidance.LLMatcher", compiled)


def multiple_of(number):
    return JsonSchema({"type": "integer", "multipleOf": number}).source()


def test_nothing_is_tried_or_compiled_twice(monkeypatch):
    monkeypatch.setattr("onward.constraints.trial.SECONDS", 0.5)
    good, slow = multiple_of(5), SLOW.source()
    counted, tokenizer, grammars = Counted(monkeypatch), ByteTokenizer(), CompiledGrammars()
    with ThreadPoolExecutor(4) as pool:  # at once
        list(pool.map(lambda _: grammars.constraint(good, tokenizer, frozenset(), "good"), range(4)))
    for name in ("a", "b"):
        with pytest.raises(RequestError, match=rf"^{name} cannot be compiled: that takes longer than 0\.5 seconds"):
            grammars.constraint(slow, tokenizer, frozenset(), name)
    assert counted.tried == {good: 1, slow: 1}
    assert counted.compiled == {good: 1}
    grammars._matchers.clear()  # its place in the cache is taken
    grammars.constraint(good, tokenizer, frozenset(), "good")
    assert (counted.tried[good], counted.compiled[good]) == (1, 2)
    grammars.constraint(good, ByteTokenizer(), frozenset(), "good")
    assert counted.tried[good] == 2, "another vocabulary"


def test_a_wall_clock_timeout_is_not_remembered(monkeypatch):
    grammars, tokenizer = CompiledGrammars(), ByteTokenizer()
    monkeypatch.setattr("onward.constraints.trial.WALL_SECONDS", 0.01)
    with pytest.raises(RequestError, match="busy machine"):
        grammars.constraint(multiple_of(100_003), tokenizer, frozenset(), "it")
    monkeypatch.undo()
    grammars.constraint(multiple_of(100_003), tokenizer, frozenset(), "it")


def test_a_deferred_trial_blocks_no_thread(monkeypatch):
    grammars, tokenizer, source = CompiledGrammars(), ByteTokenizer(), multiple_of(7)
    with deferred("client"), pytest.raises(TrialPending) as first:
        grammars.constraint(source, tokenizer, frozenset(), "it")
    with deferred("other"), pytest.raises(TrialPending) as second:
        grammars.constraint(source, tokenizer, frozenset(), "it")
    trial = first.value.trial
    assert second.value.trial is trial, "equal grammars are tried once"
    with trial.waiting():
        trial.future.result(60)
    grammars._matchers.clear()  # the result is known even so
    with deferred("client", [trial]):
        grammars.constraint(source, tokenizer, frozenset(), "it")


def test_an_abandoned_trial_is_stopped():
    grammars, tokenizer = CompiledGrammars(), ByteTokenizer()
    pending = []
    for factor in range(3):  # two run, one is queued
        source = JsonSchema({**json.loads(SLOW.text), "title": str(factor)}).source()
        with deferred("client"), pytest.raises(TrialPending) as caught:
            grammars.constraint(source, tokenizer, frozenset(), "it")
        pending.append(caught.value.trial)
    for trial in pending:
        with trial.waiting():
            pass
    assert [trial.future.result(60) for trial in pending] == [None] * 3
    assert not grammars._tried, "nothing is known of them"
    grammars.constraint(multiple_of(3), tokenizer, frozenset(), "it")


def test_a_grammar_is_refused_before_any_work():
    lm = onward.load("demo")
    with pytest.raises(RequestError, match="nests too deep"):
        lm.generate("Once", grammar=DEEP.text, max_new_tokens=1)
    text = lm.generate("Once", json_schema={"type": "integer", "multipleOf": 50, "minimum": 1}, max_new_tokens=20)
    assert text.finish_reason == "length" or text.parsed % 50 == 0


def test_objects_with_too_many_possibilities_are_refused_at_once():
    properties = {f"p{at}": {"type": "integer"} for at in range(1000)}
    grammars = CompiledGrammars()
    wide = JsonSchema({"type": "object", "properties": properties})
    with pytest.raises(RequestError, match=r"cannot be followed: Parser Error: Current row has \d+ items; max is 2000"):
        grammars.constraint(wide.source(), ByteTokenizer(), frozenset(), repr(wide))
    needed = JsonSchema({"type": "object", "properties": properties, "required": list(properties)})
    grammars.constraint(needed.source(), ByteTokenizer(), frozenset(), repr(needed))


def test_which_grammars_are_tried():
    """Short grammars are compiled directly, unless they use a feature without a limit."""
    assert not needs_trial(JsonSchema({"type": "object"}).source())
    assert not needs_trial(Lark('start: "a"').source())
    assert needs_trial(SLOW.source())
    assert needs_trial(Lark('start: %json {"multiple\\u004ff": 7}').source())
    assert needs_trial(DEEP.source())


def test_a_forked_child_starts_its_own_process(vocabulary):
    trials = TrialProcesses()
    tried(trials, Regex("a"), vocabulary)
    (parents,) = trials._all
    child = os.fork()
    if not child:
        try:
            tried(trials, Regex("b"), vocabulary)
            os._exit(0 if [process.pid for process in trials._all] != [parents.pid] else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    tried(trials, Regex("c"), vocabulary)
    assert list(trials._all) == [parents]


def test_the_process_ends_with_its_owner(vocabulary):
    trials = TrialProcesses()
    tried(trials, Regex("a"), vocabulary)
    (process,) = trials._all
    del trials
    assert process.returncode is not None


def test_a_vocabulary_in_use_is_not_confused_with_a_later_one():
    """A freed object's id is reused by another one; the process keeps its key alive as long as it is valid."""
    trials, grammar = TrialProcesses(), JsonSchema({"type": "integer", "multipleOf": 5})
    for tokenizer in (ByteTokenizer(), onward.load("demo").tokenizer, ByteTokenizer()):
        vocabulary = Vocabulary.of(tokenizer)
        tried(trials, grammar, vocabulary)
        assert list(trials._all.values()) == [vocabulary.tokens]
    (process,) = trials._all
    tried(trials, grammar, vocabulary)
    assert list(trials._all) == [process]


def test_concurrent_threads_share_one_vocabulary(monkeypatch):
    together, before, tokenizer = threading.Barrier(4), Vocabulary.of, ByteTokenizer()

    def waits(tokenizer):
        together.wait(60)
        return before(tokenizer)

    monkeypatch.setattr(Vocabulary, "of", staticmethod(waits))
    grammars = CompiledGrammars()
    with ThreadPoolExecutor(4) as pool:
        vocabularies = list(pool.map(lambda _: grammars.vocabulary(tokenizer), range(4)))
    assert len(set(map(id, vocabularies))) == 1
