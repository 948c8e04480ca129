"""The draft head of the demo model: it trains as it drafts."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import onward
from onward.decoding.speculation import DraftRow, DraftTarget
from onward.models import architecture_of

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from training.evaluate import load_exported  # noqa: E402
from training.head import Head  # noqa: E402
from training.train_head import TARGET, HeadSettings, HeadTrainer  # noqa: E402

SMALL = HeadSettings(
    draft_vocab_size=200, intermediate_size=32, texts=6, max_tokens=80, tokens_per_step=160, steps=3, warmup_steps=1
)
# Logits of order 10, each of a few hundred roundings of 6e-8 whose order differs.
TOLERANCE = 1e-3


def unrolled(folder: Path, lm: onward.LanguageModel, text: list[int], computed: int) -> list[Tensor]:
    """The logits of the steps of a draft in the training code, for the text that it made. computed: the number of
    positions with features of the model."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    head = Head(SMALL.config(load_exported(TARGET).config), SMALL.draft_vocab_size, len(SMALL.layers))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    states = lm.hidden_states(text[:computed], list(architecture_of(lm.model).cached_taps))
    features = torch.cat(list(states.values()), -1)
    features = torch.nn.functional.pad(features, (0, 0, 0, len(text) - 1 - computed))
    embedded = lm.hidden_states(text[1:], "embedding")
    with torch.no_grad():
        steps = head(features.unsqueeze(0), embedded.unsqueeze(0), SMALL.unrolled)
        return [head.lm_head(hidden[0, computed - 1 + step]) for step, hidden in enumerate(steps)]


def test_a_head_drafts_with_the_logits_that_it_is_trained_with(tmp_path):
    trainer = HeadTrainer(SMALL, tmp_path / "work")
    trainer.run(float("inf"))
    trainer.export(tmp_path / "head")
    lm = onward.load(TARGET, dtype="float32", draft=tmp_path / "head")
    seen: list[Tensor] = []

    def select(logits: Tensor, positions: Tensor) -> Tensor:
        seen.append(logits[0, trainer.ids])
        return logits.argmax(-1)

    drafting = lm.draft.drafter.start(
        DraftTarget(lm.model.vocab_size, lm.model.device, 1, 200, 200, SMALL.unrolled, select, lm.model)
    )
    for prompt in ("The", "Once upon a time there was a fox who"):
        ids = lm.encode(prompt)
        states = lm.hidden_states(ids, list(architecture_of(lm.model).cached_taps))
        features = torch.cat(list(states.values()), -1)
        row = DraftRow(ids, [7], SMALL.unrolled, features=lambda first, last, x=features: x[first:last])
        drafting.join([row])
        (draft,) = drafting.propose([row])
        drafting.leave([row])
        text = [*ids, 7, *draft]
        for got, want in zip(seen, unrolled(tmp_path / "head", lm, text, len(ids)), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        seen.clear()


def test_training_goes_on_from_its_checkpoint(tmp_path):
    whole, parts = (HeadTrainer(SMALL, tmp_path / name) for name in ("whole", "parts"))
    whole.run(float("inf"))
    while parts.step < SMALL.steps:
        parts.run(0.0)
        parts = HeadTrainer(SMALL, tmp_path / "parts")
    assert parts.step == whole.step == SMALL.steps
    for name, parameter in whole.head.state_dict().items():
        assert torch.equal(parameter, parts.head.state_dict()[name]), name
