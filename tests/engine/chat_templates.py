"""Chat templates of the usual kinds, in our own words, and talks to render."""

from __future__ import annotations

CHATML = """\
{%- for message in messages -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set system = none %}{% set turns = messages %}{% endif -%}
{{ bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}
{%- if loop.last and system is not none %}{{ '[INST] ' + system + '\\n\\n' + message.content + ' [/INST]' }}
{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- else %}{% generation %}{{ ' ' ~ message.content ~ eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}
"""

QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
  {%- if message.role == 'user' and ns.last < 0 %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- continue %}
  {%- endif %}
  {%- set text = message.content %}
  {%- if '</think>' in text %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text }}
  {%- if message.tool_calls is defined and message.tool_calls %}
    {%- for call in message.tool_calls %}
      {%- set named = {'name': call.function.name, 'arguments': call.function.arguments} %}
      {{- '\\n<tool_call>\\n' ~ named | tojson ~ '\\n</tool_call>' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- set first = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['content'] is string
                    else messages[0]['content'][0]['text'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'text' %}{{ item['text'] | trim }}{%- endif %}
        {%- endfor %}
    {%- else %}
        {{- raise_exception('content of an unknown kind') }}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN, "gemma": GEMMA}

TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter & <Ort>",
        "parameters": {"type": "object", "properties": {}},
    },
}

TALKS: tuple[list[dict[str, object]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi there \n"}],
    [
        {"role": "system", "content": "Sé breve, 简短."},
        {"role": "user", "content": "1 < 2 & 3 > 2? {{ 'no' }} {% raw %}"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes \U0001f44d"},
        {"role": "user", "content": "Gut.\n\nUnd <|im_end|>?"},
    ],
)
