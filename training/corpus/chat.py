"""Conversations in ChatML: a system prompt at times, then small talk, stories, questions and JSON."""

from __future__ import annotations

import random

from . import smalltalk
from .extraction import Note, make_extraction, make_note
from .facts import draw_facts, draw_name
from .grammar import expand
from .offered_tools import draw_request
from .story import Question, Story, make_story
from .tool_topics import draw_city

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

STORY_REQUESTS = (
    "[Tell me|Write|Please tell me|Can you tell me|Could you write|I would like] a [|short |nice |little ]story about "
    "{topic}[.|.|?|]",
    "[Now tell|Tell] me [one|another story|a story] about {topic}.",
    "[A story about {topic}, please.|Story about {topic}|Make up a story about {topic}.|Do you know a story about "
    "{topic}?]",
)
ANY_STORY = (
    "[Tell me|Please tell me|Can you tell me|Write] a [|short |nice |little ]story[.|.|!|]",
    "[I am bored.|I cannot sleep.|Yes, please.|Yes, please tell me a story.|Surprise me.|Tell me something.]",
    "[Tell me another story.|Another one, please.|One more story, please.|Tell me a different story.]",
)
TOPICS = (
    "{hero}", "{hero} the {kind}", "{hero} the {kind}", "a {kind}", "a {kind}", "a {trait} {kind}", "a {trait} {kind}",
    "a {kind} named {hero}", "a {kind} called {hero}", "a {trait} {kind} named {hero}", "a {kind} and a {fkind}",
    "a {kind} and a {obj}", "{hero} and {friend}",
    "{hero} the {kind} and {friend} the {fkind}", "a {kind} and a {noun}", "a {obj}", "a {noun}",
    "a {kind} who lives {home}",
)  # fmt: skip


class Conversation:
    """Turns as they are added; `text()` is exactly what the chat template would render."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.turns: list[tuple[str, str]] = []
        self.brief = False
        self.add_system()

    def add_system(self) -> None:
        """Half of the conversations have a system prompt; a brief one changes the answers."""
        draw = self.rng.random()
        if draw < 0.12:
            self.brief = True
            self.turns.append(("system", self.rng.choice(smalltalk.BRIEF_SYSTEM)))
        elif draw < 0.45:
            self.turns.append(("system", self.rng.choice(smalltalk.SYSTEM_PROMPTS)))

    def say(self, user: str, answer: str) -> None:
        self.turns += [("user", user), ("assistant", answer)]

    def small_talk(self, exchanges: tuple[tuple[str, str | tuple[str, ...]], ...]) -> None:
        user, answer = smalltalk.draw_exchange(self.rng, exchanges)
        slots = {"a": str(self.rng.randint(2, 99)), "b": str(self.rng.randint(2, 99))}
        slots |= {"city": draw_city(self.rng), "name": draw_name(self.rng, self.rng.random() < 0.5)}
        self.say(expand(self.rng, user, slots), expand(self.rng, answer, slots))

    def what_it_cannot(self) -> None:
        """A question about the world, or what a tool would be for: here there is none."""
        if self.rng.random() < 0.5:
            self.say(draw_request(self.rng), self.rng.choice(smalltalk.CANNOT))
        else:
            self.small_talk(smalltalk.WORLD)

    def any_story(self) -> Story:
        """A story that the user pastes, begins, or (mostly) asks for."""
        draw = self.rng.random()
        if draw < 0.15:
            return self.pasted_story()
        return self.continued_story() if draw < 0.22 else self.story()

    def story(self) -> Story:
        """The user asks for a story, mostly about something that it must then be about."""
        facts = draw_facts(self.rng)
        if self.rng.random() < 0.25:
            request = self.rng.choice(ANY_STORY)
        else:
            request = self.rng.choice(STORY_REQUESTS).replace("{topic}", self.rng.choice(TOPICS))
        story = make_story(self.rng, facts, short=self.rng.random() < 0.75)
        asked = expand(self.rng, request, facts.slots)
        self.say(asked[0].lower() + asked[1:] if self.rng.random() < 0.15 else asked, story.text)
        return story

    def continued_story(self) -> Story:
        """The user begins a story and the assistant goes on."""
        story = make_story(self.rng, short=True)
        first, rest = story.text.split(". ", 1)
        lead = self.rng.choice(("Continue this story: ", "Finish this story: ", "Go on: ", ""))
        self.say(f"{lead}{first}.", rest)
        return story

    def note(self) -> Note:
        """The user pastes a note, with a question or a request for JSON."""
        note = make_note(self.rng)
        lead = self.rng.choice(("", "", "Read this: ", "Here is a note: ", "Text: "))
        join = self.rng.choice((" ", "\n", "\n\n"))
        if self.rng.random() < 0.4:
            question = self.rng.choice(note.questions)
            self.say(f"{lead}{note.text}{join}{question.text}", self.answer(question))
        else:
            extraction = make_extraction(self.rng, note)
            order = (
                (lead + note.text, extraction.request) if self.rng.random() < 0.6 else (extraction.request, note.text)
            )
            self.say(join.join(order), extraction.answer)
        return note

    def pasted_story(self) -> Story:
        """The user pastes a story and asks about it."""
        story = make_story(self.rng, short=True)
        if self.rng.random() < 0.5:
            question = story.questions[0]
            self.say(f"{story.text}\n\n{question.text}", self.answer(question))
        else:
            extraction = make_extraction(self.rng, story)
            self.say(f"{story.text}\n\n{extraction.request}", extraction.answer)
        return story

    def answer(self, question: Question) -> str:
        return expand(self.rng, question.short, {}) if self.brief else question.full

    def ask(self, source: Story | Note, count: int) -> None:
        """Questions about a text, each asked once, and now and then an extraction."""
        for question in source.questions[:count]:
            self.say(question.text, self.answer(question))
            if self.rng.random() < 0.2:
                self.extract(source)

    def extract(self, source: Story | Note) -> None:
        extraction = make_extraction(self.rng, source)
        self.say(extraction.request, extraction.answer)

    def text(self) -> str:
        return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in self.turns)


def make_chat(rng: random.Random) -> str:
    """One conversation: short small talk, a note or two, or one to three stories and talk about them."""
    chat = Conversation(rng)
    if rng.random() < 0.3:
        chat.small_talk(smalltalk.GREETINGS)
    shape = rng.random()
    if shape < 0.2:
        for _ in range(rng.randint(1, 3)):
            chat.small_talk(smalltalk.CURIOUS) if rng.random() < 0.5 else chat.what_it_cannot()
    elif shape < 0.36:
        for _ in range(rng.randint(1, 3)):
            chat.ask(chat.note(), rng.randint(0, 2))
    else:
        if rng.random() < 0.1:
            chat.small_talk(smalltalk.CURIOUS)
        stories = 1 if shape < 0.78 else rng.randint(2, 3)
        for _ in range(stories):
            story = chat.any_story()
            chat.ask(story, rng.randint(0, 5 if stories == 1 else 6))
            if rng.random() < 0.4:
                chat.extract(story)
            if rng.random() < 0.12:
                chat.small_talk(smalltalk.CURIOUS)
            if rng.random() < 0.25:
                chat.what_it_cannot()
    if rng.random() < 0.2:
        chat.small_talk(smalltalk.THANKS)
    if rng.random() < 0.1:
        chat.small_talk(smalltalk.FAREWELLS)
    return chat.text()
