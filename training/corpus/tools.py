"""Conversations in which tools are offered: called with words of the user, their results read back, or not needed."""

from __future__ import annotations

import json
import random

from . import smalltalk
from .chat import Conversation
from .offered_tools import OfferedTool
from .tool_topics import TOPICS, made_up_topic

NO_TOOL = (
    "I have no tool for that.",
    "I am sorry, but I have no tool for that.",
    "None of my tools can do that.",
)


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
