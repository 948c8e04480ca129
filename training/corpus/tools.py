"""Conversations in which tools are offered: called with words of the user, their results read back, or not needed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from . import smalltalk
from .chat import Conversation
from .grammar import expand, fill
from .tool_topics import SLOTS, TOPICS, Topic, Value, made_up_topic

DONE = ("ok", "done", "set", '{"ok": true}', '{"status": "ok"}', '{"status": "done"}', "true")
NO_TOOL = (
    "I have no tool for that.",
    "I am sorry, but I have no tool for that.",
    "None of my tools can do that.",
)
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
        result = self._written_result(arguments, results, texts)
        return Use(request, self.name, arguments, result, expand(self.rng, self.topic.answer, texts))

    def _value(self, slot: str) -> Value:
        return self.rng.choice(self.choices[slot]) if slot in self.choices else SLOTS[slot].draw(self.rng)

    def _result(self, slot: str, values: dict[str, Value]) -> Value:
        if slot == "sum":
            return int(values["a"]) + int(values["b"])
        return int(values["a"]) * int(values["b"]) if slot == "product" else SLOTS[slot].draw(self.rng)

    def _written_result(self, arguments: dict[str, Value], results: dict[str, Value], texts: dict[str, str]) -> str:
        """JSON, at times with the arguments, or words."""
        if not results:
            return self.rng.choice(DONE)
        if self.rng.random() < 0.5:
            named = {self.rng.choice(SLOTS[slot].names): value for slot, value in results.items()}
            return json.dumps((arguments | named) if self.rng.random() < 0.25 else named, ensure_ascii=False)
        return fill(self.rng, self.topic.result, texts)


class ToolConversation(Conversation):
    """A conversation whose system turn offers tools, as the chat template writes them."""

    def add_system(self) -> None:
        topics = self.rng.sample(TOPICS, self.rng.choice((1, 1, 1, 2, 2, 3)))
        topics = [made_up_topic(self.rng) if self.rng.random() < 0.3 else topic for topic in topics]
        self.tools = [OfferedTool(self.rng, topic) for topic in topics]
        if len({tool.name for tool in self.tools}) < len(self.tools):
            self.tools = self.tools[:1]
        schemas = [json.dumps(tool.schema(), ensure_ascii=False) for tool in self.tools]
        said = f"{self.rng.choice(smalltalk.SYSTEM_PROMPTS)}\n\n" if self.rng.random() < 0.35 else ""
        self.turns.append(("system", f"{said}Tools:\n" + "\n".join(schemas)))

    def use(self) -> None:
        """The user asks for what a tool does."""
        use = self.rng.choice(self.tools).use()
        self.turns += [("user", use.request), ("assistant", use.call), ("tool", use.result), ("assistant", use.answer)]

    def use_twice(self) -> None:
        """Two requests in one turn: two calls, two results, one answer."""
        tool = self.rng.choice(self.tools)
        first, second = tool.use(), tool.use()
        asked = f"{first.request} {self.rng.choice(('And: ', 'And then: ', ''))}{second.request}"
        self.turns += [("user", asked), ("assistant", f"{first.call}\n{second.call}")]
        self.turns += [("tool", first.result), ("tool", second.result)]
        self.turns.append(("assistant", f"{first.answer} {second.answer}"))

    def ask_for_nothing_offered(self) -> None:
        offered = {tool.topic.about for tool in self.tools}
        topic = self.rng.choice([topic for topic in TOPICS if topic.about not in offered])
        self.say(OfferedTool(self.rng, topic).use().request, self.rng.choice(NO_TOOL))

    def talk(self) -> None:
        """What needs no tool."""
        draw = self.rng.random()
        if draw < 0.3:
            self.small_talk((*smalltalk.GREETINGS, *smalltalk.CURIOUS[:3]))
        elif draw < 0.5:
            self.ask_for_nothing_offered()
        elif draw < 0.75:
            self.ask(self.story(), self.rng.randint(0, 2))
        else:
            self.ask(self.note(), self.rng.randint(0, 1))


def make_tool_chat(rng: random.Random) -> str:
    """One conversation: mostly a tool is called at once; at times something else comes before or after."""
    chat = ToolConversation(rng)
    if rng.random() < 0.22:
        chat.talk()
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        if rng.random() < 0.1:
            chat.use_twice()
        else:
            chat.use()
    if len(chat.turns) == 1 or rng.random() < 0.15:
        chat.talk()
    if rng.random() < 0.15:
        chat.small_talk(smalltalk.THANKS)
    return chat.text()
