"""Written by .ci/generate.py from the declarations of options."""

from dataclasses import dataclass
from pathlib import Path

from onward.cli.flags import flag
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The options of `SamplingParams`, the maximum length and stop strings.

    None, False and [] leave an option to the checkpoint's defaults.
    """

    max_new_tokens: int | None = flag("Maximum number of tokens to generate.", "-n", group=LENGTH)
    temperature: float | None = flag("Sampling temperature; 0: greedy.", "-t", group=SAMPLING)
    top_k: int | None = flag("Sample from the N most likely tokens; 0: all.", group=SAMPLING)
    top_p: float | None = flag(
        "Sample from the top tokens of total probability X; 1: all, 0: the likeliest.", group=SAMPLING
    )
    min_p: float | None = flag("Drop tokens below X times the top probability; 0: none.", group=SAMPLING)
    typical_p: float | None = flag(
        "Sample from the most typical tokens of total probability X; 1: all.", group=SAMPLING
    )
    xtc_probability: float | None = flag("Probability of dropping all top choices but the last (XTC).", group=SAMPLING)
    xtc_threshold: float | None = flag("Minimum probability of a top choice (XTC).", group=SAMPLING)
    repetition_penalty: float | None = flag("Penalize tokens already in the text; 1: off.", group=REPETITION)
    presence_penalty: float | None = flag("Subtract X from the logits of generated tokens; 0: off.", group=REPETITION)
    frequency_penalty: float | None = flag("Subtract X for each time a token was generated; 0: off.", group=REPETITION)
    dry_multiplier: float | None = flag(
        "Strength of the penalty on repeated sequences (DRY); 0: off.", group=REPETITION
    )
    dry_base: float | None = flag("Growth of the DRY penalty with the length of the repetition.", group=REPETITION)
    dry_allowed_length: int | None = flag("Longest repetition without a DRY penalty, in tokens.", group=REPETITION)
    no_repeat_ngram_size: int | None = flag("Never repeat a sequence of N tokens; 0: off.", group=REPETITION)
    bad_words: list[str] | None = flag("Never generate TEXT.", "--bad-word", group=REPETITION)
    min_new_tokens: int | None = flag("Ban end tokens until N tokens are generated.", group=LENGTH)
    eos: list[int] | None = flag("Stop after token ID.", group=LENGTH, metavar="ID")
    ignore_eos: bool = flag("Do not stop at end tokens.", group=LENGTH, default=False)
    seed: int | None = flag("Random seed.", group=SAMPLING, show_default="a new one each time")
    stop: list[str] | None = flag("Stop before TEXT.", group=LENGTH)
    reasoning_budget: int | None = flag("Maximum number of tokens of reasoning in a chat; 0: none.", group=LENGTH)
    reasoning_budget_message: str | None = flag(
        "End reasoning that --reasoning-budget cuts with TEXT.", group=LENGTH, show_default="that it must answer"
    )


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The other options of `GenerateOptions`.

    None, False and [] leave an option to the checkpoint's defaults.
    """

    time_limit: float | None = flag("Stop after SECONDS.", group=LENGTH, metavar="SECONDS")
    n: int | None = flag("Number of texts, separated by '---' lines.", "--samples", group=TEXTS)
    beams: int | None = flag("Number of beams; prints the best text, or the best --samples.", group=TEXTS)
    length_penalty: float | None = flag("Length penalty of beam search; above 0 favors long texts.", group=TEXTS)
    logprobs: int | None = flag("With --json, include logprobs of each token and the N most likely.", group=OUTPUT)
    prompt_logprobs: int | None = flag("The same for the prompt's tokens.", group=OUTPUT)
    sampling_logprobs: bool = flag(
        "With --logprobs, include those of the distribution after filters.", group=OUTPUT, default=False
    )
    steer: Path | None = flag("Steer with the control vector in FILE, a GGUF file.", "--control-vector", group=OUTPUT)
    json_schema: Path | None = flag("Generate JSON that conforms to the JSON Schema in FILE.", group=STRUCTURE)
    regex: str | None = flag(
        "Generate text that matches PATTERN from start to end.", group=STRUCTURE, metavar="PATTERN"
    )
    grammar: Path | None = flag("Generate text that matches the Lark or GBNF grammar in FILE.", group=STRUCTURE)
    choice: list[str] | None = flag("Generate TEXT or another --choice.", group=STRUCTURE)
