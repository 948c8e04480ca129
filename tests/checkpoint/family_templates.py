"""Chat templates that render the same as those of the families: turns, system prompts, openings of answers."""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

OLMO = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' +
message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{%
elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + (eos_token if loop.last else
eos_token + '\\n') }}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{%
endfor %}
"""

SMOLLM3 = """\
{%- set enable_thinking = true if enable_thinking is not defined else enable_thinking -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- set said = messages[0].content if messages[0].role == "system" else "" -%}
{%- if "/no_think" in said -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
{%- set said = said.replace("/no_think", "").replace("/think", "").rstrip() -%}
{{- "<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: " ~ reasoning_mode ~ "\\n\\n## Custom Instructions\\n\\n" }}
{{- (said or "You are a helpful AI assistant.") ~ "<|im_end|>\\n" }}
{%- for message in messages if message.role != "system" -%}
    {{- "<|im_start|>" ~ message.role ~ "\\n" }}
    {%- if message.role == "assistant" and reasoning_mode == "/no_think" -%}
        {{- "<think>\\n\\n</think>\\n" }}
    {%- endif -%}
    {{- message.content.lstrip("\\n") ~ "<|im_end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" ~ ("" if reasoning_mode == "/think" else "<think>\\n\\n</think>\\n") }}
{%- endif -%}
"""

GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " ~ strftime_now('%B %d, %Y') ~ "." %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

GLM4 = """\
[gMASK]<sop>
{%- for item in messages %}
    {%- if item['role'] == 'system' %}<|system|>
{{ item['content'] }}
    {%- elif item['role'] == 'user' %}<|user|>
{{ item['content'] }}
    {%- elif item['role'] == 'assistant' %}<|assistant|>
{{ item['content'].split('</think>')[-1].strip() }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif -%}
"""

SEED_OSS = """\
{%- macro budget_text(budget) -%}
{%- set steps = {512: 128, 1024: 256, 2048: 512} -%}
{%- if budget in steps -%}{{ steps[budget] }}{%- else -%}{{ budget // 4 }}{%- endif -%}
{%- endmacro -%}
{%- if thinking_budget is defined -%}
{{ '<seed:bos>system\\nYou may think for ' + thinking_budget | string + ' tokens, and count every ' }}
{{- budget_text(thinking_budget) + '.<seed:eos>' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<seed:bos>' + message.role + '\\n' + message.content + '<seed:eos>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<seed:bos>assistant\\n' }}{%- endif -%}
"""

EXAONE4 = """\
{%- if not skip_think is defined %}{% set skip_think = true %}{% endif %}
{%- set role_indicators = {'user': '[|user|]\\n', 'assistant': '[|assistant|]\\n', 'system': '[|system|]\\n'} %}
{%- set end_of_turn = '[|endofturn|]\\n' %}
{%- for i in range(messages | length) %}
    {%- set message = messages[i] %}
    {%- if message.role == 'assistant' and skip_think %}
        {{- role_indicators['assistant'] + '<think>\\n\\n</think>\\n\\n' }}
        {{- message.content.split('</think>')[-1].strip() }}
    {%- else %}
        {{- role_indicators[message.role] + message.content }}
    {%- endif %}
    {{- end_of_turn }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- role_indicators['assistant'] + ('<think>\\n\\n</think>\\n\\n' if not enable_thinking else '<think>\\n') }}
{%- endif %}
"""

FAMILY_TEMPLATES = {
    "Gemma": GEMMA,
    "OLMo": OLMO,
    "SmolLM3": SMOLLM3,
    "Granite": GRANITE,
    "GLM-4": GLM4,
    "Seed-OSS": SEED_OSS,
    "EXAONE 4": EXAONE4,
}
