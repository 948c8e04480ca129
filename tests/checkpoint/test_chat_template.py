"""Chat templates: the same text as in `transformers`, in a sandbox, and a clear error for everything else."""

import contextlib
import datetime
import enum
import json
import re
import string
import time
from pathlib import Path
from re import _constants as sre

import pytest
from family_templates import FAMILY_TEMPLATES
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

import onward
from onward.chat import ChatTemplate, template_sandbox
from onward.chat import template as chat_template
from onward.chat.template import strftime
from onward.checkpoint import CheckpointFolder
from onward.errors import OnwardWarning, RequestError, TokenizerError
from tiny_checkpoint import TOKENIZER_CONFIG, change_json, refused, write_json

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The system turn carries today's date, as that of Llama 3 does.
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Turns must alternate; it says so itself.
INST = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}
{% endif %}
{% endfor %}
"""

# Everything at once: tools, a namespace set from inside a loop, break and continue, macros, the generation block.
TOOLS = """\
{%- macro turn(role, content) -%}
<|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(found=false, last_user=-1) %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n' + tools | tojson(indent=2) }}
{%- elif tools is none and documents is none %}
    {{- 'no tools\\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}
        {%- set ns.found = true %}
        {%- set ns.last_user = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'hidden' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set inner = message.content or '' %}
        {{- turn('assistant', inner) }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.arguments | tojson + '</call>' }}
        {%- endfor %}
        {%- endgeneration %}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
    {{- '(after ' ~ loop.index ~ ' of ' ~ loop.length ~ ', user ' ~ ns.last_user ~ ')' }}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
"""

TEMPLATES = {"ChatML": CHATML, "dated": DATED, "INST": INST, "tools": TOOLS, **FAMILY_TEMPLATES}

CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Hi"}],
    "two rounds": [
        {"role": "user", "content": "  What is 1 + 1?  "},
        {"role": "assistant", "content": "2 < 3 & \"quoted\" 'so'"},
        {"role": "user", "content": "Grüße, 東京 🦊\n{{ not a template }}"},
    ],
}
WITH_SYSTEM = [{"role": "system", "content": " Be brief. "}, *CONVERSATIONS["two rounds"]]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für <Städte> & Länder", "parameters": {"größe": 1.5}},
}
WITH_TOOL_CALL = [
    {"role": "user", "content": "Weather in 東京?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "東京"}}}],
    },
    {"role": "tool", "content": "☀"},
    {"role": "hidden", "content": "never shown"},
]


def ours(source, messages, **variables):
    return ChatTemplate(source, TOKENS).render(messages, **variables)


def theirs(source, messages, *, add_generation_prompt=True, **variables):
    options = {"add_generation_prompt": add_generation_prompt, **TOKENS, **variables}
    [prompt], _ = render_jinja_template([messages], chat_template=source, **options)
    return prompt


# ── against transformers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_equal_transformers(template, conversation, add_generation_prompt):
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    options = {"add_generation_prompt": add_generation_prompt}
    assert ours(source, messages, **options) == theirs(source, messages, **options)


@pytest.mark.parametrize("template", ["ChatML", "dated", "tools", *FAMILY_TEMPLATES])
def test_system_prompts_equal_transformers(template):
    assert ours(TEMPLATES[template], WITH_SYSTEM) == theirs(TEMPLATES[template], WITH_SYSTEM)


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("tools", [None, [], [TOOL], [TOOL, TOOL]], ids=["none", "empty", "one", "two"])
def test_tools_are_rendered_as_in_transformers(tools, variables):
    expected = theirs(TOOLS, WITH_TOOL_CALL, tools=tools, **variables)
    assert ours(TOOLS, WITH_TOOL_CALL, tools=tools, **variables) == expected
    assert "東京" in expected
    assert "never shown" not in expected


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% generation %}{% set x = 2 %}{% endgeneration %}{{ x is defined }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ],
)
def test_generation_block_variables_are_scoped_as_in_transformers(source):
    messages = CONVERSATIONS["two rounds"]
    assert ours(source, messages) == theirs(source, messages)


def test_variables_take_precedence_over_special_tokens():
    assert ours("{{ bos_token }}", [{"role": "user", "content": ""}], bos_token="[BOS]") == "[BOS]"


@given(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}), min_size=1)
)
def test_any_text_is_rendered_as_in_transformers(messages):
    assert ours(CHATML, messages) == theirs(CHATML, messages)


def today():
    return datetime.datetime.now(datetime.UTC).date()


def test_the_date_is_todays():
    before, prompt, after = today(), ours(DATED, CONVERSATIONS["one question"]), today()
    assert any(day.strftime("Today Date: %d %b %Y") in prompt for day in (before, after))


WHEN = st.datetimes(min_value=datetime.datetime(1970, 1, 1), max_value=datetime.datetime(2400, 1, 1))


@given(WHEN, st.lists(st.sampled_from("aAbBhcdDeFHIjmMnpPrRSstTuUVwWxXyYzZ%fGgCkl") | st.text(max_size=2), max_size=6))
def test_dates_equal_c_strftime_in_any_time_zone(when, directives):
    layout = "".join(
        f"%{each}" if each.isascii() and each.isalpha() else each.replace("%", "%%") for each in directives
    )
    when = when.replace(tzinfo=datetime.UTC)
    with time_zone("UTC"):
        expected = when.strftime(layout)
    for zone in ("Asia/Kolkata", "America/New_York"):
        with time_zone(zone):
            assert strftime(when, layout) == expected


@contextlib.contextmanager
def time_zone(name):
    """The time zone of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("%-d %B %Y", "5 February 2026"),
        ("%^a %#h", "THU FEB"),
        ("%Ex %OH", "02/05/26 09"),
        ("%%A %A%%", "%A Thursday%"),
        ("%s", "1770282000"),
    ],
)
def test_flags_and_modifiers_of_dates(layout, expected):
    source = "{% macro date(layout) %}{{ strftime_now(layout) }}{% endmacro %}{{ date(layout) }}"
    when = datetime.datetime(2026, 2, 5, 9, tzinfo=datetime.UTC)
    template = ChatTemplate(source, {})
    assert template.render(CONVERSATIONS["one question"], when, layout=layout) == expected
    assert template.render(CONVERSATIONS["one question"], when.replace(tzinfo=None), layout=layout) == expected


def test_templates_have_no_clock_and_no_randomness():
    when = datetime.datetime(2026, 2, 5, 9, tzinfo=datetime.UTC)
    assert "strftime_now" not in ChatTemplate(DATED, {}).variables
    for source in ("{{ [1, 2] | random }}", "{{ strftime_now.__closure__ }}"):
        with pytest.raises(TokenizerError, match="sandbox"):
            ChatTemplate(source, {}).render(CONVERSATIONS["one question"], when)
    with refused(RequestError, "now must be a datetime"):
        ChatTemplate(DATED, {}).render(CONVERSATIONS["one question"], "2026-02-05")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_tojson_is_plain_json_without_escaped_characters(value):
    written = ours("{{ value | tojson }}", [{"role": "user", "content": ""}], value=value)
    assert written == json.dumps(value, ensure_ascii=False)
    assert json.loads(written) == value


# ── where a template comes from ───────────────────────────────────────────────────────────────────────────


def chat(folder, **variables):
    return CheckpointFolder(folder).chat_template.render([{"role": "user", "content": "Hi"}], **variables)


def test_a_chat_without_a_template_is_refused(folder):
    lm = onward.load(folder)
    assert lm.chat_template is None
    with refused(TokenizerError, "no chat template"):
        lm.chat([{"role": "user", "content": "Hi"}])


def test_template_in_tokenizer_config(folder):
    change_json(folder / "tokenizer_config.json", chat_template="config: {{ messages[0].content }}{{ eos_token }}")
    assert chat(folder) == "config: Hi</s>"


def test_a_template_file_takes_precedence_over_tokenizer_config(folder):
    change_json(folder / "tokenizer_config.json", chat_template="config")
    (folder / "chat_template.jinja").write_text(
        "file: {{ bos_token }}{{ messages[0].content }} – 東京", encoding="utf-8"
    )
    assert chat(folder) == "file: <s>Hi – 東京"


def test_default_and_tool_use_among_named_templates(folder):
    named = [{"name": "rag", "template": "rag"}, {"name": "tool_use", "template": "tools: {{ tools | length }}"}]
    change_json(folder / "tokenizer_config.json", chat_template=[*named, {"name": "default", "template": "default"}])
    assert chat(folder) == "default"
    assert chat(folder, tools=[TOOL]) == "tools: 1"
    assert chat(folder, tools=[]) == "default"


def test_named_templates_may_be_a_mapping_as_in_transformers(folder):
    named = {"tool_use": "tools: {{ tools | length }}", "default": "default"}
    change_json(folder / "tokenizer_config.json", chat_template=named)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=named)
    messages = [{"role": "user", "content": "Hi"}]
    for tools in (None, [TOOL]):
        assert chat(folder, tools=tools) == theirs.apply_chat_template(messages, tools=tools, tokenize=False)


def test_tool_use_template_in_a_file(folder):
    (folder / "chat_template.jinja").write_text("default")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    assert (chat(folder), chat(folder, tools=[TOOL])) == ("default", "tools: 1")


def test_named_templates_without_a_default_are_not_dropped_silently(folder):
    change_json(folder / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "rag"}])
    with pytest.warns(OnwardWarning, match="'default' among rag"):
        assert onward.load(folder).chat_template is None


def test_special_tokens_may_be_objects(folder):
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
    change_json(folder / "tokenizer_config.json", bos_token=token, chat_template="{{ bos_token }}|{{ eos_token }}")
    assert chat(folder) == "<s>|</s>"


def test_a_chat_is_encoded_without_a_second_bos(folder):
    change_json(
        folder / "tokenizer_config.json", add_bos_token=True, chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    lm = onward.load(folder)
    assert lm.chat_prompt([{"role": "user", "content": "hello"}]) == lm.encode("hello")


@pytest.mark.parametrize(
    "given", [5, {"default": 5}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]], ids=str
)
def test_invalid_templates_in_tokenizer_config(given, folder):
    change_json(folder / "tokenizer_config.json", chat_template=given)
    with refused(TokenizerError, "chat_template", "tokenizer_config.json"):
        onward.load(folder)


def test_template_file_that_is_not_utf8(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfeh\0i\0")
    with refused(TokenizerError, "chat_template.jinja", "UTF-8"):
        onward.load(folder)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ ", "{% endgeneration %}", "{% generation %}", "{% nothing %}", "{{ 1 | nothing }}"]
)
def test_invalid_jinja(source, folder):
    (folder / "chat_template.jinja").write_text(f"line one\n{source}\nline three")
    with refused(TokenizerError, "the chat template cannot be read"):
        onward.load(folder)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ self.__init__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 'str' %}",
    "{% set ns = namespace(__class__='str') %}",
    "{% set ns = namespace({'__html__': 1}) %}",
    "{{ messages.append({'role': 'system'}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% set _ = messages[0].pop('role') %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_unsafe_access_is_an_error(source):
    with refused(TokenizerError, "sandbox"):
        ours(source, [{"role": "user", "content": "Hi"}])


def test_namespaces_work_as_in_jinja():
    source = (
        "{% set ns = namespace({'a': 1}, self=2, b=3) %}{% set ns.a = ns.b %}{{ ns.a }}{{ ns.self }}{{ ns.nothing }}"
    )
    assert ours(source, [{"role": "user", "content": ""}]) == "32"


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": ["a", {"b": 1}]}]
    before = json.dumps(messages)
    ours("{% for m in messages %}{% set m = {} %}{% endfor %}", messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ nothing() }}",
        "{{ strftime_now(5) }}",
        "{{ messages[0] | tojson(nothing=1) }}",
    ],
)
def test_a_failing_template_is_a_one_line_error(source):
    with refused(RequestError, "the chat template refuses these messages"):
        ours(source, [{"role": "user", "content": "Hi"}])


DOUBLED = "{% set ns = namespace(a=[1], t=(1, 1)) %}{% for i in range(60) %}" + (
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{% set a = ns.a %}{% set t = ns.t %}"
)
OTHER = DOUBLED.replace("ns", "os").replace("set a =", "set b =").replace("set t =", "set u =")

ENDLESS = [
    "{{ lipsum(n=100000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 10 ** 10 * 'x' }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 7 ** 99999 }}",
    "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set x = 'x' * 99999 %}{{ x | replace('x', x) }}",
    "{% set x = 'x' * 99999 %}{{ x.replace('x', x) }}",
    "{% set x = 'x' * 99999 %}{{ x.join(range(99999) | map('string') | list) }}",
    "{% set x = 'x' * 99999 %}{{ range(99999) | map('string') | join(x) }}",
    "{{ range(99999) | map('center', 99999) | list }}",
    "{{ 'x'.center(10 ** 10) }}",
    "{{ 'x'.zfill(10 ** 10) }}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x\nx' | indent(10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{{ [1] | slice(10 ** 10) | list }}",
    "{{ 1.5 | round(10 ** 10, 'floor') }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%.10000000000f' | format(1.5) }}",
    "{{ '%(a(b)c)10000000000d' % {'a(b)c': 1} }}",
    "{{ '%(a%b)10000000000d' % {'a%b': 1} }}",
    "{{ '%*.*f' | format(1, 10 ** 10, 1.5) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ '{0[:]:10000000000}'.format({':': 1}) }}",
    "{{ 'x'.format_map({}) * 10 ** 10 }}",
    "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{{ ('<!---->' * 999999) | striptags }}",
    "{{ (('<!---->' * 999999) | safe).striptags() }}",
    "{{ ([[1]] * 199999) | sum(start=[]) | length }}",
    "{% set n = namespace(a=1) %}{% for i in range(60) %}{% set n.a = dict.fromkeys('ab', n.a) %}{% endfor %}{{ n.a }}",
    DOUBLED + "{{ a }}",
    DOUBLED + "{{ a ~ '' }}",
    DOUBLED + "{{ a | string | length }}",
    DOUBLED + "{{ a | tojson | length }}",
    DOUBLED + "{{ '%s' % (a,) }}",
    DOUBLED + "{{ '{}'.format(a) }}",
    DOUBLED + "{{ a | format }}",
    DOUBLED + "{{ a | join }}",
    DOUBLED + "{{ {t: 1} }}",
    DOUBLED + "{{ {}[t] }}",
    DOUBLED + "{{ [t, t] | unique | list }}",
    DOUBLED + "{{ {'x': 1}.get(t) }}",
    DOUBLED + OTHER + "{{ a == b }}",
    DOUBLED + OTHER + "{{ 1 != a == b }}",
    DOUBLED + OTHER + "{{ a in [b] }}",
    DOUBLED + OTHER + "{{ a is eq(b) }}",
    DOUBLED + OTHER + "{{ [a].index(b) }}",
    "{% for x in [1, 2] %}{{ strftime_now('%Y' * 9999) }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_work_is_refused(source):
    with refused(TokenizerError, "sandbox forbids"):
        ours(source, [{"role": "user", "content": "Hi"}])


def matching(op, argument):
    """The ASCII characters that one instruction of a regular expression can match."""
    if op is sre.IN:
        found = set().union(*(matching(*each) for each in argument if each[0] is not sre.NEGATE))
        return {chr(code) for code in range(128)} - found if argument[0][0] is sre.NEGATE else found
    if op in (sre.LITERAL, sre.NOT_LITERAL):
        return {chr(code) for code in range(128) if (code == argument) == (op is sre.LITERAL)}
    of_category = {sre.CATEGORY_DIGIT: "0123456789", sre.CATEGORY_SPACE: string.whitespace}
    assert op is sre.CATEGORY
    assert argument in of_category, "extend this to what the expression uses"
    return set(of_category[argument])


def instructions(tree):
    """The instructions of a regular expression, from the outside in."""
    for op, argument in tree:
        yield op, argument
        for inner in argument if isinstance(argument, tuple | list) else ():
            if isinstance(inner, re._parser.SubPattern):
                yield from instructions(inner)


def runs_over_starts(source, flags=0):
    """Whether an unbounded repeat of a regular expression runs over a character with which a match may begin."""
    first, *rest = instructions(re._parser.parse(source, flags))
    if first[0] is sre.MAX_REPEAT:  # a repeat alone: each run is one match
        return len(re._parser.parse(source, flags)) > 1
    starts = matching(*first)
    endless = [each[2][0] for op, each in rest if op is sre.MAX_REPEAT and each[1] is sre.MAXREPEAT]
    return any(matching(*each) & starts for each in endless)


def test_scans_of_formats_are_linear():
    """The scans of all matches together are one, since none runs over the beginning of another."""
    modules = (chat_template, template_sandbox)
    patterns = [value for each in modules for value in vars(each).values() if isinstance(value, re.Pattern)]
    assert patterns
    assert not [each.pattern for each in patterns if runs_over_starts(each.pattern, each.flags & re.DOTALL)]
    assert runs_over_starts(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)")
    assert runs_over_starts(r"[%).][-+ #0%]*(\d+)")


@pytest.mark.parametrize("source", ["{% break %}", "{% continue %}", "{% for a in b %}" * 30 + "{% endfor %}" * 30])
def test_templates_python_cannot_compile_are_a_one_line_error(source):
    with refused(TokenizerError, "the chat template cannot be read"):
        ChatTemplate(source, TOKENS)


def test_too_long_templates_are_refused():
    with refused(TokenizerError, "characters"):
        ChatTemplate(" " * 2_000_000, TOKENS)


def test_messages_raised_by_templates_are_truncated():
    with pytest.raises(RequestError) as caught:
        ours("{{ raise_exception('x' * 99999) }}", [{"role": "user", "content": "Hi"}])
    assert "xxx" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("template", ["SmolLM3", "EXAONE 4", "Seed-OSS"])
def test_reasoning_variables_equal_transformers(template, enable_thinking):
    options = {"enable_thinking": enable_thinking, "thinking_budget": 1024}
    assert ours(TEMPLATES[template], WITH_SYSTEM, **options) == theirs(TEMPLATES[template], WITH_SYSTEM, **options)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_long_conversation_is_within_the_limits(template):
    """As long as any context: some four million characters, in one message or in a thousand."""
    for count in (1, 1000):
        messages = []
        for _ in range(count):
            messages += [{"role": "user", "content": "Why? " * (800_000 // count)}]
            messages += [{"role": "assistant", "content": "So. " * (100_000 // count)}]
        assert ours(TEMPLATES[template], messages) == theirs(TEMPLATES[template], messages)


MANY = """\
{%- set ns = namespace(text='', roles=[]) -%}
{%- for m in messages if m.role in ['user', 'assistant'] and m.content is string -%}
{%- set ns.roles = ns.roles + [m.role | upper] -%}
{%- set ns.text = ns.text ~ loop.index ~ ':' + m['content'].strip().split('?')[0][:9] + '%s|%5.2f' % (m.role, 1.5) -%}
{%- if loop.changed(m.role) and not loop.last %} changed {{ loop.previtem.role if loop.previtem }}{% endif -%}
{%- endfor -%}
{{ ns.text }} {{ ns.roles | join(', ') }} {{ ns.roles | unique | list }} {{ messages | map(attribute='role') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('replace', '?', '!') | join }}
{{ '{:>6}|{x}'.format('ab', x=3) }} {{ 'a' in 'abc' }}
{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ [1, 2] * 2 }} {{ 'x' * 3 }}
{{ [3, 1, 2] | sort | reverse | list }} {{ {'b': 1, 'a': 2} | dictsort }} {{ range(5) | batch(2, 'z') | list }}
{{ [[1], [2]] | sum(start=[]) }} {{ 'a b' | title | indent(2, true) | center(9) }}
{{ messages[-1].content | truncate(9) }}
{{ messages | tojson(indent=1) }} {{ (1, 'x') == (1, 'x') }} {{ dict(a=1, **{'b': 2}) }} {{ 1.256 | round(2) }}
{%- set c = cycler('odd', 'even') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}
{%- autoescape true %}{{ messages[0].role ~ ('<b>' | safe) ~ '&' }}{{ '<i>' }}{% endautoescape -%}
{%- filter upper %}loud {{ bos_token }}{% endfilter -%}
{%- macro m(x, y=2) %}[{{ x }}{{ y }}{{ varargs }}{{ caller() }}]{% endmacro -%}
{%- call m(1, 2, 3) %}inner{% endcall %}
{%- for item in [1, [2, [3]]] recursive %}{{ item if item is number else loop(item) }}{% endfor %}
"""


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_every_operation_equals_transformers(conversation):
    assert ours(MANY, CONVERSATIONS[conversation]) == theirs(MANY, CONVERSATIONS[conversation])


def test_errors_raised_by_a_template_are_passed_on():
    with refused(RequestError, "conversation roles must alternate"):
        ours(INST, [{"role": "assistant", "content": "Hi"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        b"Hi",
        {"role": "user", "content": "Hi"},
        5,
        pytest.param(iter([{"role": "user", "content": "Hi"}]), id="an iterator"),
        ["Hi"],
        [{}],
        [{"content": "Hi"}],
        [{"role": None, "content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant"}],
    ],
    ids=str,
)
def test_invalid_messages(messages):
    with refused(RequestError, "message"):
        ours(CHATML, messages)


class Mood(enum.StrEnum):
    GOOD = "good"


class Loud(str):
    def upper(self):
        raise AssertionError("a template called a method of ours")


@pytest.mark.parametrize(
    "value", [Path("secret"), {1, 2}, b"bytes", open, object()], ids=lambda value: type(value).__name__
)
def test_objects_with_methods_are_not_passed_to_templates(value):
    for messages, variables in (
        ([{"role": "user", "content": [{"type": "file", "file": value}]}], {}),
        ([{"role": "user", "content": "Hi"}], {"value": value}),
    ):
        with refused(RequestError, "chat template", type(value).__name__):
            ours(CHATML, messages, **variables)


def test_subclass_values_are_passed_as_their_base_type():
    messages = [{"role": "user", "content": Mood.GOOD}, {"role": "user", "content": Loud("loud")}]
    assert ours("{{ messages[0].content }} {{ messages[1].content.upper() }}", messages) == "good LOUD"


def test_the_bundled_template_is_read():
    prompt = onward.load("demo").chat_template.render([{"role": "user", "content": "Hi"}])
    assert "Hi" in prompt


def test_special_tokens_of_older_checkpoints_are_in_a_separate_file(folder):
    write_json(folder / "special_tokens_map.json", {**TOKENIZER_CONFIG, "bos_token": {"content": "<|im_start|>"}})
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert chat(folder) == "<|im_start|><|im_end|>"
