"""What drafting brought one text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """drafted: ids proposed. accepted: those of them that became part of the text. rounds: passes of the model that
    verified a draft; plain steps between them are not counted.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted ids over drafted ones; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """The accepted ids and the target's own, a round; 0 where there was none. (A text that ends inside a draft
        lacks its last round's own.)"""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0
