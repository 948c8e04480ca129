"""A saved session continues as if uninterrupted; other files and sessions of other models are refused."""

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from session_cases import SAMPLED, TOKENIZER, WINDOWED, contents, packed, tiny

import onward
from onward import LanguageModel, Model, Session, ops
from onward.errors import OnwardWarning, SessionError
from onward.prefix_store import Part
from onward.prefix_store.exported import load_prefix, read_prefix, save_prefix
from onward.testing import scripted_model, tiny_model

few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of the tiny model, after one call."""
    session = Session(tiny())
    session.generate("Hello", **SAMPLED)
    session.notes["of"] = "mine ✓"
    session.save(tmp_path / "a session.safetensors")
    return tmp_path / "a session.safetensors"


# ── contents ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_has_exactly_the_ids_their_keys_and_values(file: Path) -> None:
    lm = tiny()
    tokens = [*b"Hello", *lm.generate("Hello", **SAMPLED).token_ids[:-1]]
    saved = load_prefix(file)
    assert saved.tokens == load_file(file)["tokens"].tolist() == tokens
    names = [f"cache.{kind}[{layer}]" for kind in ("keys", "values") for layer in (0, 1)]
    assert json.loads(saved.metadata["cache"]) == [[name, "torch.float32", [1, 2, len(tokens), 16]] for name in names]
    assert [entry.part.nbytes for entry in saved.entries] == [4 * 2 * len(tokens) * 16] * 4
    assert file.stat().st_size == saved.entries[-1].part.offset + saved.entries[-1].part.nbytes
    session = Session.load(file, lm)
    assert session.tokens == tokens
    assert session.notes == {"of": "mine ✓"}
    assert session.lm is lm


def test_a_loaded_session_continues_where_the_saved_one_stopped(file: Path) -> None:
    lm = tiny()
    whole = Session(lm)
    first = whole.generate("Hello", **SAMPLED)
    prompt = [*b"Hello", *first.token_ids, *b" and then?"]
    want = whole.generate(prompt, **SAMPLED)
    got = Session.load(file, tiny(prefix_memory=0)).generate(prompt, **SAMPLED)  # without what `whole` left
    assert (contents(got), got.cached_tokens) == (contents(want), want.cached_tokens)
    assert want.cached_tokens == len(prompt) - len(b" and then?") - 1


def test_saving_does_not_change_a_session(tmp_path: Path) -> None:
    lm, file = tiny(), tmp_path / "file"
    session, text = Session(lm), [1]
    for _ in range(4):
        completion = session.generate([*text, 2, 3], **SAMPLED)
        session.save(file)
        assert Session.load(file, lm).tokens == session.tokens
        text = [*text, 2, 3, *completion.token_ids]
    assert completion.token_ids == lm.generate(text[: -len(completion.token_ids)], **SAMPLED).token_ids


def test_an_empty_session_is_saved_too(tmp_path: Path) -> None:
    session = Session(tiny())
    session.save(tmp_path / "file")
    assert Session.load(tmp_path / "file", tiny()).tokens == []


def test_a_session_does_not_depend_on_layout_or_context(file: Path) -> None:
    """Saved from packed weights, it continues with stock ones and with another context limit."""
    here = tiny()
    stock = dataclasses.replace(tiny_model("qwen3", seed=7, **WINDOWED), max_seq_len=100)
    session = Session.load(file, LanguageModel(stock, TOKENIZER))
    assert session.tokens == Session.load(file, here).tokens
    tokens = session.tokens
    assert session.generate([*tokens, 5], max_new_tokens=4).cached_tokens == len(tokens)


def test_session_files_are_readable_only_by_their_owner(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_computed_with_older_weights_is_saved(tmp_path: Path) -> None:
    model = tiny_model("qwen3", seed=1)
    session = Session(LanguageModel(model, TOKENIZER))
    session.generate("Hello")
    model.params.norm.mul_(0.5)
    session.save(tmp_path / "file")
    assert Session.load(tmp_path / "file", session.lm).tokens == []


@pytest.mark.parametrize("rounded_to", [1, 64])
def test_any_pytree_of_tensors_is_saved(tmp_path: Path, rounded_to: int) -> None:
    """Only its used positions if they are known, otherwise the whole cache."""

    def new_cache(batch: int, max_len: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.full((1, -(-max_len // rounded_to) * rounded_to + (rounded_to > 1)), -1)}

    def forward(tokens: Any, offsets: Any, cache: dict[str, torch.Tensor], params: Any) -> Any:
        begin, end = int(offsets[0]), int(offsets[0]) + tokens.shape[1]
        assert bool((cache["ids"][0, :begin] >= 0).all())
        cache["ids"][0, begin:end] = tokens[0]
        sums = cache["ids"][0, :end].cumsum(0)[begin:] % 32
        return torch.nn.functional.one_hot(sums, 32).float().unsqueeze(0), cache

    lm = LanguageModel(Model(forward, (), new_cache, vocab_size=32))
    session = Session(lm)
    first = session.generate([1, 2, 3], max_new_tokens=300)
    session.save(tmp_path / "file")
    shapes = json.loads(load_prefix(tmp_path / "file").metadata["cache"])
    assert shapes == [["cache['ids']", "torch.int64", [1, 302 if rounded_to == 1 else 513]]]
    prompt = [1, 2, 3, *first.token_ids, 4]
    got = Session.load(tmp_path / "file", lm).generate(prompt, max_new_tokens=30)
    assert (got.token_ids, got.cached_tokens) == (lm.generate(prompt, max_new_tokens=30).token_ids, 302)
    session.truncate(100)  # now a shorter cache would do
    session.save(tmp_path / "file")
    got = Session.load(tmp_path / "file", lm).generate(prompt, max_new_tokens=30)
    assert (got.token_ids, got.cached_tokens) == (lm.generate(prompt, max_new_tokens=30).token_ids, 100)


def test_caches_other_than_pytrees_of_tensors_are_not_saved(tmp_path: Path) -> None:
    def forward(tokens: Any, offsets: Any, cache: list[Any], params: Any) -> Any:
        return torch.nn.functional.one_hot(tokens.long(), 32).float(), cache

    session = Session(
        LanguageModel(Model(forward, (), lambda batch, max_len: [torch.zeros(max_len), 5], vocab_size=32))
    )
    session.generate([1, 2], max_new_tokens=3)
    with pytest.raises(SessionError, match=r"a pytree of tensors; cache\[1\] is a int"):
        session.save(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


# ── whole or not at all ───────────────────────────────────────────────────────────────────────────────────


def test_notes_are_strings(tmp_path: Path) -> None:
    session = Session(tiny())
    session.notes["turns"] = 3  # type: ignore[assignment]
    with pytest.raises(SessionError, match=r"the notes of a session are strings by name; got \{'turns': 3\}"):
        session.save(tmp_path / "file")


def test_a_session_may_be_saved_during_a_stream(tmp_path: Path) -> None:
    lm = tiny()
    session = Session(lm)
    stream = session.stream("Hello", **SAMPLED)
    pieces = [next(stream).token_id for _ in range(3)]
    session.save(tmp_path / "file")
    pieces += [piece.token_id for piece in stream]
    want = lm.generate("Hello", **SAMPLED)
    assert pieces == want.token_ids
    saved = Session.load(tmp_path / "file", lm)
    assert saved.tokens == [*b"Hello", *pieces[:2]]
    assert contents(saved.generate("Hello", **SAMPLED)) == contents(want)


@pytest.mark.parametrize("fails", ["os.writev", "os.fsync", "os.replace"])
def test_a_failed_save_leaves_the_previous_file(file: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    before = file.read_bytes()
    session = Session.load(file, tiny())
    session.generate("Another")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fails, full)
        with pytest.raises(SessionError, match=r"a session\.safetensors' cannot be written: No space left on device"):
            session.save(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    session.save(file)
    assert Session.load(file, tiny()).tokens == session.tokens


@pytest.mark.parametrize("name", ["no/such/folder/file", "", "nul\0"])
def test_invalid_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(SessionError):
        Session(tiny()).save(tmp_path / name)
    with pytest.raises(SessionError):
        Session.load(tmp_path / name, tiny())


@pytest.mark.parametrize("content", ["text", "weights", "empty"])
def test_files_other_than_sessions_are_refused_and_not_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file"
    if content == "weights":
        save_file({"tokens": torch.zeros(3)}, file, {"format": "pt"})
    else:
        file.write_text("" if content == "empty" else "Once upon a time" * 9)
    before = file.read_bytes()
    with pytest.raises(SessionError, match="is not a saved session"):
        Session.load(file, tiny())
    with pytest.raises(SessionError, match="exists and is not a saved session, choose another name"):
        Session(tiny()).save(file)
    assert file.read_bytes() == before


def test_a_folder_is_no_session(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="is a folder, but a session is a file: choose another name"):
        Session(tiny()).save(tmp_path)
    with pytest.raises(SessionError, match="is a folder, but a session is a file"):
        Session.load(tmp_path, tiny())


# ── damaged, newer, another's ─────────────────────────────────────────────────────────────────────────────


@given(at=st.floats(0, 1, exclude_max=True))
@few
def test_a_truncated_file_is_refused(file: Path, at: float) -> None:
    content = file.read_bytes()
    cut = file.with_name("cut")
    cut.write_bytes(content[: int(at * len(content))])
    with pytest.raises(SessionError, match="not a saved session or is damaged"):
        Session.load(cut, tiny())


@given(at=st.floats(0, 1, exclude_max=True) | st.floats(0, 0.15), mask=st.integers(1, 255))
@few
def test_a_changed_byte_is_detected(file: Path, at: float, mask: int) -> None:
    """Wherever it is, unless the file means the same with it (another blank in the header's filling, say)."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= mask
    changed = file.with_name("changed")
    changed.write_bytes(content)
    try:
        session = Session.load(changed, tiny())
    except SessionError:
        return
    whole = Session.load(file, tiny())
    assert (session.tokens, session.notes) == (whole.tokens, whole.notes)
    for one, two in zip(load_file(file).values(), load_file(changed).values(), strict=True):
        assert torch.equal(one, two)


def rewritten(file: Path, tokens: list[int] | None = None, **changes: str) -> Path:
    """The file with other ids, another key or other metadata, and checksums that agree with them."""
    saved = load_prefix(file)
    contents = [memoryview(bytearray(entry.part.nbytes)) for entry in saved.entries]
    assert read_prefix(file, [(entry.part, [view]) for entry, view in zip(saved.entries, contents, strict=True)])
    save_prefix(
        file.with_name("rewritten"),
        key=changes.pop("key", saved.key),
        root=changes.pop("root", saved.root),
        ids=saved.tokens if tokens is None else tokens,
        parts=[Part(entry.block, entry.kind, [view]) for entry, view in zip(saved.entries, contents, strict=True)],
        metadata={**saved.metadata, **changes},
        block=saved.block,
    )
    return file.with_name("rewritten")


def test_a_newer_format_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"onward_prefix":"1"', b'"onward_prefix":"3"'))
    with pytest.raises(SessionError, match="its format is 3, and this Onward reads 1: upgrade"):
        Session.load(file, tiny())
    with pytest.raises(SessionError, match="its format is 3"):
        Session(tiny()).save(file)


def test_an_older_format_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({"tokens": torch.zeros(3)}, file, {"onward_session": "1", "model": "{}"})
    for use in (lambda: Session.load(file, tiny()), lambda: Session(tiny()).save(file)):
        with pytest.raises(SessionError, match="a format that this Onward no longer reads, make the session again"):
            use()


def test_another_kind_of_prefix_file_is_refused(tmp_path: Path) -> None:
    save_prefix(tmp_path / "file", key="key", root="", ids=[1], parts=[], metadata={})
    with pytest.raises(SessionError, match="is not a saved session or is damaged: it is a prefix of something else"):
        Session.load(tmp_path / "file", tiny())


@pytest.mark.parametrize(
    "changes", [{"key": "{}"}, {"key": "[1]"}, {"key": "no JSON"}, {"capacity": "x"}, {"notes": "[]"}], ids=str
)
def test_a_forged_file_is_an_error_instead_of_a_crash(file: Path, changes: dict[str, str]) -> None:
    with pytest.raises(SessionError, match="not a session saved by Onward"):
        Session.load(rewritten(file, **changes), tiny())


@pytest.mark.parametrize("capacity", ["6_4", "٣٠", " 64 ", "-1", "0", "13", "+64", "064", "64.0", "", "9" * 5000])
def test_a_capacity_is_an_integer_with_room_for_the_tokens(file: Path, capacity: str) -> None:
    """The session has 14 tokens."""
    with pytest.raises(SessionError, match="not a session saved by Onward"):
        Session.load(rewritten(file, capacity=capacity), tiny())


@pytest.mark.parametrize(
    "changes",
    [{"notes": '{"turns": 3}'}, {"notes": "[" * 100_000}, {"key": "[" * 100_000}],
    ids=["number", "n", "k"],
)
def test_metadata_of_another_kind_is_refused(file: Path, changes: dict[str, str]) -> None:
    with pytest.raises(SessionError, match="not a session saved by Onward"):
        Session.load(rewritten(file, **changes), tiny())


@pytest.mark.parametrize("change", [-1, 300], ids=["negative", "beyond"])
def test_tokens_are_ids_of_the_vocabulary(file: Path, change: int) -> None:
    tokens = [token + change if change > 0 else change for token in load_prefix(file).tokens]
    with pytest.raises(SessionError, match="its tokens"):
        Session.load(rewritten(file, tokens), tiny())


def test_a_cache_that_exceeds_memory_is_an_error(tmp_path: Path) -> None:
    """Where a tensor is stored whole, the cache is as long as the file says."""

    def new_cache(batch: int, max_len: int) -> list[torch.Tensor]:
        if max_len > 10**6:
            raise MemoryError("no room")
        return [torch.zeros(1, max_len + max_len % 3)]

    def forward(tokens: Any, offsets: Any, cache: list[torch.Tensor], params: Any) -> Any:
        return torch.nn.functional.one_hot(tokens.long(), 32).float(), cache

    lm = LanguageModel(Model(forward, (), new_cache, vocab_size=32))
    session = Session(lm)
    session.generate([1, 2, 3], max_new_tokens=3)
    session.save(tmp_path / "file")
    with pytest.raises(SessionError, match="cannot be made: no room"):
        Session.load(rewritten(tmp_path / "file", capacity="2000000000"), lm)


def test_a_forged_cache_is_an_error_instead_of_a_crash(file: Path) -> None:
    shapes = load_prefix(file).metadata["cache"]
    changes: list[dict[str, str]] = [{"cache": shapes.replace(*names)} for names in (("[0]", "[7]"), ("32", "16"))]
    changes += [{"cache": shapes.replace("14, 16", "7, 32")}, {"cache": ""}]
    for changed in changes:
        with pytest.raises(SessionError, match="doesn't match this model's cache"):
            Session.load(rewritten(file, **changed), tiny())
    fewer = load_prefix(file).tokens[:-1]
    with pytest.raises(SessionError, match="cache"):
        Session.load(rewritten(file, fewer), tiny())


def other_weight(name: str) -> LanguageModel:
    """The tiny model with one matrix of a layer changed, as a merged adapter does."""
    stock = tiny_model("qwen3", seed=7, **WINDOWED)
    weight = getattr(stock.params.layers[1].mixer, name).weight
    weight.add_(torch.outer(torch.ones(weight.shape[0]), torch.full((weight.shape[1],), 1e-3)))
    return LanguageModel(packed(stock), TOKENIZER)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: tiny(seed=8), r"its embed_tokens.weight has other numbers"),
        (lambda: other_weight("v_proj"), r"its layers\[1\]\.mixer\.v_proj\.weight has other numbers"),
        (lambda: tiny(rope_theta=5000.0), r"its layers\[0\]\.mixer\.rope\.base is 10000\.0, this model's 5000\.0"),
        (lambda: tiny(num_hidden_layers=3), "its number of layers is 2, this model's 3"),
        (lambda: tiny(vocab_size=300), "its vocabulary has 258 ids, this model's 300"),
        (
            lambda: LanguageModel(tiny_model("qwen3", seed=7, dtype=torch.bfloat16, **WINDOWED), TOKENIZER),
            "its embed_tokens.weight is float32 258x32, this model's bfloat16 258x32",
        ),
        (
            lambda: onward.quantize(LanguageModel(tiny_model("qwen3", seed=7, **WINDOWED)), "int8"),
            "its embed_tokens.weight is .* int8 258x32",
        ),
        (lambda: LanguageModel(dataclasses.replace(scripted_model([1]), vocab_size=258)), "its .* this model's None"),
    ],
)
def test_another_models_session_is_refused(file: Path, other: Any, message: str) -> None:
    with pytest.raises(SessionError, match=f"is the session of another model: {message}"):
        Session.load(file, other())


def test_a_session_longer_than_the_context_is_refused(file: Path) -> None:
    short = LanguageModel(dataclasses.replace(tiny().model, max_seq_len=5), TOKENIZER)
    with pytest.raises(SessionError, match="holds 14 tokens, but the context is 5: load the model with a larger"):
        Session.load(file, short)


def test_other_kernels_are_a_warning(file: Path, form: str) -> None:
    other = "native" if form == "definition" else "definition"
    ops.choose(other)
    if ops.choice().form != other:
        pytest.skip("this machine has one form of the kernels")
    with pytest.warns(OnwardWarning, match="continues on .* which may round differently"):
        session = Session.load(file, tiny())
    assert len(session.tokens) == 14


def test_the_format_is_readable_without_onward(file: Path) -> None:
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    assert metadata["onward_prefix"] == "1"
    assert json.loads(metadata["notes"]) == {"of": "mine ✓"}
    assert json.loads(metadata["key"])["config"]["hidden_size"] == 32
    assert os.path.getsize(file) > 0
