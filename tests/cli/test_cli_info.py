"""`onward info` agrees with the loaded model."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from command_line import Cli

import onward
from onward.cli.info import Fact, as_lines
from onward.util.text import in_bytes


def test_the_machine_alone(cli: Cli) -> None:
    result = cli("info", "--json")
    found = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert set(found) == {"machine", "kernels", "software"}
    assert found["kernels"]["form"] == onward.ops.choice().form
    assert found["software"]["torch"] == torch.__version__
    assert found["software"]["torch_threads"] == torch.get_num_threads()
    assert 1 <= found["machine"]["cores"] <= (os.cpu_count() or 1)


def test_a_checkpoint_and_its_memory(cli: Cli, lm: onward.LanguageModel) -> None:
    found = json.loads(cli("info", "demo", "--context", "100", "--batch", "3", "--json").out)
    checkpoint, memory = found["checkpoint"], found["memory"]
    assert checkpoint["parameters"] == lm.model.num_parameters
    assert checkpoint["vocabulary"] == lm.model.vocab_size
    assert checkpoint["context"] == lm.model.max_seq_len
    assert checkpoint["chat_template"] is True
    assert tuple(checkpoint["eos"]) == lm.defaults.eos
    assert checkpoint["sampling"]["temperature"] == lm.defaults.temperature
    assert memory["cache_bytes"] == lm.new_cache(batch=3, max_len=100).nbytes
    assert memory["total_bytes"] == memory["weights_bytes"] + memory["cache_bytes"]
    assert 0 < memory["weights_bytes"] <= checkpoint["disk_bytes"]


def test_unusual_shapes(cli: Cli, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder = onward.testing.random_checkpoint(
        tmp_path, "mistral", shards=2, sliding_window=32, rope_scaling=scaling, head_dim=8
    )
    found = json.loads(cli("info", str(folder), "--json").out)["checkpoint"]
    lm = onward.load(folder)
    assert found["parameters"] == lm.model.num_parameters
    assert found["sliding_window"] == [32, 32]
    assert found["rope"]["factor"] == 4.0
    assert found["head_dim"] == 8
    assert found["tokenizer_size"] is None
    shown = cli("info", str(folder)).out
    assert "32 in 2 of 2 layers" in shown
    assert "linear x 4" in shown


def test_all_generation_defaults_of_the_checkpoint_are_shown(cli: Cli, tmp_path: Path) -> None:
    folder = onward.testing.random_checkpoint(tmp_path, "llama")
    asked = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2], [3]], "max_new_tokens": 9}
    beams = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "suppress_tokens": [5, 6]}
    (folder / "generation_config.json").write_text(json.dumps(asked | beams | {"eos_token_id": 7}))
    assert json.loads(cli("info", str(folder), "--json").out)["checkpoint"]["sampling"] == {
        "temperature": 0,
        "repetition_penalty": 1.1,
        "logit_bias": [[5, None], [6, None]],
        "no_repeat_ngram_size": 3,
        "bad_words": [[1, 2], [3]],
        "max_new_tokens": 9,
        "n": 2,
        "beams": 4,
        "length_penalty": 0.5,
    }
    shown = cli("info", str(folder)).out
    assert "repetition_penalty 1.1" in shown
    assert "logit_bias of 2" in shown


def test_a_checkpoint_with_beams_generates_them(cli: Cli, tmp_path: Path) -> None:
    folder = onward.testing.random_checkpoint(tmp_path, "llama")
    lm = onward.load(folder)
    expected = [choice.token_ids for choice in lm.generate([5, 6], beams=3, n=2, max_new_tokens=4).choices]
    (folder / "generation_config.json").write_text('{"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4}')
    output = cli("generate", "5 6", "--ids", "--model", str(folder)).out
    assert [[int(token) for token in line.split()] for line in output.split("\n---\n")] == expected


def test_every_fact_is_in_the_text_and_the_json(cli: Cli) -> None:
    shown, found = cli("info", "demo").out, json.loads(cli("info", "demo", "--json").out)
    for section, facts in found.items():
        assert f"{section}\n" in shown
        for name in facts:
            assert f"\n  {name.removesuffix('_bytes').replace('_', ' ')} " in shown


def test_a_context_past_the_models_is_noted(cli: Cli, lm: onward.LanguageModel) -> None:
    assert f"trained for {lm.model.max_seq_len:,}" in cli("info", "demo", "--context", "100000").out


def test_long_facts_wrap_only_on_a_terminal() -> None:
    sections = {"machine": [Fact("instructions", ["avx2"] * 30)]}
    assert len(as_lines(sections, None)) == 2
    heading, first, *rest = as_lines(sections, 60)
    assert heading == "machine"
    assert max(map(len, [first, *rest])) <= 60
    assert rest
    assert all(line.startswith(" " * 20 + "avx2") for line in rest)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (6_101_376, "6.1 MB"), (3 * 10**15, "3e+03 TB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert in_bytes(count) == shown


def test_a_gguf_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "qwen3", use_temp_file=False)
    for name, value in {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64}.items():
        writer.add_uint32(f"qwen3.{name}", value)
    for name, value in {"context_length": 32, "attention.head_count": 2, "attention.key_length": 32}.items():
        writer.add_uint32(f"qwen3.{name}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    shapes = {"token_embd": (8, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {f"blk.0.{name}": (64, 64) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}": (64, 64) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {"blk.0.attn_q_norm": (32,), "blk.0.attn_k_norm": (32,)}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(np.ones(shape, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = json.loads(cli("info", str(file), "--json").out)["checkpoint"]
    assert checkpoint["quantized"] == "Q8_0"
    assert checkpoint["disk_bytes"] == file.stat().st_size
    assert (checkpoint["layers"], checkpoint["vocabulary"], checkpoint["tied_head"]) == (1, 8, True)
    assert cli("generate", "hi", "--model", str(file)).code == 2  # it has no tokenizer
