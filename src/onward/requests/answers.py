"""The answers to chats, read as messages while their tokens come."""

from onward.decoding import Sequence
from onward.messages import AnswerReading, AssistantMessage, MessageDelta


class AnswerReader:
    """Reads the text of one sequence of a chat as a message.

    seed: what the text is drawn with.
    """

    def __init__(self, reading: AnswerReading, sequence: Sequence, seed: int | None) -> None:
        self._sequence = sequence
        self._parser = reading.parser(sequence.prompt, seed)
        self._deltas: list[MessageDelta] = []
        self._characters = 0  # of the text that were read
        self._marks = 0

    def read(self, at: int, text: str) -> MessageDelta:
        """What comes of the message with the token of index `at` and the text that became final with it."""
        first, end = self._characters, self._characters + len(text)
        for mark in self._sequence.marks[self._marks :]:
            if mark.at > at or mark.position > end:  # a later token's, or one that text before it holds back
                break
            self._parser.feed(text[self._characters - first : mark.position - first])
            self._parser.feed(mark.text)
            self._characters = mark.position
            self._marks += 1
        self._parser.feed(text[self._characters - first :])
        self._characters = end
        if self._sequence.finish_reason is not None and at + 1 == len(self._sequence.token_ids):
            self._parser.finish()
        delta = self._parser.take()
        self._deltas.append(delta)
        return delta

    def message(self) -> AssistantMessage:
        """What the deltas add up to. Text that was held back when the sequence was ended from outside is no part."""
        return AssistantMessage.of(self._deltas)

    def reasoning_tokens(self) -> int:
        """How many ids have characters of the reasoning, or a part of one. Marks around it do not count."""
        spans, ends = self._parser.reasoning_spans, self._sequence.ends
        count = waiting = begin = 0
        for at, end in enumerate(ends, 1):
            waiting += 1  # with those that end inside a character, which is in the next
            if end == begin and at < len(ends):
                continue
            after = max(end, begin + 1)  # an unfinished character at the end takes a place, too
            if any(first < after and last > begin for first, last in spans):
                count += waiting
            waiting, begin = 0, end
        return count


def whole_answer(reading: AnswerReading, sequence: Sequence, seed: int | None) -> AnswerReader:
    """A reader that has read a text that has ended."""
    reader = AnswerReader(reading, sequence, seed)
    reader.read(len(sequence.token_ids) - 1, sequence.text)
    return reader
