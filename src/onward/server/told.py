"""How far a stream has been told. Every event's id says it, so that a stream can go on after any of them."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, Self

from onward.completion import Completion, Piece
from onward.errors import OnwardError

_TRACK = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*(?:\+[0-9]{1,9})?")


class Events(Protocol):
    """An answer as events, each as it goes over the wire. They depend on the pieces alone, not on how these came.

    singly: whether a piece may have several events. Then pieces are told one by one, so that ids do not depend on which
    came together.
    """

    singly: bool

    def begin(self, at: int) -> list[str]: ...

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """Of pieces of one text, in order: each event with how many of the pieces are told whole with it."""
        ...

    def end(self, at: int, completion: Completion) -> list[str]: ...

    def finish(self) -> list[str]: ...

    def error(self, error: OnwardError) -> list[str]: ...


class Track:
    """How far the answer to one request has been told.

    counts: how many pieces of each text. beside: how many events beside those of whole pieces: of the beginning, of a
    piece that is told in part, of the end.
    """

    def __init__(self, counts: Sequence[int], beside: int = 0) -> None:
        self.counts, self.beside = list(counts), beside

    def __str__(self) -> str:
        return ",".join(map(str, self.counts)) + (f"+{self.beside}" if self.beside else "")

    @classmethod
    def of(cls, text: str) -> Self:
        counts, _, beside = text.partition("+")
        return cls(list(map(int, counts.split(","))), int(beside or 0))

    def or_later(self, other: "Track") -> "Track":
        """The later of both for each text: one of them may be ahead in one text and behind in another."""
        counts = list(map(max, self.counts, other.counts))
        ahead = [track.beside for track in (self, other) if track.counts == counts]
        return Track(counts, max(ahead, default=self.beside))

    @property
    def place(self) -> tuple[int, int]:
        """Grows with every event that is of no whole piece."""
        return sum(self.counts), self.beside


class Told:
    """How far a stream has been told. tracks: of each request. last: how many events after the last request's end."""

    def __init__(self, tracks: Sequence[Track], last: int = 0) -> None:
        self.tracks, self.last = tracks, last

    @classmethod
    def nothing(cls, texts: Sequence[int]) -> Self:
        """texts: how many each request has."""
        return cls([Track([0] * count) for count in texts])

    @classmethod
    def of(cls, text: str, texts: Sequence[int]) -> Self | None:
        """What `str` wrote of a stream with so many texts; None for any other text."""
        tracks, _, last = text.partition("/")
        each = tracks.split(";")
        if not all(map(_TRACK.fullmatch, each)) or not re.fullmatch("[0-9]{0,9}", last):
            return None
        told = cls([Track.of(track) for track in each], int(last or 0))
        return told if [len(track.counts) for track in told.tracks] == list(texts) else None

    def __str__(self) -> str:
        return ";".join(map(str, self.tracks)) + (f"/{self.last}" if self.last else "")


class Teller:
    """Writes events with their ids, but for those that were told before.

    events: of the answer. prefix: what every id begins with. before: how far the stream was told before.
    known: how many ids of each text whoever calls the server knows. told: how far it is told now.
    """

    def __init__(self, events: Events, prefix: str, before: Told, known: Sequence[int]) -> None:
        self._events, self._prefix, self._before = events, prefix, before
        self.told = Told.nothing([len(track.counts) for track in before.tracks])
        self._is_first = str(before) == str(self.told)  # nothing was told before
        self._begun = [0] * len(before.tracks)
        self._unknown = list(known)  # ids of each text that are still to come before those to report
        self._emitted: list[list[int]] = [[] for _ in known]

    @property
    def id(self) -> str:
        """Of the event that was told last, here or before."""
        if self._is_first:
            return f"{self._prefix}{self.told}"
        tracks = [now.or_later(before) for now, before in zip(self.told.tracks, self._before.tracks, strict=True)]
        return f"{self._prefix}{Told(tracks, max(self.told.last, self._before.last))}"

    def begin(self) -> list[str]:
        events: list[str] = []
        for at, track in enumerate(self.told.tracks):
            events += self._beside(at, self._events.begin(at))
            self._begun[at] = track.beside
        return events

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """What a request has brought."""
        if len(pieces) == 1 or len(self.told.tracks[at].counts) == 1:
            return self._run(at, pieces)
        by_text = sorted(pieces, key=lambda piece: piece.choice)
        runs = [list(run) for _, run in groupby(by_text, key=lambda piece: piece.choice)]
        return [event for run in runs for event in self._run(at, run)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return self._beside(at, self._events.end(at, completion))

    def finish(self) -> list[str]:
        events: list[str] = []
        for event in self._events.finish():
            self.told.last += 1
            if self.told.last > self._before.last:
                events.append(self._written(event))
        return events

    def error(self, error: OnwardError) -> list[str]:
        """It has no id: a client may come again for what it missed."""
        return self._events.error(error)

    def emitted(self) -> list[list[int]]:
        """The ids of each text since the last call."""
        emitted, self._emitted = self._emitted, [[] for _ in self._emitted]
        return emitted

    def _run(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """Pieces of one text."""
        choice = pieces[0].choice
        track, before = self.told.tracks[at], self._before.tracks[at]
        self._note(at, choice, pieces)
        if self._events.singly:
            return [event for piece in pieces for event in self._part(at, choice, [piece])]
        old = before.counts[choice] - track.counts[choice]
        if 0 < old < len(pieces):
            return self._part(at, choice, pieces[:old]) + self._part(at, choice, pieces[old:])
        return self._part(at, choice, pieces)

    def _part(self, at: int, choice: int, pieces: Sequence[Piece]) -> list[str]:
        """Pieces that were all told before, or none of which was told whole."""
        track, before = self.told.tracks[at], self._before.tracks[at]
        first = track.counts[choice]
        events: list[str] = []
        for whole, event in self._events.pieces(at, pieces):
            if first + whole > track.counts[choice]:
                track.counts[choice], track.beside = first + whole, self._begun[at]
                is_new = track.counts[choice] > before.counts[choice]
            else:
                track.beside += 1
                is_new = track.place > before.place
            if is_new:
                events.append(self._written(event))
        if track.counts[choice] < first + len(pieces):
            track.counts[choice], track.beside = first + len(pieces), self._begun[at]
        return events

    def _beside(self, at: int, told: Sequence[str]) -> list[str]:
        """Events of no pieces."""
        track, before = self.told.tracks[at], self._before.tracks[at]
        events = []
        for event in told:
            track.beside += 1
            if track.place > before.place:
                events.append(self._written(event))
        return events

    def _written(self, event: str) -> str:
        return f"id: {self.id}\n{event}"

    def _note(self, at: int, choice: int, pieces: Sequence[Piece]) -> None:
        text = sum(len(track.counts) for track in self.told.tracks[:at]) + choice
        known = min(self._unknown[text], len(pieces))
        self._unknown[text] -= known
        self._emitted[text] += [piece.token_id for piece in pieces[known:]]
