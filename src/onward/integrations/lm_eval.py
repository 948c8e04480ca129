"""Onward as a model for lm-evaluation-harness (`onward[eval]`).

from onward.integrations.lm_eval import OnwardLM

lm_eval.simple_evaluate(OnwardLM("Qwen/Qwen3-0.6B", quantize="int4"), tasks=["arc_easy"])

Prompts, tokenization and metrics match the harness's class for transformers (`--model hf`), so the results are the same
up to the rounding of logits.
"""

import datetime
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import onward
from onward.errors import RequestError
from onward.language_model import Completion, GenerateOptionsDict, LanguageModel
from onward.tokenizer import JsonTokenizer
from onward.util.checks import check_whole

_MAX_NEW_TOKENS = 256  # the default of the harness's class for transformers

# ((context, continuation), ids of the context, ids of the continuation)
_Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("onward")
class OnwardLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A language model with the interface of the harness.

    Continuations of one context are scored together, so that the context is processed once. Contexts with a common
    prefix, such as the same examples, follow each other to use the prefix cache (`LanguageModel.prefix_memory`).

    pretrained: a loaded model, or a source as for `onward.load`.
    max_length: the maximum number of ids of a context and its continuation; longer contexts lose their first ids. By
        default the model's context.
    batch_size: how many prompts are completed together.
    adapter: the name of a loaded adapter for all requests, for example from `load`: adapters={name: source}.
    seed: of sampled answers: each has a seed of its own, derived from it and from the place of its document in the
        task, so that two models draw with the same noise. By default the seeds are fresh.
    max_batch_size, device: passed by the harness; device as for `onward.load`.
    load: other arguments of `onward.load`, such as quantize="int4".

    Raises `RequestError` for a model without a tokenizer, an adapter that is not loaded, or options out of range.
    """

    def __init__(
        self,
        pretrained: LanguageModel | str,
        *,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        adapter: str | None = None,
        seed: int | None = None,
        **load: Any,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, LanguageModel):
            pretrained = onward.load(pretrained, device=device or "auto", **load)
        elif load:
            raise RequestError(f"{', '.join(load)}: options of onward.load, but the model is loaded already")
        if pretrained.tokenizer is None:
            raise RequestError("tasks are texts, but this model has no tokenizer")
        limit = pretrained.model.max_seq_len
        pretrained.adapters.find(adapter)
        self.lm = pretrained
        self.adapter = adapter
        self.seed = seed
        self._now = datetime.datetime.now(datetime.UTC)  # the same for all prompts, since templates may write the date
        self.max_length = min(max_length or 2**30, limit or 2**30)
        self.batch_size = 8 if batch_size in (None, "auto") else int(batch_size or 8)
        check_whole("max_length", self.max_length, low=2)
        check_whole("batch_size", self.batch_size, low=1)
        self._prefix_text = self._tokens[self.prefix_token_id] if self._tokens else None

    @property
    def prefix_token_id(self) -> int:
        bos = None if self.lm.tokenizer is None else self.lm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.lm.tokenizer
        assert tokenizer is not None, "checked by __init__"
        ids = [tokenizer.eos_id, *sorted(self.lm.defaults.eos or ())]
        if (eos := next((token for token in ids if token is not None), None)) is None:
            raise RequestError("tasks need an id that ends texts, but neither tokenizer nor checkpoint names one")
        return eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template writes the BOS itself
            add_special_tokens = not (self._prefix_text and string.startswith(self._prefix_text))
        return self.lm.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        for index, (context, _) in enumerate(cut):
            places[tuple(context)].append(index)
        results: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring continuations")
        for shared, indices in sorted(places.items()):
            continuations = [cut[index][1] for index in indices]
            scores = self.lm.score_continuations(list(shared), continuations, logprobs=1, adapter=self.adapter)
            for index, score in zip(indices, scores, strict=True):
                pairs = zip(score.token_ids, score.logprobs, strict=True)
                greedy = all(token is None or token.top[0][0] == id for id, token in pairs)
                results[index] = score.log_likelihood, greedy
                self._remember("loglikelihood", requests[index][0], results[index])
            bar.update(len(indices))
        bar.close()
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text. Long ones are divided into windows that score every id once."""
        windows: list[_Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            # One id less than the context, because the harness adds one before each window.
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            before = len(windows)
            windows += [(None, *make_disjoint_window(part)) for part in parts]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        results = []
        for request, count in zip(requests, counts, strict=True):
            results.append(sum(next(scores)[0] for _ in range(count)))
            self._remember("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        results: dict[int, str] = {}
        seeds = self._seeds(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Completing prompts")
        for indices in self._batches(requests):
            options = self._options(requests[indices[0]].args[1])
            longest = self.max_length - options["max_new_tokens"]
            if longest < 1:
                raise RequestError(
                    f"a task asks for {options['max_new_tokens']} tokens, but the context is {self.max_length}: "
                    "give it a smaller max_gen_toks"
                )
            prompts = [self.tok_encode(requests[index].args[0])[-longest:] for index in indices]
            sampled = self.seed is not None and options["temperature"] > 0
            own: list[GenerateOptionsDict] = [{"seed": seeds[index]} if sampled else {} for index in indices]
            completions: list[Completion] = self.lm.generate(prompts, adapter=self.adapter, per_prompt=own, **options)
            for index, completion in zip(indices, completions, strict=True):
                results[index] = postprocess_generated_text(completion.text, list(options["stop"]), None)
                self._remember("generate_until", requests[index].args, results[index])
            bar.update(len(indices))
        bar.close()
        return [results[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.lm.chat_template is None:
            raise RequestError("this model has no chat template: evaluate it without one")
        return self.lm.chat_template.render(chat_history, self._now, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, which identifies results in the harness."""
        template = self.lm.chat_template
        return template.sources[0] if chat_template and template is not None else None

    @property
    def tokenizer_name(self) -> str:
        tokens = "\n".join(map(str, self._tokens))
        return f"onward-{hashlib.sha256(tokens.encode()).hexdigest()[:16]}"

    @property
    def _tokens(self) -> list[str | None]:
        """The token of every id; empty for a custom tokenizer."""
        return self.lm.tokenizer.tokens() if isinstance(self.lm.tokenizer, JsonTokenizer) else []

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Truncate the context at its beginning, so that both fit."""
        if len(continuation) >= self.max_length:
            raise RequestError(
                f"a continuation of {len(continuation)} ids leaves no room for a context: the maximum is "
                f"{self.max_length} for both"
            )
        return context[max(0, len(context) + len(continuation) - self.max_length) :], continuation

    def _batches(self, requests: Sequence[Instance]) -> Iterator[list[int]]:
        """Batches of request indices with equal options, longest prompts first."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        for indices in groups.values():
            indices.sort(key=lambda index: -len(requests[index].args[0]))
            for begin in range(0, len(indices), self.batch_size):
                yield indices[begin : begin + self.batch_size]

    def _seeds(self, requests: Sequence[Instance]) -> list[int]:
        """A seed for each request, by its task, its document and how many of the document's answers are before it."""
        counts: Counter[tuple[Any, ...]] = Counter()
        seeds = []
        for request in requests:
            place = request.task_name, request.doc_id, request.idx
            digest = hashlib.blake2b(f"{self.seed} {place} {counts[place]}".encode(), digest_size=8)
            seeds.append(int.from_bytes(digest.digest(), "little"))
            counts[place] += 1
        return seeds

    def _options(self, task_options: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(normalize_gen_kwargs(dict(task_options), _MAX_NEW_TOKENS))
        temperature = options.pop("temperature", 1.0) if options.pop("do_sample") else 0.0
        stop = [text for text in options.pop("until") if text]
        length = options.pop("max_gen_toks")
        return {"n": 1, "beams": 1, "temperature": temperature, "max_new_tokens": length, "stop": stop} | options

    def _remember(self, kind: str, arguments: Any, result: Any) -> None:
        if arguments is not None:
            self.cache_hook.add_partial(kind, arguments, result)
