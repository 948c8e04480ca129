"""TRL's GRPO trainer with Onward's sampler and forward (`onward[trl]`).

from onward.integrations.trl import GRPOTrainer

It is a drop-in replacement of `trl.GRPOTrainer` on the CPU. The weights that are trained are those that sample, and the
logprobs of the loss are those that were sampled from, bit for bit: the importance ratio of fresh samples is exactly 1.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer as TrlTrainer

from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.sampling import SamplingParams

# Arguments of `GRPOConfig` that choose another sampler or forward, with the values that leave them off.
_OTHERS = {
    "use_vllm": False, "use_transformers_continuous_batching": False, "generation_kwargs": None, "bf16": False,
    "fp16": False, "cast_lm_head_to_fp32": False,
}  # fmt: skip


class GRPOTrainer(TrlTrainer):  # type: ignore[misc]  # TRL is checked with it and without
    """`trl.GRPOTrainer` for a model that `LanguageModel.from_module` takes; its arguments, losses and metrics.

    Temperature, top_p, top_k, min_p and repetition_penalty of `GRPOConfig` apply to sampling and to the logprobs of the
    loss. The model computes in its own dtype: `GRPOConfig` needs bf16=False. Seeds come from torch's default generator,
    which TRL seeds.

    lm: the model. sampling: how it samples.

    Raises:
        RequestError: a model that `from_module` does not take, or arguments for another sampler or forward.
    """

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        for name, off in _OTHERS.items():
            if getattr(self.args, name) != off:
                raise RequestError(f"onward's GRPOTrainer samples and computes itself: give GRPOConfig({name}={off})")
        self.lm = LanguageModel.from_module(self.model)
        self._reference = None if self.ref_model is None else LanguageModel.from_module(self.ref_model)
        self.sampling = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            eos=self.eos_token_ids,
        )

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        if images is not None or multimodal_fields:
            raise RequestError("onward's GRPOTrainer takes texts only; got images")
        chosen = {name: getattr(self.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "eos")}
        texts = self.lm.generate(
            prompt_ids,
            max_new_tokens=self.max_completion_length,
            repetition_penalty=self.sampling.repetition_penalty,
            logprobs=0,
            sampling_logprobs=True,
            **chosen,
        )
        logprobs = [[float(token.sampling or 0.0) for token in text.logprobs or ()] for text in texts]
        return [text.token_ids for text in texts], logprobs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output | {"old_per_token_logps": output["sampling_per_token_logps"]}

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """The logprobs and entropies of completions, float32 [B, logits_to_keep]; 0 for padding."""
        if compute_aux_loss:
            raise RequestError("onward's GRPOTrainer has no router loss: give router_aux_loss_coef=0")
        lm = self.lm if self.accelerator.unwrap_model(model) is self.accelerator.unwrap_model(self.model) else None
        lm = lm or self._reference
        assert lm is not None, "a trainer has a policy and a reference model"
        texts = []
        for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
            prompt, output = (slice(None, -logits_to_keep), slice(-logits_to_keep, None))
            texts.append((ids[prompt][mask[prompt]], ids[output][mask[output]]))
        found = []
        for first in range(0, len(texts), batch_size or len(texts)):
            found += lm.logprobs(texts[first : first + (batch_size or len(texts))], sampling=self.sampling, top=0)

        def padded(rows: list[Tensor]) -> Tensor:
            return pad_sequence([*rows, torch.zeros(logits_to_keep)], batch_first=True)[:-1]

        logprobs = padded([each.chosen for each in found])
        if torch.is_grad_enabled() and not logprobs.requires_grad:  # all completions are masked
            logprobs.requires_grad_()
        return logprobs, padded([each.entropy for each in found]) if compute_entropy else None, None
