"""Train the demo model by reinforcement learning, with a reward that a function verifies: GRPO in plain torch.

    python examples/grpo.py                     # 60 steps, a few minutes on two cores
    python examples/grpo.py --steps 20 --save stories

The model learns to tell stories whose first 48 tokens have exactly five sentences. Each step samples a group of texts
for each prompt, rewards those with five sentences, and raises the logprobs of texts that did better than their group
(Shao et al., arXiv 2402.03300). Sampling and training are one forward: the importance ratio of a fresh sample is
exactly 1, which the loop checks. docs/exact-training.md explains it.
"""

import argparse
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import onward

SENTENCES, NEW_TOKENS = 5, 48
ANIMALS = ["owl", "fox", "bear", "camel", "frog", "robin", "snail", "panda", "goat", "mouse", "hen", "cat"]
HELD_OUT = ["dog", "wolf", "duck", "horse", "rabbit", "whale"]  # of prompts that are only evaluated


def messages(animal: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a story about a {animal}."}]


def sentences(text: str) -> int:
    return len(re.findall(r"[.!?](?=\W|$)", text))


def reward(text: str) -> float:
    """1 for the right number of sentences; less the further it is off."""
    return 1.0 if sentences(text) == SENTENCES else -0.25 * abs(sentences(text) - SENTENCES)


def sampled(lm: onward.LanguageModel, animals: Sequence[str], group: int, seed: int) -> list[list[onward.Completion]]:
    """A group of texts for each animal, from the model's own distribution."""
    options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "logprobs": 0, "ignore_eos": True}
    prompts = [lm.chat_prompt(messages(animal)) for animal in animals]
    seeds: Any = [{"seed": seed * 1000 + index} for index in range(len(prompts))]
    return [each.choices for each in lm.generate(prompts, n=group, per_prompt=seeds, **options)]


def accuracy(lm: onward.LanguageModel, animals: Sequence[str], group: int = 32) -> float:
    """The share of texts with the right number of sentences, always over the same random numbers."""
    texts = [text for texts in sampled(lm, animals, group, seed=10_000) for text in texts]
    return sum(sentences(text.text) == SENTENCES for text in texts) / len(texts)


def advantages(rewards: Tensor) -> Tensor:
    """[prompts, group]: how many standard deviations of its group each reward is above the mean."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss_of(logprobs: Sequence[Tensor], old: Sequence[Tensor], advantage: Sequence[float], clip: float) -> Tensor:
    """PPO's clipped objective (Schulman et al., arXiv 1707.06347), per token, with one length for all texts."""
    total = torch.zeros(())
    for new, before, value in zip(logprobs, old, advantage, strict=True):
        ratio = (new - before).exp()
        total = total - torch.minimum(ratio * value, ratio.clamp(1 - clip, 1 + clip) * value).sum()
    return total / (len(logprobs) * NEW_TOKENS)


def train(
    lm: onward.LanguageModel, steps: int, rate: float, seed: int, *, prompts: int = 6, group: int = 8
) -> list[float]:
    """Train, and return the share of right texts in each step."""
    shares = []
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate, weight_decay=0.0)
    draws, began = random.Random(seed), time.monotonic()
    for step in range(steps):
        groups = sampled(lm, draws.sample(ANIMALS, prompts), group, seed=seed * steps + step)
        texts = [text for each in groups for text in each]
        rewards = torch.tensor([[reward(text.text) for text in each] for each in groups])
        old = [torch.tensor([token.chosen for token in text.logprobs or ()]) for text in texts]

        logprobs = lm.logprobs(texts)
        assert all(torch.equal(new.detach(), before) for new, before in zip(logprobs, old, strict=True))
        loss = loss_of(logprobs, old, advantages(rewards).flatten().tolist(), clip=0.2)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()

        right = float((rewards == 1.0).float().mean())
        shares.append(right)
        print(f"step {step + 1:3}: {right:4.0%} right, reward {rewards.mean():.2f}, {time.monotonic() - began:.0f} s")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="folder for the trained model, which transformers opens too")
    options = parser.parse_args()
    lm = onward.load("demo", trainable=True)
    before = accuracy(lm, HELD_OUT)
    train(lm, options.steps, options.rate, options.seed)
    print(f"held-out prompts: {before:.0%} right before, {accuracy(lm, HELD_OUT):.0%} after")
    print(lm.chat(messages("dog"), max_new_tokens=NEW_TOKENS, seed=0).text)
    if options.save:
        print(f"saved to {lm.save(options.save)}")


if __name__ == "__main__":
    main()
