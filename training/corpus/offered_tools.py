"""A tool as a conversation offers it, and one use of it: request, call, result and answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .grammar import expand, fill
from .tool_topics import SLOTS, TOPICS, Topic, Value, made_up_topic

DONE = ("ok", "done", "set", '{"ok": true}', '{"status": "ok"}', '{"status": "done"}', "true")
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"


@dataclass(frozen=True)
class Use:
    """One request that a tool serves: what is asked, the arguments by parameter, the result, and what is said then."""

    request: str
    name: str
    arguments: dict[str, Value]
    result: str
    answer: str

    @property
    def call(self) -> str:
        """The call as Hermes' format writes it."""
        call = {"name": self.name, "arguments": self.arguments}
        return f"{CALL_BEGIN}{json.dumps(call, ensure_ascii=False)}{CALL_END}"


class OfferedTool:
    """One tool as it is offered: a topic with a name, and a name for each parameter."""

    def __init__(self, rng: random.Random, topic: Topic) -> None:
        self.rng, self.topic = rng, topic
        self.name = rng.choice(topic.names.split())
        self.may = topic.may if rng.random() < 0.4 else ()
        which = rng.randrange(12)  # `a` and `b` go together, and so do `x` and `y`
        slots = (*topic.takes, *self.may)
        self.names = {slot: SLOTS[slot].names[which % len(SLOTS[slot].names)] for slot in slots}
        if len(set(self.names.values())) < len(slots):
            self.names = {slot: slot for slot in slots}
        self.choices = self._draw_choices()

    def _draw_choices(self) -> dict[str, list[Value]]:
        """Some parameters take one of a few values."""
        choices: dict[str, list[Value]] = {}
        for slot in self.names:
            if self.rng.random() < 0.12 and isinstance(SLOTS[slot].draw(self.rng), str):
                drawn = [SLOTS[slot].draw(self.rng) for _ in range(self.rng.randint(2, 3))]
                choices[slot] = list(dict.fromkeys(drawn))
        return choices

    def schema(self) -> dict[str, Any]:
        """The tool's function in OpenAI's format."""
        properties = {name: self._property(slot) for slot, name in self.names.items()}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self.rng.random() < 0.85:
            parameters["required"] = [self.names[slot] for slot in self.topic.takes]
        if self.rng.random() < 0.35:
            parameters["additionalProperties"] = False
        about = expand(self.rng, self.topic.about, {})
        return {
            "name": self.name,
            **({"description": about} if self.rng.random() < 0.85 else {}),
            "parameters": parameters,
        }

    def _property(self, slot: str) -> dict[str, Any]:
        drawn = SLOTS[slot].draw(self.rng)
        kind: dict[str, Any] = {"type": "integer" if isinstance(drawn, int) else "string"}
        if slot in self.choices:
            kind = {**(kind if self.rng.random() < 0.5 else {}), "enum": self.choices[slot]}
        if self.rng.random() < 0.25:
            kind["description"] = expand(self.rng, SLOTS[slot].about, {}).lower()
        return kind

    def use(self) -> Use:
        """A request for this tool, with everything that follows."""
        values = {slot: self._value(slot) for slot in self.topic.takes}
        said = [slot for slot in self.may if self.rng.random() < 0.6]
        values |= {slot: self._value(slot) for slot in said}
        arguments = {self.names[slot]: value for slot, value in values.items()}
        slots: dict[str, Value] = {**values, "on_day": f" on {values['day']}" if "day" in values else ""}
        results = {slot: self._result(slot, values) for slot in self.topic.gives}
        texts = {slot: str(value) for slot, value in (slots | results).items()}
        request = expand(self.rng, self.rng.choice(self.topic.requests), texts)
        result = self._result_text(arguments, results, texts)
        return Use(request, self.name, arguments, result, expand(self.rng, self.topic.answer, texts))

    def _value(self, slot: str) -> Value:
        return self.rng.choice(self.choices[slot]) if slot in self.choices else SLOTS[slot].draw(self.rng)

    def _result(self, slot: str, values: dict[str, Value]) -> Value:
        if slot == "sum":
            return int(values["a"]) + int(values["b"])
        return int(values["a"]) * int(values["b"]) if slot == "product" else SLOTS[slot].draw(self.rng)

    def _result_text(self, arguments: dict[str, Value], results: dict[str, Value], texts: dict[str, str]) -> str:
        """JSON, at times with the arguments, or words."""
        if not results:
            return self.rng.choice(DONE)
        if self.rng.random() < 0.5:
            named = {self.rng.choice(SLOTS[slot].names): value for slot, value in results.items()}
            return json.dumps((arguments | named) if self.rng.random() < 0.25 else named, ensure_ascii=False)
        return fill(self.rng, self.topic.result, texts)


def draw_request(rng: random.Random) -> str:
    """What a user may ask of a tool, whether or not it is offered."""
    topic = made_up_topic(rng) if rng.random() < 0.3 else rng.choice(TOPICS)
    return OfferedTool(rng, topic).use().request
