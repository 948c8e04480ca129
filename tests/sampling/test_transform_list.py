"""The transforms listed by `SamplingParams` are those that all generated code follows."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from onward import Sampler, SamplingParams
from onward.errors import RequestError
from onward.language_model import generation_config
from onward.sampling import History
from onward.sampling.draw import GumbelSampler
from onward.sampling.params import option_names
from onward.sampling.transforms import Adjustment, Filter, ban, transforms_of

DOCS = Path(__file__).parents[2] / "docs"
ADJUSTMENTS, FILTERS = transforms_of(SamplingParams, Adjustment), transforms_of(SamplingParams, Filter)
TRANSFORMS = [*ADJUSTMENTS, *FILTERS]


def options_of(transform) -> list[str]:
    return [field.name for field in dataclasses.fields(transform)]


OPTIONS = [name for transform in TRANSFORMS for name in options_of(transform)]


def test_every_option_except_the_seed_belongs_to_one_transform():
    assert sorted([*OPTIONS, "seed"]) == sorted(options_of(SamplingParams))
    assert sorted(option_names(SamplingParams)) == sorted(options_of(SamplingParams))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_defaults_are_neutral(transform):
    assert not transform.is_on(SamplingParams())


def test_the_docs_list_the_transforms_in_order():
    page = (DOCS / "sampling.md").read_text(encoding="utf-8")
    table = page[page.index("## Order of the transforms") : page.index("## Details of the options")]
    # A constraint is a transform too, and its options are no sampling parameters.
    rows = [line.split("|")[3] for line in table.splitlines() if re.match(r"\| \d+ \| (?!constraint)", line)]
    listed = re.findall(r"`(\w+)`", "".join(rows))
    assert listed == [name for name in OPTIONS if name in listed]
    assert len(listed) >= 20


def test_the_kernels_filters_are_consecutive_and_in_order():
    first = FILTERS.index(GumbelSampler.filters[0])
    assert tuple(FILTERS[first : first + len(GumbelSampler.filters)]) == GumbelSampler.filters


def test_every_option_shared_with_transformers_is_read_from_checkpoints():
    shared = set(vars(transformers.GenerationConfig())) & set(options_of(SamplingParams))
    served = {*generation_config._COMMON_FIELDS, *generation_config._SAMPLING_FIELDS}
    assert len(shared) >= 8
    assert shared <= served


class Counted(History):
    appended = 0

    def append(self, token: int) -> None:
        self.appended += 1
        super().append(token)


def test_a_draft_is_walked_once():
    history, draft = Counted([1, 2]), [3] * 40
    sampler = Sampler([SamplingParams(repetition_penalty=1.1)])
    sampler(torch.randn(1, 41, 8), torch.arange(2, 43)[None], [history], [draft])
    assert history.appended == len(draft)
    assert history.ids.tolist() == [1, 2]


# ── transforms of one's own ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Alternate(Adjustment):
    """alternate: whether the last id is banned."""

    alternate: bool = False

    def check(self):
        if not isinstance(self.alternate, bool):
            raise RequestError("alternate must be True or False")

    def is_on(self):
        return self.alternate

    def changes(self, history):
        return history.ids[-1:], 0.0

    @staticmethod
    def adjust(logits, entries):
        return ban(logits, entries)


@dataclass(frozen=True, kw_only=True)
class Coarse(Filter):
    """step: scores in whole steps."""

    step: float = 0.0

    def check(self):
        pass

    def is_on(self):
        return self.step > 0

    @staticmethod
    def filter(scores, options, draws):
        step = options["step"].unsqueeze(1)
        return torch.where(step > 0, (scores / step).floor() * step, scores)


@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams, Alternate, Coarse):
    """Onward's and these two."""


def test_a_custom_adjustment_applies_to_greedy_rows_and_drafts():
    sampler = Sampler([Params(alternate=True)])
    assert sampler.needs_history
    logits = torch.tensor([[[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]])
    assert sampler(logits, torch.tensor([[1, 2]]), [History([1])], [[0]]).tolist() == [[2, 1]]
    with pytest.raises(RequestError, match="alternate must be"):
        Params(alternate="yes")


def test_a_custom_filter_gets_the_output_of_the_others():
    sampler = Sampler([Params(temperature=0.5, top_k=2, step=3.0, seed=1)])
    assert sampler.pick is None
    scores = sampler.scores(torch.tensor([[2.0, 1.0, 0.0]]))
    assert scores.tolist() == [[0.0, -3.0, float("-inf")]]  # -2 at temperature 0.5, in steps of 3


def test_batched_rows_with_custom_transforms_equal_each_alone():
    torch.manual_seed(0)
    logits, positions = torch.randn(3, 50), torch.tensor([4, 5, 6])
    histories = [History([1, 2]), History([3]), History([4])]
    plain = SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.3, seed=5)
    rows = [plain, Params(temperature=1.0, step=2.0, alternate=True, seed=6), SamplingParams()]
    sampler = Sampler(rows)
    for row, params in enumerate(rows):
        of_row = logits[row : row + 1], positions[row : row + 1], [histories[row]]
        alone = Sampler([params])
        assert sampler(logits, positions, histories)[row] == alone(*of_row)[0]
        assert torch.equal(sampler.scores(logits, positions, histories)[row], alone.scores(*of_row)[0])
