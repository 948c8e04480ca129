"""`onward.integrations.trl`: TRL's loop with Onward's sampler and the forward of the trained model."""

import re
import shutil

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make eval-test")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from onward.checkpoint import find_folder
from onward.errors import RequestError
from onward.integrations.trl import GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own
PROMPTS = ["Once upon a time", "The fox", "One day, a girl named Ada"]


def sentences(completions, **_):
    return [-abs(len(re.findall(r"[.!?]", text)) - 3.0) for text in completions]


def trainer(tmp_path, kind=GRPOTrainer, **options):
    folder = shutil.copytree(find_folder("demo"), tmp_path / "demo", dirs_exist_ok=True)
    config = {
        "use_cpu": True, "bf16": False, "max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 1e-4, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1, **options,
    }  # fmt: skip
    return kind(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=sentences,
        args=GRPOConfig(str(tmp_path / "out"), **config),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 8]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


class Watched(GRPOTrainer):
    """It collects the importance ratios of its loss, [B, T] a step, where there are tokens."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ratios = []

    def _compute_loss(self, model, inputs):
        self.mask = inputs["completion_mask"].bool()
        self.old = inputs["old_per_token_logps"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        found = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if torch.is_grad_enabled():
            self.ratios.append((found[0].detach() - self.old).exp()[self.mask])
        return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_the_ratio_of_fresh_samples_is_one(tmp_path, options):
    watched = trainer(tmp_path, Watched, **options)
    before = {name: weight.detach().clone() for name, weight in watched.model.named_parameters()}
    watched.train()
    assert len(watched.ratios) == 3 * options.get("gradient_accumulation_steps", 1)
    assert all(len(ratios) > 0 for ratios in watched.ratios)
    assert all(bool((ratios == 1.0).all()) for ratios in watched.ratios)
    assert not any(torch.equal(weight, before[name]) for name, weight in watched.model.named_parameters())


def test_ratios_differ_from_one_after_the_first_update_of_a_batch(tmp_path):
    watched = trainer(tmp_path, Watched, num_iterations=2, max_steps=4)
    watched.train()
    first, second, third, fourth = watched.ratios
    assert bool((first == 1.0).all())
    assert bool((third == 1.0).all())
    assert not bool((second == 1.0).all())
    assert not bool((fourth == 1.0).all())


def test_masked_texts_train_nothing(tmp_path):
    masked = trainer(tmp_path, max_completion_length=4, mask_truncated_completions=True, max_steps=1)
    before = {name: weight.detach().clone() for name, weight in masked.model.named_parameters()}
    masked.train()
    assert all(torch.equal(weight, before[name]) for name, weight in masked.model.named_parameters())


def test_a_reference_model_starts_without_divergence(tmp_path):
    watched = trainer(tmp_path, Watched, beta=0.1, max_steps=2)
    watched.train()
    divergences = [entry["kl"] for entry in watched.state.log_history if "kl" in entry]
    assert float(divergences[0]) == 0
    assert float(divergences[1]) > 0


@pytest.mark.parametrize("options", [{"bf16": True}, {"generation_kwargs": {"top_k": 5}}], ids=str)
def test_other_samplers_and_forwards_are_refused(tmp_path, options):
    with pytest.raises(RequestError, match=f"GRPOConfig\\({next(iter(options))}="):
        trainer(tmp_path, **options)
