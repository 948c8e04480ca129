"""The methods of a language model that is trained: its parameters, and logprobs with a gradient."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, overload

import torch
from torch import Tensor, nn

from onward.chat import AnswerFormat
from onward.checkpoint import open_checkpoint
from onward.checkpoint.convert import write_folder
from onward.checkpoint.peft import read_adapter, write_adapter
from onward.decoding import Sequence as TextSequence
from onward.decoding.prompt import check_context_length
from onward.errors import CheckpointError, RequestError, UnsupportedArchitectureError
from onward.language_model.base import LanguageModelPart
from onward.language_model.completion import Completion
from onward.language_model.logprobs import ScoredText, TextLogprobs, logprobs_of
from onward.language_model.new_weights import NewWeights, WeightsUpdate
from onward.language_model.options import GenerateOptions
from onward.language_model.request import Ids, as_list, check_top, checked_ids
from onward.models import architecture_of, parameter_shapes, read_config
from onward.models.adapters import LORA_TARGETS, Adapter, LoadedAdapter, TrainedAdapter
from onward.models.architecture import build_trainable_model, weight_dtypes
from onward.sampling import ConstraintState, SamplingParams
from onward.tokenizer import Tokenizer
from onward.util.checks import check_whole, plain_items
from onward.util.files import appears, check_destination
from onward.util.option_names import checks_option_names
from onward.util.text import brief

# A text, or several, whose ids get logprobs.
_Text: TypeAlias = str | Tensor | list[int] | Completion | tuple[str | Ids, Ids]
_Texts: TypeAlias = list[str] | list[Tensor] | list[list[int]] | list[Completion] | list[tuple[str | Ids, Ids]]

AdapterSource: TypeAlias = LoadedAdapter | TrainedAdapter


def reread_adapter(loaded: LoadedAdapter) -> Adapter:
    """A loaded adapter, from its folder. Raises `CheckpointError` if that has changed."""
    assert loaded.folder is not None, "it was loaded from one"
    adapter = read_adapter(loaded.folder)
    if adapter.digest != loaded.digest:
        raise CheckpointError(f"{loaded.folder} has changed since {loaded.name!r} was loaded: reload it")
    return adapter


class Trained(LanguageModelPart):
    """Methods of `LanguageModel`. source: the folder or file that the model was loaded from, if any."""

    source: Path | None = None

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_seq_len: int | None = None,
    ) -> Self:
        """A causal language model of transformers as a language model that is trained: its parameters are the module's.

        The forward is that of the built-in family of its class, over packed copies of the weights, which follow the
        module. For another module, use `Model.from_module`, which decodes through the module's own forward.

        Args:
            module: on the CPU, in eval mode or not: the families have no dropout.
            tokenizer: None if prompts are ids and texts stay empty.
            dtype: that the model computes in; by default the module's.
            max_seq_len: the maximum number of positions; by default the config's max_position_embeddings.

        Raises:
            RequestError: a module of no built-in family, or whose parameters are not those of its class's checkpoints
                (merged experts, an adapter, quantized weights); recurrent layers.
            ConfigError: a field of its config is unknown to the family.
        """
        config, advice = getattr(module, "config", None), "decode through its own forward with Model.from_module"
        if not isinstance(module, nn.Module) or config is None or not hasattr(config, "to_dict"):
            raise RequestError(
                f"LanguageModel.from_module takes a causal language model of transformers; got a "
                f"{type(module).__name__}: {advice}"
            )
        try:
            architecture = read_config(config.to_dict() | {"architectures": [type(module).__name__]})
        except UnsupportedArchitectureError as error:
            raise RequestError(f"{type(module).__name__} is of no built-in family: {advice}") from error
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        shapes = parameter_shapes(architecture)
        for name, shape in shapes.items():
            if name not in own or tuple(own[name].shape) != shape or not own[name].is_floating_point():
                raise RequestError(
                    f"this {type(module).__name__} has no float parameter {name!r} of shape {list(shape)}, as "
                    f"checkpoints of its class do (merged experts? an adapter? quantized weights?): {advice}"
                )
        parameters = {name: own[name] for name in shapes}
        first = next(iter(parameters.values()))
        if any(parameter.device.type != "cpu" for parameter in parameters.values()):
            raise RequestError(f"LanguageModel.from_module needs a module on the CPU; this one is on {first.device}")
        context = max_seq_len or architecture.max_position_embeddings
        return cls(build_trainable_model(architecture, parameters, dtype or first.dtype, context), tokenizer)  # type: ignore[call-arg]

    @checks_option_names
    def new_adapter(
        self, name: str, *, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = LORA_TARGETS, seed: int = 0
    ) -> TrainedAdapter:
        """Make a LoRA adapter to train (arXiv 2106.09685), for frozen weights, which may be quantized.

        Requests choose it with `adapter=name` and get its current values; `parameters(name)` are those of an optimizer.
        At first it changes nothing.

        Args:
            rank, alpha: W becomes W + alpha / rank * B A, with A [rank, K] and B [N, rank].
            targets: the last parts of the names of the linear layers that it changes.
            seed: of the initial A, uniform; B is zero.

        Raises:
            RequestError: the name is taken, the model has no such layers, or it was not made from a checkpoint.
        """
        check_whole("rank", rank, low=1)
        trained = TrainedAdapter(self.model, rank, float(alpha), targets, seed)
        self.adapters.load(name, trained)
        return trained

    def add_adapters(self, sources: Mapping[str, AdapterSource]) -> None:
        """Add the adapters of another model (`Adapters.sources`): from their folders, or copies of trained ones."""
        for name, source in sources.items():
            if isinstance(source, TrainedAdapter):
                self.adapters.load(name, source.copy_for(self.model))
            else:
                self.adapters.load(name, reread_adapter(source), source.folder)

    @checks_option_names
    def named_parameters(self, adapter: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a model loaded with `trainable=True`, or of its module, by their names in checkpoints. A
        tied head is the embedding's parameter. adapter: those of one that is trained. Raises `RequestError` for
        another model or adapter."""
        if adapter is not None:
            return iter(self.adapters.trained(adapter).parameters.items())
        if self.model.trainable is None:
            raise RequestError(
                "this model has no parameters to train: load it with trainable=True, or make an adapter to train with "
                "new_adapter and name it"
            )
        return iter(self.model.trainable.parameters.items())

    @checks_option_names
    def parameters(self, adapter: str | None = None) -> Iterator[Tensor]:
        """Those of `named_parameters`, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters(adapter))

    def save_adapter(self, name: str, destination: str | os.PathLike[str]) -> Path:
        """Write an adapter that is trained as a folder in peft's layout, which `load_adapter` and peft open. The errors
        are those of `save` and `named_parameters`."""
        trained, target = self.adapters.trained(name), Path(destination).expanduser().absolute()
        check_destination(target)
        with appears(target) as partial:
            partial.mkdir()
            write_adapter(trained, partial, None if self.source is None else str(self.source))
        return target

    @property
    def weights_version(self) -> int:
        """The number of the current weights: 0 at first. It increases with each `update_weights`, and when the
        parameters of a trained model have changed. Every token has that of the weights that computed it
        (`Piece.weights_version`, `Completion.weights_versions`)."""
        self.model.refresh()
        return self.model.weights_version

    @checks_option_names
    def update_weights(self, weights: NewWeights, *, version: int | None = None) -> int:
        """Replace all weights in place, as if the model had been loaded with them: in its dtype, quantized and packed
        in the same way. A trained model's parameters get the values. All is checked and converted before any weight
        changes, in as much memory as the weights take. Forwards of other threads end first.

        An engine's running requests are not told: use `Engine.update_weights` for a model that an engine serves.

        Args:
            weights: all weights by stock name: a mapping, or pairs such as `named_parameters()`; of any float dtype and
                on any device. Buffers are ignored, and so is the head of a model that ties it.
            version: the number of the new weights, above the current one's; by default the next one.

        Returns:
            The version.

        Raises:
            RequestError: missing, unknown, misshapen or non-finite weights; a model of no built-in family, of several
                processes, with adapters, or quantized by another tool; a call inside a forward. Nothing has changed.
        """
        return WeightsUpdate(self.model, self._reader.adapters, weights, version).apply()

    def save(self, destination: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> Path:
        """Write the trained model as a folder that `onward.load` and transformers open, with the config.json, tokenizer
        and templates of the folder that it was loaded from.

        Args:
            destination: absent or an empty folder. It is written atomically.
            dtype: of the weights; by default the model's, so that the folder computes the same bits. torch.float32
                keeps the parameters exactly, to continue the training.

        Raises:
            RequestError: the model is not trained, was not loaded from a folder, or the destination exists.
        """
        parameters = dict(self.named_parameters())
        architecture = architecture_of(self.model)
        if self.source is None or architecture is None:
            raise RequestError(
                "this model was not loaded from a folder, so it has no config.json to save (a module has "
                "save_pretrained)"
            )
        dtype = dtype or self.model.params.embed_tokens.weight.dtype
        target = Path(destination).expanduser().absolute()
        check_destination(target)
        with appears(target) as partial:
            own = weight_dtypes(architecture)
            weights = {name: parameter.detach().to(own[name] or dtype) for name, parameter in parameters.items()}
            write_folder(open_checkpoint(self.source), weights, partial)
        return target

    @overload
    def logprobs(
        self,
        text: _Text,
        *,
        adapter: str | None = None,
        sampling: SamplingParams | bool = False,
        top: None = None,
    ) -> Tensor: ...

    @overload
    def logprobs(
        self, text: _Texts, *, adapter: str | None = None, sampling: SamplingParams | bool = False, top: None = None
    ) -> list[Tensor]: ...

    @overload
    def logprobs(
        self, text: _Text, *, adapter: str | None = None, sampling: SamplingParams | bool = False, top: int
    ) -> TextLogprobs: ...

    @overload
    def logprobs(
        self, text: _Texts, *, adapter: str | None = None, sampling: SamplingParams | bool = False, top: int
    ) -> list[TextLogprobs]: ...

    @checks_option_names
    def logprobs(
        self,
        text: Any,
        *,
        adapter: str | None = None,
        sampling: SamplingParams | bool = False,
        top: int | None = None,
    ) -> Any:
        """The logprob of each id of a text, or of several, given the ids before it: those that `generate` and `score`
        report, bit for bit, with a gradient if the model is trained (docs/exact-training.md).

        All texts run in one forward, without padding; its memory grows with their ids.

        Args:
            text: ids or a str, of which all but the first id get a logprob; or a `Completion`, or a pair (prompt, ids),
                of which the generated ids get one. Or a list of those.
            adapter: the name of a loaded adapter; the parameters of one that is trained get the gradient.
            sampling: whether the logprobs are those of the distributions that ids are drawn from, after penalties,
                constraints, temperature and filters (`TokenLogprobs.sampling`), and not the model's own. True: by the
                options of each completion's request. `SamplingParams`: by these, for any texts; `GenerateOptions` add a
                constraint. An id that could not be drawn has -inf.
            top: return the entropy of each distribution too, and the logprobs of this many of its most likely ids.

        Returns:
            float32 [T - 1] for T ids, [generated] for a completion or a pair; with `top` a `TextLogprobs` of that many
            ids. For a list of texts a list of them.

        Raises:
            RequestError: a text of fewer than 2 ids, a model of no built-in family, autocast; sampling of greedy texts
                or beams, with XTC and no seed, or True for a text that is no completion.
            ContextOverflowError: a text longer than the context.
        """
        if top is not None:
            check_top("top", top, self.model.vocab_size)
        texts, is_batch = _as_texts(text)
        scored = [self._scored_text(each, sampling) for each in texts]
        for each in scored:
            check_context_length(len(each.ids), context=self.model.max_seq_len, what="text")
        adapted = None
        if adapter is not None:
            self.adapters.find(adapter)
            adapted = partial(self.adapters.params_of, adapter)
        self.model.refresh()
        with self.model.weights_lock.reading():
            found = logprobs_of(self.model, scored, adapted, top)
        return found if is_batch else found[0]

    def _scored_text(self, text: Any, sampling: SamplingParams | bool) -> ScoredText:
        options, answer = (None, None) if sampling is False else _sampling_of(text, sampling)
        if isinstance(text, Completion):
            text = text.prompt_ids, text.token_ids
        if _is_pair(text):
            prompt, ids = self._reader.prompt_ids(text[0]), plain_items(text[1])
            ids = checked_ids(ids, self.model.vocab_size) if ids else []
        else:
            all_ids = self._reader.prompt_ids(text)
            if len(all_ids) < 2:
                raise RequestError(
                    f"a text needs at least 2 ids for logprobs, since the first one is not predicted; got {all_ids}"
                )
            prompt, ids = all_ids[:1], all_ids[1:]
        drawn = None
        if options is not None:
            options.check_ids(self.model.vocab_size)
            drawn = TextSequence(prompt, 0, sampling=options)
            drawn.token_ids = ids
            if isinstance(options, GenerateOptions):
                constraint = options.new_constraint(self._reader.tokenizer, answer)
                drawn.constraint = None if constraint is None else ConstraintState(constraint, options.stop_ids)
        return ScoredText(prompt + ids, len(prompt), drawn)


def _sampling_of(text: Any, sampling: SamplingParams | bool) -> tuple[SamplingParams, AnswerFormat | None]:
    """The options that a text was drawn with, and the format of a chat's answer."""
    if isinstance(sampling, SamplingParams):
        options, answer = sampling, None
    elif sampling is not True:
        raise RequestError(f"sampling must be True, False or SamplingParams; got {brief(sampling)}", "sampling")
    elif isinstance(text, Completion) and text.request is not None:
        options, answer = text.request.options.with_values(seed=text.seed), text.request.answer
    else:
        raise RequestError(
            "sampling=True takes the options of a Completion's request, and this text has none: give SamplingParams",
            "sampling",
        )
    if options.temperature == 0:
        raise RequestError(
            "sampling= is of texts that are drawn, and a temperature of 0 draws nothing (beams, too): leave it out, or "
            "give SamplingParams with a temperature",
            "sampling",
        )
    if options.seed is None and options.xtc_probability:
        raise RequestError("sampling= with xtc_probability needs the seed that the text was drawn with", "sampling")
    return options if options.seed is not None else options.with_values(seed=0), answer


def _as_texts(text: Any) -> tuple[list[Any], bool]:
    """The texts, and whether the argument was a list of texts."""
    if isinstance(text, Completion) or _is_pair(text):
        return [text], False
    if isinstance(text, list) and any(isinstance(each, Completion) or _is_pair(each) for each in text):
        return text, True
    return as_list(text)


def _is_pair(text: Any) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and not any(isinstance(each, int) for each in text)
