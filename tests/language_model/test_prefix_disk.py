"""A prefix read from disk has the bits of a computed one."""

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import onward
from demo_adapters import demo_adapter
from onward import LanguageModel, Session
from onward.errors import OnwardWarning, OptionError, RequestError
from onward.language_model.prefix_disk import checkpoint_identity
from onward.models import pack_params
from onward.prefix_store.exported import load_prefix
from onward.prefix_store.folder import contents
from onward.testing import ByteTokenizer, random_checkpoint, tiny_model

PROMPT = [number * 37 % 251 for number in range(200)]
OPTIONS = {"max_new_tokens": 24, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
FULL = 192  # positions of the prompt's full blocks


def packed(family, **config):
    model = tiny_model(family, seed=11, num_hidden_layers=3, **config)
    return dataclasses.replace(model, params=pack_params(model.params))


def tiny(family, folder=None, **config):
    return LanguageModel(packed(family, **config), ByteTokenizer(), prefill_chunk=100, prefix_cache_dir=folder)


def demo(folder=None, **options):
    return onward.load("demo", prefix_cache_dir=folder, **options)


# One of each kind of cache.
LOADED = {
    "plain": lambda folder: tiny("qwen3", folder),
    "sliding layers": lambda folder: tiny("gemma3", folder, sliding_window=70),
    "sliding layers only": lambda folder: tiny("mistral", folder, sliding_window=40),
    "recurrent layers": lambda folder: tiny("qwen3_5", folder),
    "convolutions": lambda folder: tiny("lfm2", folder),
    "mamba": lambda folder: tiny("nemotronh", folder),
    "latent attention": lambda folder: tiny("deepseekv3", folder),
    "16 bits": demo,
    "8 bits": lambda folder: demo(folder, cache_format="int8"),
    "quantized": lambda folder: demo(folder, quantize="int8"),
}
everyone = pytest.mark.parametrize("name", LOADED)


def one_kind(lm):
    """Whether a sequence may continue within a block: windows and states are those at its end."""
    blocks = lm.model.new_blocks(1)
    return blocks.windows is None and blocks.states is None


def disk_of(lm):
    return lm._prefix_cache._shared.slots.disk


def write(lm):
    """Wait until everything in memory is on the disk."""
    assert disk_of(lm).flush(60)


def content(completion):
    return completion.token_ids, completion.logprobs, completion.text


def of(lm, prompt=PROMPT, **options):
    return lm.generate(prompt, **OPTIONS | options)


@everyone
def test_a_hit_gives_the_bits_of_a_miss(name, tmp_path):
    alone = of(LOADED[name](None))
    first = LOADED[name](tmp_path)
    assert (content(miss := of(first)), miss.cached_tokens) == (content(alone), 0)
    write(first)
    hit = of(LOADED[name](tmp_path))
    assert (content(hit), hit.cached_tokens) == (content(alone), FULL)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8", "cache_format": "int8"}], ids=["plain", "int8"])
def test_files_are_named_after_their_model(options, tmp_path):
    of(lm := demo(tmp_path, **options))
    write(lm)
    (group,) = contents(str(tmp_path))
    assert group.model == ("demo int8 int8 cache" if options else "demo")


@everyone
def test_other_texts_reuse_their_common_prefix(name, tmp_path):
    """A text continues an answer or diverges within the prompt, but never where states or windows are missing."""
    whole = [*PROMPT, *of(first := LOADED[name](tmp_path)).token_ids]
    write(first)
    empty = LOADED[name](None)
    empty.prefix_memory = 0
    again = LOADED[name](tmp_path)
    again.prefix_memory = 0
    some = 0
    for cut in (40, 64, 65, 128, 130, 191, 192, 193, 220, 224):
        prompt = [*whole[:cut], 7, 8, 9]
        hit = of(again, prompt, max_new_tokens=6)
        assert content(hit) == content(of(empty, prompt, max_new_tokens=6)), cut
        if one_kind(again) and (computed := min(cut, len(whole) - 1)) % 64 >= 16:
            assert hit.cached_tokens == computed
        else:
            assert hit.cached_tokens in [at for at in (0, 64, 128, FULL) if at <= cut]
        some += hit.cached_tokens > 0
    assert some


def ends(folder):
    """The files that end within a block, with the number of their ids."""
    counts = {file.name: len(load_prefix(file).tokens) for file in folder.glob("*.safetensors")}
    return {(name, count) for name, count in counts.items() if count % 64}


def test_the_start_of_a_block_is_deleted_once_more_of_it_is_written(tmp_path):
    alone, used = tiny("qwen3", tmp_path / "alone"), tiny("qwen3", tmp_path / "used")
    for ids in (range(100, 164), range(130)):  # whose blocks are used again
        used.generate(list(ids), max_new_tokens=1, temperature=0.0)
    write(used)
    used._prefix_cache._shared.slots.clear()
    for lm in (alone, used):
        lm.generate(PROMPT[:150], max_new_tokens=1, temperature=0.0)
        write(lm)
    hit = tiny("qwen3", tmp_path / "alone").generate(PROMPT[:150], max_new_tokens=1, temperature=0.0)
    assert hit.cached_tokens == 149
    ((name, count),) = ends(tmp_path / "alone")
    assert count == 150
    assert (name, 150) in ends(tmp_path / "used")
    assert {count for _, count in ends(tmp_path / "used")} == {150}, "2 positions are not worth a file"
    used.generate(PROMPT[:170], max_new_tokens=1, temperature=0.0)
    write(used)
    assert {count for _, count in ends(tmp_path / "used")} == {170}
    of(used)
    write(used)
    computed = len(PROMPT) + OPTIONS["max_new_tokens"] - 1
    assert {count for _, count in ends(tmp_path / "used")} == {computed}
    assert contents(str(tmp_path / "used"))[0].tokens == 64 + 128 + computed


@everyone
def test_samples_beams_and_drafts_start_from_stored_prefixes(name, tmp_path):
    write_one = LOADED[name](tmp_path)
    of(write_one)
    write(write_one)
    alone = LOADED[name](None)
    for options in ({"n": 3, "temperature": 1.0, "seed": 5}, {"beams": 3}, {"draft": "lookup"}):
        expected, hit = of(alone, **options), of(LOADED[name](tmp_path), **options)
        assert [content(each) for each in hit.choices] == [content(each) for each in expected.choices], options
        assert hit.cached_tokens == FULL


def test_concurrent_prompts_read_a_common_prefix_once(tmp_path):
    first = tiny("qwen3", tmp_path)
    of(first)
    write(first)
    prompts = [[*PROMPT, number] for number in range(5)]
    again = tiny("qwen3", tmp_path)
    expected = tiny("qwen3").generate(prompts, **OPTIONS)
    hits = again.generate(prompts, **OPTIONS)
    assert [content(each) for each in hits] == [content(each) for each in expected]
    assert [each.cached_tokens for each in hits] == [FULL] * 4 + [FULL]
    assert disk_of(again).counts.restored == FULL
    assert disk_of(again).current.store.stats().read == FULL * first.model.new_blocks(1).block_nbytes // 64


@everyone
def test_prefixes_evicted_from_memory_are_read(name, tmp_path):
    lm = LOADED[name](tmp_path)
    has_states = lm.model.new_blocks(1).states is not None
    lm.prefix_memory = 2**30 if has_states else 0  # then blocks are freed with their text, and copied before
    first = of(lm)
    write(lm)
    lm._prefix_cache._shared.slots.clear()
    second = of(lm)
    assert (content(second), second.cached_tokens) == (content(first), FULL)


def test_a_session_continues_from_stored_prefixes(tmp_path):
    first = demo(tmp_path)
    of(first)
    write(first)
    session, expected = Session(demo(tmp_path)), Session(demo())
    for prompt in (PROMPT, [*PROMPT, 5, 6]):
        hit = session.generate(prompt, **OPTIONS)
        assert content(hit) == content(expected.generate(prompt, **OPTIONS))
        assert hit.cached_tokens >= FULL


def test_an_adapter_has_its_own_prefixes(tmp_path):
    adapters = {name: demo_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    first = demo(tmp_path / "disk", adapters=adapters)
    expected = {name: content(of(first, adapter=name)) for name in (None, "one", "two")}
    write(first)
    again = demo(tmp_path / "disk", adapters={"uno": adapters["one"]})
    hit = of(again, adapter="uno")
    assert (content(hit), hit.cached_tokens) == (expected["one"], FULL)
    assert content(of(again)) == expected[None]


def test_different_salts_share_nothing_in_memory_or_on_disk(tmp_path):
    lm = demo(tmp_path)
    expected = content(of(lm, cache_salt="a"))
    assert of(lm, cache_salt="a").cached_tokens == len(PROMPT) - 1
    assert [of(lm, cache_salt=salt).cached_tokens for salt in (None, "", "b")] == [0, 0, 0]
    write(lm)
    again = demo(tmp_path)
    assert of(again, cache_salt="c").cached_tokens == 0
    hit = of(again, cache_salt="a")
    assert (content(hit), hit.cached_tokens) == (expected, FULL)
    session = Session(demo())
    session.generate(PROMPT, cache_salt="a", **OPTIONS)
    assert session.generate(PROMPT, cache_salt="b", **OPTIONS).cached_tokens == 0
    assert b"tenant" not in b"".join(file.read_bytes() for file in tmp_path.glob("*.safetensors"))


def test_other_weights_formats_and_backends_have_other_stores(tmp_path):
    first = tiny("qwen3", tmp_path)
    of(first)
    write(first)
    others = [
        LanguageModel(tiny_model("qwen3", seed=12), ByteTokenizer(), prefix_cache_dir=tmp_path),
        tiny("qwen3", tmp_path, rope_theta=500.0),
        LanguageModel(packed("qwen3"), ByteTokenizer(), prefix_cache_dir=tmp_path, compile="eager"),
    ]
    assert [of(lm).cached_tokens for lm in others] == [0, 0, 0]
    assert of(tiny("qwen3", tmp_path)).cached_tokens == FULL


def test_changed_weights_leave_their_store(tmp_path):
    model = tiny_model("qwen3", seed=3)
    lm = LanguageModel(model, ByteTokenizer(), prefix_cache_dir=tmp_path)
    before = content(of(lm))
    write(lm)
    with torch.no_grad():
        model.params.layers[0].feed_forward.down_proj.weight.mul_(2)
    changed = of(lm)
    assert changed.cached_tokens == 0
    assert content(changed) != before
    write(lm)
    with torch.no_grad():
        model.params.layers[0].feed_forward.down_proj.weight.div_(2)
    hit = of(lm)
    assert (content(hit), hit.cached_tokens) == (before, FULL)


def test_weights_changed_before_the_write_store_nothing(tmp_path, monkeypatch):
    model = tiny_model("qwen3", seed=3)
    lm = LanguageModel(model, ByteTokenizer(), prefix_cache_dir=tmp_path)
    monkeypatch.setattr("onward.cache.disk.DiskPrefixes.write", lambda self: None)
    of(lm)
    monkeypatch.undo()
    with torch.no_grad():
        model.params.layers[0].feed_forward.down_proj.weight.mul_(2)
    write(lm)
    assert not list(tmp_path.glob("*.safetensors"))


PROGRAM = """
import sys, time, onward
lm = onward.load("demo", prefix_cache_dir=sys.argv[1])
completion = lm.generate([number * 37 % 251 for number in range(200)], max_new_tokens=24, temperature=0.0,
                         ignore_eos=True)
lm._prefix_cache._shared.slots.disk.flush(60) if len(sys.argv) > 2 else None
print(completion.cached_tokens, completion.token_ids, flush=True)
if len(sys.argv) > 2:
    time.sleep(600)
"""


def started(folder, *arguments):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.stride(2)
def test_a_killed_process_leaves_its_prefixes_to_the_next(tmp_path):
    with started(tmp_path, "waits") as killed:
        first = killed.stdout.readline()
        os.kill(killed.pid, signal.SIGKILL)
    assert first.startswith("0 ")
    again, _ = started(tmp_path).communicate(timeout=120)
    assert again == first.replace("0 ", f"{FULL} ", 1)


@pytest.mark.stride(2)
def test_short_processes_write_at_exit_and_two_share_the_folder(tmp_path):
    both = [started(tmp_path), started(tmp_path)]
    texts = {process.communicate(timeout=120)[0].split(" ", 1)[1] for process in both}
    assert len(texts) == 1
    last, _ = started(tmp_path).communicate(timeout=120)
    assert last == f"{FULL} {texts.pop()}"


def test_files_and_folders_are_private(tmp_path):
    lm = demo(tmp_path / "a" / "b")
    of(lm)
    write(lm)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


def test_a_damaged_file_is_a_miss(tmp_path):
    lm = demo(tmp_path)
    expected = content(of(lm))
    write(lm)
    for file in tmp_path.glob("*.safetensors"):
        content_of_file = bytearray(file.read_bytes())
        content_of_file[-5] ^= 1
        file.write_bytes(content_of_file)
    again = of(demo(tmp_path))
    assert content(again) == expected
    assert again.cached_tokens < FULL


@pytest.mark.parametrize("name", ["sliding layers", "recurrent layers", "plain"])
def test_a_failed_read_does_not_change_the_text(name, tmp_path, monkeypatch):
    """Memory has a part of the prompt that ends within a block, and the read of the rest fails."""
    lm = LOADED[name](tmp_path)
    expected = content(of(lm))
    write(lm)
    store = type(disk_of(lm).current.store)
    for count in range(4):
        again = LOADED[name](tmp_path)
        again.generate(PROMPT[:100], max_new_tokens=1, temperature=0.0)
        monkeypatch.setattr(
            store, "read", lambda self, parts, most=count, read=store.read: min(most, read(self, parts))
        )
        hit = of(again)
        monkeypatch.undo()
        assert content(hit) == expected
        assert hit.cached_tokens <= FULL


def test_a_full_disk_means_one_warning_and_the_same_tokens(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onward.prefix_store.file_system.FileSystem.create", refuse)
    lm = demo(tmp_path)
    prompts = PROMPT, [*PROMPT, 1]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        texts = []
        for prompt in prompts:
            texts.append(content(of(lm, prompt)))
            write(lm)
    assert [each.category for each in warned if "No space left" in str(each.message)] == [OnwardWarning]
    assert texts == [content(of(demo(), prompt)) for prompt in prompts]


def test_large_weights_are_hashed_once_in_the_background(tmp_path, monkeypatch):
    folder = random_checkpoint(tmp_path / "model")
    monkeypatch.setattr("onward.language_model.prefix_disk._SMALL", 0)
    monkeypatch.setattr("onward.language_model.prefix_disk._RECENT", -1e9)
    going, hashes = threading.Event(), []
    real = onward.language_model.prefix_disk._hash_of_weights

    def slow(model):
        going.wait(60)
        hashes.append(model)
        return real(model)

    monkeypatch.setattr("onward.language_model.prefix_disk._hash_of_weights", slow)
    lm = onward.load(folder, prefix_cache_dir=tmp_path / "disk")
    first = of(lm)
    assert disk_of(lm) is None, "the first text does not wait"
    going.set()
    while disk_of(lm) is None:
        time.sleep(0.01)
        of(lm)
    write(lm)
    hit = of(onward.load(folder, prefix_cache_dir=tmp_path / "disk"))
    assert (content(hit), hit.cached_tokens) == (content(first), FULL)
    assert len(hashes) == 1
    os.utime(folder / "model.safetensors")
    onward.load(folder, prefix_cache_dir=tmp_path / "disk")
    while len(hashes) < 2:
        time.sleep(0.01)


def test_recently_changed_files_have_no_identity(tmp_path):
    (tmp_path / "a").write_text("a")
    assert checkpoint_identity([tmp_path]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_dir": 3}, "prefix_cache_dir must be a folder; got 3"),
        ({"prefix_cache_disk": 5}, "prefix_cache_disk would change nothing without a prefix_cache_dir: set that too"),
        ({"prefix_cache_dir": "/dev/null/x"}, "prefix_cache_dir '/dev/null/x' cannot be created: "),
        ({"prefix_cache_dir": "{}", "prefix_cache_disk": 0}, "prefix_cache_disk must be a whole number of 1 or more"),
    ],
)
def test_invalid_options_are_named(options, message, tmp_path):
    options = {name: str(tmp_path) if value == "{}" else value for name, value in options.items()}
    with pytest.raises(OptionError) as error:
        LanguageModel(tiny_model(), **options)
    assert message in str(error.value)


def test_unsupported_models_are_refused(tmp_path):
    dense = dataclasses.replace(tiny_model(), new_blocks=None)
    with pytest.raises(OptionError, match="prefix_cache_dir needs a model whose cache is in blocks"):
        LanguageModel(dense, prefix_cache_dir=tmp_path)
    with pytest.raises(RequestError, match="pipeline= does not work with prefix_cache_dir= yet"):
        onward.load("demo", pipeline=2, prefix_cache_dir=tmp_path)
