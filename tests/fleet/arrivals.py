"""Arrivals in the shape of published traces. None is downloaded: the assumptions are listed here.

Sizes: prompts and answers are log-normal, with means near those of Azure's conversations (about 1,150 and 210 tokens;
Splitwise, arXiv 2311.18677), limited to what the engine serves. Bursts: the rate changes every ten seconds by a
factor that is gamma-distributed with a coefficient of variation of 0.5 (BurstGPT, arXiv 2401.17644, fits gamma laws).
Prefixes: about half of a prompt's blocks were in earlier ones (Mooncake, arXiv 2407.00079): groups with a common
beginning of 512 tokens, chosen by Zipf's law, and conversations whose turns repeat all earlier turns.
"""

import math
import random
from collections.abc import Iterator

from simulated_fleet import Arrival
from simulated_replica import BLOCK

PROMPT, ANSWER = (900, 0.8), (210, 0.9)  # mean, sigma of the logarithm
LONGEST_PROMPT, LONGEST_ANSWER = 2_000, 500
BEGINNING, GROUPS, ZIPF = 512, 400, 1.1
TURN, MORE_TURNS = 25.0, 0.5  # seconds between turns in the mean; the chance of another one
BURST, BURST_SECONDS = 0.5, 10.0


def trace(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Requests during a number of seconds, with a mean of `rate` per second."""
    generator = random.Random(seed)
    return sorted(_arrivals(rate, seconds, generator), key=lambda arrival: arrival.at)


def _arrivals(rate: float, seconds: float, generator: random.Random) -> Iterator[Arrival]:
    weights = [1 / (group + 1) ** ZIPF for group in range(GROUPS)]
    turns = 1 / (1 - MORE_TURNS)
    at, now_rate, until = 0.0, 0.0, 0.0
    fresh = 1_000_000
    while at < seconds:
        if at >= until:
            now_rate = rate / turns * generator.gammavariate(1 / BURST**2, BURST**2)
            until = at + BURST_SECONDS
        step = generator.expovariate(max(now_rate, 1e-9))
        if at + step > until:
            at = until
            continue
        at += step
        group = generator.choices(range(GROUPS), weights)[0]
        begun, tokens, time = [-group * 1000 - each for each in range(BEGINNING // BLOCK)], BEGINNING, at
        while True:  # the turns of a conversation
            tokens = min(LONGEST_PROMPT, tokens + _size(generator, PROMPT, LONGEST_PROMPT) // 2)
            answer = _size(generator, ANSWER, LONGEST_ANSWER)
            while len(begun) < tokens // BLOCK:
                fresh += 1
                begun.append(fresh)
            if time < seconds:
                yield Arrival(time, tokens, answer, f"group {group}", tuple(begun))
            if generator.random() >= MORE_TURNS or tokens + answer >= LONGEST_PROMPT:
                break
            tokens += answer
            time += generator.expovariate(1 / TURN)


def _size(generator: random.Random, law: tuple[float, float], most: int) -> int:
    mean, sigma = law
    return max(1, min(most, round(generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
