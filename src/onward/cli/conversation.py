"""What was said in a chat, and the note of it in a saved session."""

import json
from dataclasses import dataclass, field

from onward.errors import RequestError
from onward.text_input import parse_request_json


@dataclass
class Conversation:
    """What was said. `turns` holds the pairs of question and answer; the system message stands before them."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """As the chat template takes them, with a question yet unanswered at the end."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for asked, answered in self.turns:
            messages += [_message("user", asked), _message("assistant", answered)]
        return messages if question is None else [*messages, _message("user", question)]

    def to_json(self) -> str:
        """An object with the system message, a string or null, and the turns, pairs of strings."""
        return json.dumps({"system": self.system, "turns": self.turns}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """What `to_json` wrote.

        Raises:
            RequestError: it is something else.
        """
        content = parse_request_json(text)
        if not isinstance(content, dict) or content.keys() != {"system", "turns"}:
            raise RequestError("a conversation is an object with 'system' and 'turns'")
        system, turns = content["system"], content["turns"]
        if not (system is None or isinstance(system, str)):
            raise RequestError("the system message of a conversation is a string or null")
        if not (isinstance(turns, list) and all(map(_is_turn, turns))):
            raise RequestError("the turns of a conversation are a list of pairs of strings")
        return cls(system, [(asked, answered) for asked, answered in turns])


def _is_turn(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
