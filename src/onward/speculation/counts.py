"""The counts of drafted and accepted ids of one text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """drafted: how many ids were proposed.
    accepted: how many of them became part of the text.
    rounds: passes of the model that verified a draft; plain steps between them are not counted.
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
        """How many ids a round brings: the accepted ones and one of the target's own. 0 where there was no round.

        A text that ends inside a draft has no id of the target's own in its last round; it is counted all the same.
        """
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0
