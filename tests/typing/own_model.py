"""The result of `mypy --strict` for code with its own model. An unnecessary `type: ignore` fails."""

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor, nn

import onward


def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> tuple[Tensor, Any]:
    return params[tokens.long()], cache


def a_forward_and_a_model_decode(module: nn.Module, table: Tensor) -> None:
    model = onward.Model.from_module(module)
    assert_type(onward.decode(model, prompt=[1, 2], max_new_tokens=5), list[int])
    assert_type(onward.decode(model, prompt=np.array([1, 2]), max_new_tokens=5, select=onward.greedy), list[int])
    assert_type(onward.decode(forward, cache=None, params=table, first_token=1, max_new_tokens=5, eos=[2]), list[int])
    assert_type(onward.stream(model, prompt=torch.tensor([1, 2]), max_new_tokens=5), Iterator[int])
    assert_type(onward.generate(model, np.array([[1, 2]]), 5), Tensor)


def a_typo_is_an_error(model: onward.Model) -> None:
    onward.decode(model, prompts=[1, 2], max_new_tokens=5)  # type: ignore[call-arg]
    onward.stream(model, prompt=[1, 2], max_tokens=5)  # type: ignore[call-arg]
    onward.decode(model, prompt="Once", max_new_tokens=5)  # type: ignore[arg-type]
    onward.decode(model, prompt=[1, 2], max_new_tokens=5, eos="stop")  # type: ignore[arg-type]


def bare_logits(tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> Tensor:
    return params[tokens.long()]


def a_forward_that_returns_logits_alone_is_an_error(table: Tensor) -> None:
    onward.decode(bare_logits, cache=None, params=table, first_token=1, max_new_tokens=5)  # type: ignore[arg-type]
