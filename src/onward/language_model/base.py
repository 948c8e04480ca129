"""What the parts of a `LanguageModel` have in common."""

from abc import ABC, abstractmethod

from onward.language_model.request import RequestReader
from onward.language_model.runner import Runner
from onward.models import Model
from onward.models.adapters import Adapters


class LanguageModelPart(ABC):
    """A base class of `LanguageModel` with some of its methods, which use these attributes."""

    @property
    @abstractmethod
    def model(self) -> Model: ...

    @property
    @abstractmethod
    def adapters(self) -> Adapters: ...

    @property
    @abstractmethod
    def _reader(self) -> RequestReader: ...

    @property
    @abstractmethod
    def _runner(self) -> Runner: ...
