"""Causal families of transformers with tiny random configurations, run through Onward and compared with it."""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import onward
from onward.errors import one_line
from onward.program import ForwardBatch

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# As in tests/models/transformers_reference.py: logits of order 1, of a few hundred roundings each.
TOLERANCE = 1e-4
NEW_TOKENS = 12
# Past the window below.
PROMPT_LENGTHS = (23, 11, 1)
CHUNKS = (512, 4)
VOCAB = 101

# The sizes of every tiny model, under the names that configs have for them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "dim_ff"), 44),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "num_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Additional fields of single families.
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "opt": {"word_embed_proj_dim": 32},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gemma2": {"query_pre_attn_scalar": 8},
    "vaultgemma": {"query_pre_attn_scalar": 8},
    "roberta": {"type_vocab_size": 1},
}
# No decoders of text alone: halves of encoder-decoders, and models of audio, bytes or permutations.
OUTSIDE = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("prophetnet", "trocr", "whisper", "musicgen", "musicgen_melody", "moshi", "blt", "reformer", "xlnet"),
}


@dataclass(frozen=True)
class Trial:
    """How a family ran: "program", "eager", "not" or "untried"; why not better; the largest error of a logit."""

    family: str
    runs: str
    why: str = ""
    error: float = 0.0


def families() -> list[str]:
    """The types of decoder-only causal models of the installed transformers, in order of their names."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - OUTSIDE)


def tiny_config(family: str) -> Any:
    """The family's config with tiny sizes, as far as it has such fields."""
    kind = transformers.CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if known.get("sliding_window") is None:
        sizes.pop("sliding_window", None)
    if known.get("kv_lora_rank"):  # multi-head latent attention has keys for each head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if hasattr(kind(), "is_decoder"):  # BERT and its kin
        sizes["is_decoder"] = True
    return kind(**sizes | FIELDS.get(family, {}))


def tiny_model(family: str) -> Any:
    """The family's model with random weights that make logits of order 1, in float32 with the plain attention."""
    config = tiny_config(family)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(
                1 + 0.1 * noise
                if weight.dim() == 1 and bool((weight == 1).all())
                else noise * 0.5 * weight.shape[-1] ** -0.5
            )
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int] | None:
    """transformers' own greedy continuation; None where the best two logits come within the tolerance of a tie."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] <= 2 * TOLERANCE:
            return None
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


def prompts_for(model: Any) -> list[tuple[list[int], list[int]]]:
    """A prompt of each length with its greedy continuation, such that none hangs on a rounding."""
    found = []
    for length in PROMPT_LENGTHS:
        for seed in range(10):
            generator = torch.Generator().manual_seed(100 * length + seed)
            prompt = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
            text = greedy(model, prompt)
            if text is not None:
                found.append((prompt, text))
                break
    return found


def through_onward(model: Any, folder: Path) -> onward.LanguageModel:
    model.save_pretrained(folder)
    return onward.load(folder, via="transformers")


@torch.no_grad()
def largest_error(lm: onward.LanguageModel, model: Any, prompt: list[int], chunk: int) -> float:
    """Of the logits of a prompt that is fed in chunks, as a program where there is one."""
    expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    run, cache, parts = lm._model_run, lm.new_cache(1, 64), []
    for start in range(0, len(prompt), chunk):
        tokens = torch.tensor([prompt[start : start + chunk]], dtype=torch.int32)
        logits, _, cache, _ = run.step(ForwardBatch(tokens, torch.tensor([start], dtype=torch.int32), cache))
        parts.append(logits[0])
    return _worst(torch.cat(parts), expected)


def _worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())


def attempt(family: str) -> Trial:
    """Run a tiny model of the family whole, in chunks, and in a batch of different lengths."""
    try:
        model = tiny_model(family)
        cases = prompts_for(model)
    except TimeoutError:
        raise
    except Exception as error:
        return Trial(family, "untried", f"no tiny model: {_message_of(error)}")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            lm = through_onward(model, Path(folder))
        except Exception as error:
            return Trial(family, "not", _message_of(error))
        try:
            worst = max(largest_error(lm, model, prompt, chunk) for prompt, _ in cases for chunk in CHUNKS)
            texts = lm.generate(
                [prompt for prompt, _ in cases], max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True
            )
        except Exception as error:
            return Trial(family, "not", _message_of(error))
        if worst > TOLERANCE or [text.token_ids for text in texts] != [text for _, text in cases]:
            return Trial(family, "not", f"its logits are off by {worst:.1g}", worst)
        why = lm._model_run.why_eager
        return Trial(family, "eager" if why else "program", why, worst)


def _message_of(error: Exception) -> str:
    return one_line(error) if isinstance(error, onward.OnwardError) else f"{type(error).__name__}: {one_line(error)}"
