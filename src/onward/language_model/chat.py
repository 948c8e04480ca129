"""Prompts from conversations, and the formats of their answers."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from onward.chat import (
    PROMPT_ENDINGS,
    AnswerFormat,
    AssistantMessage,
    ChatTemplate,
    Content,
    Message,
    MessageDelta,
    MessageFormat,
    Tool,
    ToolUse,
    answer_grammar,
    arguments_schema,
    content_beginning,
    read_tool_use,
    template_messages,
)
from onward.constraints import AfterText, Grammar, GrammarConstraint, JsonSchema, Lark, compiled, symbol
from onward.decoding import Sequence as TokenSequence
from onward.errors import OptionError, RequestError, TokenizerError, blaming
from onward.language_model.options import CONSTRAINTS, GenerateOptions, split_chat_options
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.request import check_length, needed_tokenizer
from onward.schemas import SPACED, json_rules
from onward.tokenizer import Tokenizer
from onward.util.text_input import check_value

# The budgets of efforts, for templates that do not read `reasoning_effort`; None for no budget.
EFFORTS: Mapping[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


class ParsedChat(NamedTuple):
    """ids: the prompt. answer: the format of the answer. options: for `generate`."""

    ids: list[int]
    answer: AnswerFormat
    options: GenerateOptionsDict


@dataclass(frozen=True, repr=False)
class ToolGrammar(Lark):
    """The grammar of answers with tool calls. tools: the callable tools. json_schema: of an answer without calls; None
    for any text."""

    option = "tools"
    tools: tuple[Tool, ...] = dataclasses.field(default=(), compare=False)
    json_schema: JsonSchema | None = None

    def __repr__(self) -> str:
        return f"tools ({', '.join(tool.name for tool in self.tools)})"

    def __call__(self, tokenizer: Tokenizer | None, stop_ids: AbstractSet[int] = frozenset()) -> GrammarConstraint:
        """Like every grammar, but an error names the tool whose schema cannot be compiled by itself."""
        try:
            return super().__call__(tokenizer, stop_ids)
        except RequestError:
            assert tokenizer is not None, "without one it is a TokenizerError"
            with blaming(self.option):
                for tool in self.tools:
                    if tool.input is not None and tool.input.syntax == "lark":
                        rules = [tool.input.definition]
                    else:
                        rules = json_rules("start", arguments_schema(tool), SPACED, tool.place)
                    compiled(Lark("\n".join(rules)).source(), tokenizer, stop_ids, tool.place)
            raise


@dataclass(frozen=True)
class ChatReader:
    """Makes prompts from conversations, for one model. format: of the model's answers. context: its maximum tokens."""

    template: ChatTemplate | None
    tokenizer: Tokenizer | None
    format: MessageFormat
    context: int | None = None

    def read(self, messages: Sequence[Message | AssistantMessage], options: Mapping[str, Any]) -> ParsedChat:
        """Validate a conversation and its options, and render the prompt.

        Constraints apply to the text after the reasoning that the prompt has opened, and after the content marker.
        Raises `TokenizerError` without a template or tokenizer.
        """
        check_value(options)
        rest = self._with_budget(options)
        now = rest.pop("now", None)
        endings = {name: rest.pop(name) for name in PROMPT_ENDINGS if name in rest}
        use = read_tool_use(*(rest.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")))
        if use.tools and use.choice != "none":
            if self.template is not None and "tools" not in self.template.variables:
                problem = "cannot be passed to this model: its chat template does not read tools; write a message"
                raise OptionError("tools", problem)
            rest["tools"] = [tool.function for tool in use.tools]
        variables, others = split_chat_options(self.template, rest)
        variables |= endings
        text = self.text(messages, variables, now)
        tokenizer = needed_tokenizer(self.tokenizer, "a chat")
        check_length(text, tokenizer, self.context)
        # The names of tools that only the template knows are unknown.
        tools = {tool.name: tool.parameters for tool in use.tools} if variables.get("tools") else None
        continued = _content(messages[-1]) if variables.get("continue_final_message") else ""
        custom = tuple(tool.name for tool in use.tools if tool.input is not None)
        answer = dataclasses.replace(AnswerFormat.of(self.format, tokenizer, text, tools, continued), custom=custom)
        constraints = [name for name in CONSTRAINTS if others.get(name) is not None]
        schema = self._schema_with_calls(use, others)
        if use.is_constrained or schema is not None:
            if constraints and (schema is None or constraints != ["json_schema"]):
                message = f"{constraints[0]} and the requested tool calls are mutually exclusive: give one"
                raise RequestError(message, constraints[0])
            thinking_answer = answer if self._may_think else dataclasses.replace(answer, thinking=False)
            others.pop("json_schema", None)
            content = None
            if schema is not None and use.choice != "required":
                content = Content(schema.rules("content"), schema.spacing, schema.has_large_numbers)
            with blaming("tools"):
                grammar = answer_grammar(thinking_answer, use, self._symbols(tokenizer), content)
            others["constraint"] = ToolGrammar(grammar, use.callable_tools, None if content is None else schema)
        elif constraints and (beginning := content_beginning(answer, self._symbols(tokenizer))):
            constrained: Any = {name: others.pop(name) for name in constraints}  # type: ignore[misc]
            constraint = GenerateOptions(**constrained).constrained_by
            if isinstance(constraint, Grammar):
                constraint = AfterText(beginning, constraint)
            else:  # the caller's own constraint begins with the text
                answer = dataclasses.replace(answer, thinking=None)
            others["constraint"] = constraint
        # The template writes the special tokens itself.
        return ParsedChat(tokenizer.encode(text, add_special_tokens=False), answer, others)

    def _with_budget(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with a reasoning budget in place of an effort that the template does not read."""
        variables = dict(options.get("template") or {})
        effort = variables.pop("reasoning_effort", options.get("reasoning_effort"))
        template = self.template
        if effort is None or template is None or "reasoning_effort" in template.variables or not self._may_think:
            return dict(options)
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise OptionError("reasoning_effort", f"must be one of {', '.join(EFFORTS)}; got {effort!r}")
        switch = template.thinking_switch
        if switch is not None and switch not in options:
            variables = {switch: effort != "none", **variables}
        rest = {name: value for name, value in options.items() if name != "reasoning_effort"}
        return {"reasoning_budget": EFFORTS[effort], **rest, "template": variables}

    def _schema_with_calls(self, use: ToolUse, options: Mapping[str, Any]) -> JsonSchema | None:
        """The schema of an answer without calls, if there may be calls. None: there is no such schema, or calls are
        impossible and the schema is that of every answer."""
        schema = options.get("json_schema")
        if schema is None or not use.callable_tools or (self.format.syntax is None and not use.is_constrained):
            return None
        return schema if isinstance(schema, JsonSchema) else JsonSchema(schema)

    @property
    def _may_think(self) -> bool:
        """Whether the template supports reasoning. Other models were trained without it, so that allowing it would
        allow any text."""
        sources = () if self.template is None else self.template.sources
        return any(mark in source for source in sources for mark in self.format.thinking)

    def text(
        self,
        messages: Sequence[Message | AssistantMessage],
        variables: Mapping[str, Any],
        now: datetime.datetime | None = None,
    ) -> str:
        """The rendered template, up to the beginning of the answer. variables: of the template. now: for templates that
        write the date."""
        if self.template is None:
            raise TokenizerError("this model has no chat template: use generate with a plain prompt")
        check_value(messages, "messages")
        self.template.check_variables(variables)
        with blaming("messages"):
            read = template_messages(messages, arguments_as_text=self.template.takes_text)
        return self.template.render(read, now, **variables)

    def _symbols(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The ids of the markers that grammars cannot express as text."""
        return {mark: id for mark in self.format.all_marks if (id := symbol(mark, tokenizer)) is not None}


def _content(message: Message | AssistantMessage) -> str:
    content = message.content if isinstance(message, AssistantMessage) else message.get("content")
    return content or ""


class AnswerParser:
    """Parses the text of one sequence of a chat into a message. seed: of the sampling."""

    def __init__(self, answer: AnswerFormat, prompt: Sequence[int], seed: int | None) -> None:
        self._parser = answer.parser(prompt, seed)
        self._deltas: list[MessageDelta] = []
        self._characters = 0  # of the text, parsed so far
        self._marks = 0

    def read(self, sequence: TokenSequence, at: int, text: str) -> MessageDelta:
        """The part of the message for token number `at`. text: the text that became final with it."""
        first, end = self._characters, self._characters + len(text)
        for mark in sequence.marks[self._marks :]:
            if mark.at > at or mark.position > end:  # of a later token, or after text that is not final yet
                break
            self._parser.feed(text[self._characters - first : mark.position - first])
            self._parser.feed(mark.text)
            self._characters = mark.position
            self._marks += 1
        self._parser.feed(text[self._characters - first :])
        self._characters = end
        if sequence.finish_reason is not None and at + 1 == len(sequence.token_ids):
            self._parser.finish()
        delta = self._parser.take()
        self._deltas.append(delta)
        return delta

    def message(self) -> AssistantMessage:
        """The message so far. If the sequence was ended from outside, text that was not final is missing."""
        return AssistantMessage.of(self._deltas)

    def reasoning_tokens(self, ends: Sequence[int]) -> int:
        """The number of ids with at least a part of a character of the reasoning, without its markers. ends: those of
        the sequence."""
        spans = self._parser.reasoning_spans
        count = waiting = begin = 0
        for at, end in enumerate(ends, 1):
            waiting += 1  # with ids that end inside a character, which counts for the next one
            if end == begin and at < len(ends):
                continue
            after = max(end, begin + 1)  # an incomplete character at the end counts as one
            if any(first < after and last > begin for first, last in spans):
                count += waiting
            waiting, begin = 0, end
        return count
