"""Chat templates of families with tools, thoughts and variables, in Jinja of our own, and what each must train.

Each has what sets its family apart: where thoughts are, how a call is written, what ends a turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NO_VARIABLES: Mapping[str, Any] = {}

# GLM-4.5: nothing ends a turn; the model stops at what begins the next. Earlier thoughts are dropped.
GLM_45 = """[gMASK]<sop>
{%- if tools -%}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}{{- '/nothink' if enable_thinking is defined and not enable_thinking -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if loop.index0 > ns.last and thought -%}{{ '\\n<think>' ~ thought.strip() ~ '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if m.content and m.content.strip() -%}{{ '\\n' ~ m.content.strip() }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- set call = call.function if call.function else call -%}
{{ '\\n<tool_call>' ~ call.name }}
{% set _args = call.arguments %}
{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|observation|>' }}{%- endif -%}
{{ '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' -}}{%- endif -%}"""

# DeepSeek V3 and R1: arguments are put behind a text, and thoughts cut off.
DEEPSEEK_V3 = """
{%- set ns = namespace(system='', is_first=true, after_tool=false) -%}
{%- for m in messages if m['role'] == 'system' -%}{%- set ns.system = ns.system + m['content'] -%}{%- endfor -%}
{{- bos_token + ns.system -}}
{%- for tool in tools or [] -%}{{- '\\n' + tool['function']['name'] -}}{%- endfor -%}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{%- set ns.after_tool = false -%}{{- '<\uff5cUser\uff5c>' + m['content'] -}}
{%- elif m['role'] == 'assistant' and m['tool_calls'] -%}
{{- '<\uff5cAssistant\uff5c>' if not ns.after_tool else '' -}}{{- m['content'] or '' -}}
{{- '<\uff5ctool\u2581calls\u2581begin\uff5c>' -}}
{%- for call in m['tool_calls'] -%}
{{- '<\uff5ctool\u2581call\u2581begin\uff5c>' + call['type'] -}}
{{- '<\uff5ctool\u2581sep\uff5c>' + call['function']['name'] -}}
{{- '\\n```json\\n' + call['function']['arguments'] + '\\n```' + '<\uff5ctool\u2581call\u2581end\uff5c>' -}}
{%- endfor -%}
{{- '<\uff5ctool\u2581calls\u2581end\uff5c>' + eos_token -}}
{%- elif m['role'] == 'assistant' -%}
{%- set content = m['content'] -%}
{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{- ('<\uff5cAssistant\uff5c>' if not ns.after_tool else '') + content + eos_token -}}
{%- set ns.after_tool = false -%}
{%- elif m['role'] == 'tool' -%}{%- set ns.after_tool = true -%}
{{- '<\uff5ctool\u2581output\u2581begin\uff5c>' + m['content'] + '<\uff5ctool\u2581output\u2581end\uff5c>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.after_tool -%}{{- '<\uff5cAssistant\uff5c>' -}}{%- endif -%}"""
DEEPSEEK_TOKENS = (
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581sep\uff5c>"),
    *(f"<\uff5ctool\u2581{what}\u2581{end}\uff5c>" for what in ("calls", "call", "output") for end in ("begin", "end")),
)

# Qwen 3: thoughts in a field or in the content, kept behind the last question alone; a switch that turns them off.
QWEN_3 = """
{%- if tools -%}{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}{%- endif -%}
{%- set ns = namespace(multi=true, last=messages|length - 1) -%}
{%- for m in messages[::-1] -%}
{%- set index = (messages|length - 1) - loop.index0 -%}
{%- if ns.multi and m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.multi = false -%}{%- set ns.last = index -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- set content = m.content or '' -%}{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if (loop.first and content) or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

# gpt-oss: channels; a call ends with a token of its own, earlier answers with another than the last.
HARMONY = """
{%- macro text(role, body) -%}{{- '<|start|>' ~ role ~ '<|message|>' ~ body ~ '<|end|>' -}}{%- endmacro -%}
{%- set date = strftime_now('%Y-%m-%d') -%}
{{- text('system', 'Current date: ' ~ date ~ '\\nReasoning: ' ~ (reasoning_effort or 'medium')) -}}
{%- if tools -%}
{{- '<|start|>developer<|message|>namespace functions {' -}}
{%- for tool in tools -%}{{- '\\ntype ' ~ tool.function.name ~ ' = () => any;' -}}{%- endfor -%}{{- '}<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(tool=none) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- if m.tool_calls | length > 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson -}}{{- '<|call|>' -}}
{%- set ns.tool = call.name -%}
{%- elif m.role == 'assistant' -%}
{%- if loop.last and m.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' ~ ns.tool ~ ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (m.content | tojson) ~ '<|end|>' -}}
{%- else -%}{{- text('developer' if m.role == 'system' else m.role, m.content) -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

# MiniMax-M2: names between marks that are no words, arguments as XML, thoughts behind the generation prompt.
MINIMAX_M2 = """
{{- ']~!b[' ~ ']~b]system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- for tool in tools or [] -%}{{- '\\n<tool>' ~ tool.function | tojson ~ '</tool>' -}}{%- endfor -%}
{{- '[e~[\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- ']~b]user\\n' ~ m.content ~ '[e~[\\n' -}}
{%- elif m.role == 'assistant' -%}{{- ']~b]ai\\n' -}}
{%- if m.reasoning_content -%}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' -}}{%- endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<invoke name="' ~ call.function.name ~ '">' -}}
{%- for k, v in call.function.arguments.items() -%}
{{- '<parameter name="' ~ k ~ '">' ~ v ~ '</parameter>' -}}{%- endfor -%}
{{- '</invoke>' -}}{%- endfor -%}
{{- '[e~[\\n' -}}
{%- elif m.role == 'tool' -%}{{- ']~b]tool\\n<response>' ~ m.content ~ '</response>[e~[\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n' -}}{%- endif -%}"""

# Granite 3.3: a switch for thoughts in the system's message, and a role for tools.
GRANITE_33 = """
{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = "Today's Date: " ~ strftime_now('%B %d, %Y') ~ '.' -%}{%- set turns = messages -%}
{%- if thinking -%}{%- set system = system ~ ' Write thoughts between <think></think>.' -%}{%- endif -%}{%- endif -%}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' -}}
{%- if tools -%}
{{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\\n' -}}
{%- endif -%}
{%- for m in turns -%}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' -}}
{%- if m['tool_calls'] -%}
{{- (m['content'] or '') + '<|tool_call|>[' -}}
{%- for call in m['tool_calls'] -%}{{- call.function | tojson -}}{{- ', ' if not loop.last -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- m['content'] -}}{%- endif -%}
{{- '<|end_of_text|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"""

# Gemma 3: roles must alternate, and the system's message begins the first of the user.
GEMMA_3 = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' -}}
    {{- first if loop.first else '' -}}
    {%- if m['content'] is string -%}{{ m['content'] | trim }}
    {%- else -%}{%- for item in m['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

# SmolLM 3: blocks that say what the model writes, and a switch that the system's message may have.
SMOLLM_3 = """
{%- set ns = namespace(thinks=enable_thinking if enable_thinking is defined else true) -%}
{%- if messages[0].role == 'system' and '/no_think' in messages[0].content -%}{%- set ns.thinks = false -%}{%- endif -%}
{{- '<|im_start|>system\\nReasoning Mode: ' ~ ('/think' if ns.thinks else '/no_think') ~ '\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content.replace('/no_think', '').rstrip() -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- generation -%}
{{- '<|im_start|>assistant\\n' + ('' if ns.thinks else '<think>\\n\\n</think>\\n') -}}
{{- m.content.lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' ~ ('' if ns.thinks else '<think>\\n\\n</think>\\n') -}}{%- endif -%}"""

# Kimi K2: a call has its number, which begins with the name of the function, in the place of a name. Arguments that
# are a text are written as they are.
KIMI_K2 = """
{%- if tools -%}{{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson ~ '<|im_end|>' -}}{%- endif -%}
{%- for m in messages -%}
{%- set kind = m.role if m.role in ('user', 'assistant') else 'system' -%}
{{- '<|im_' ~ kind ~ '|>' ~ (m.name or m.role) ~ '<|im_middle|>' -}}
{%- if m.role == 'tool' -%}{{- '## Return of ' ~ m.tool_call_id ~ '\\n' -}}{%- endif -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}
{{- '<|tool_calls_section_begin|>' -}}
{%- for call in m.tool_calls -%}
{{- '<|tool_call_begin|>' ~ call['id'] ~ '<|tool_call_argument_begin|>' -}}
{%- set given = call.function.arguments -%}
{{- (given if given is string else given | tojson) ~ '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_section_end|>' -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"""

# Command R7B and A: a token ends the response, and another one the turn.
COMMAND_A = """
{{- bos_token -}}
{%- if tools -%}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' -}}
{%- for tool in tools -%}{{- tool.function | tojson -}}{%- endfor -%}
{{- '<|END_OF_TURN_TOKEN|>' -}}
{%- endif -%}
{%- set ns = namespace(number=0) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
{%- if m.tool_calls -%}
{{- '<|START_ACTION|>[' -}}
{%- for call in m.tool_calls -%}
{{- '{"tool_call_id": "' ~ ns.number ~ '", "tool_name": "' ~ call.function.name ~ '", "parameters": ' -}}
{{- call.function.arguments | tojson ~ '}' -}}
{%- set ns.number = ns.number + 1 -%}
{%- endfor -%}
{{- ']<|END_ACTION|>' -}}
{%- else -%}{{- '<|START_RESPONSE|>' ~ m.content ~ '<|END_RESPONSE|>' -}}{%- endif -%}
{{- '<|END_OF_TURN_TOKEN|>' -}}
{%- else -%}
{{- '<|START_OF_TURN_TOKEN|>' ~ ('<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>') -}}
{{- m.content ~ '<|END_OF_TURN_TOKEN|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}"""

IM = ("<|im_start|>", "<|im_end|>")
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm", "é": [1, true]}'}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<of a city>", "parameters": {"type": "object"}},
    }
]
NUMBERED = {"id": "functions.weather:0", **CALL}
WITH_CALLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"rain": 1}'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still."},
]
WITH_NUMBERS = [
    *(WITH_CALLS[0], {"role": "assistant", "content": None, "tool_calls": [NUMBERED]}),
    {**WITH_CALLS[2], "tool_call_id": "functions.weather:0"},
    *WITH_CALLS[3:],
]
THOUGHT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " first é "},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "Two."},
]


class FamilyChat(NamedTuple):
    """A family's template with a conversation, and what must be trained: texts of each sample that it becomes."""

    name: str
    template: str
    controls: Sequence[str]
    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[Sequence[str]]
    tools: Sequence[Any] = ()
    variables: Mapping[str, Any] = NO_VARIABLES
    stops: Sequence[str] = ()


GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_STOPS = ("<|user|>", "<|observation|>")
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
GRANITE_TOKENS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
KIMI_TOKENS = (
    *(f"<|im_{kind}|>" for kind in ("system", "user", "assistant", "middle", "end")),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
COMMAND_TOKENS = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *(f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")),
    *(f"<|{end}_{what}|>" for what in ("ACTION", "RESPONSE") for end in ("START", "END")),
)
MINIMAX_TOKENS = ("]~!b[", "]~b]", "[e~[")
_GLM_CALL = (
    "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>é</arg_key>\n<arg_value>[1, true]</arg_value>\n</tool_call>"
)
_JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "é": [1, true]}}\n</tool_call><|im_end|>'
_DEEPSEEK_CALL = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>"
    'weather\n```json\n{"city": "Ulm", "é": [1, true]}\n```'
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c></s>"
)
_XML_CALL = (
    '\n<invoke name="weather"><parameter name="city">Ulm</parameter>'
    '<parameter name="é">[1, True]</parameter></invoke>[e~['
)

FAMILY_CHATS = (
    FamilyChat(
        "GLM-4.5 with calls",
        GLM_45,
        GLM_TOKENS,
        WITH_CALLS,
        [[f"{_GLM_CALL}<|observation|>", "\n<think></think>\nYes.<|user|>", "\n<think></think>\nStill.<|user|>"]],
        TOOLS,
        stops=GLM_STOPS,
    ),
    FamilyChat(
        "GLM-4.5 that calls last",
        GLM_45,
        GLM_TOKENS,
        WITH_CALLS[:2],
        [[f"{_GLM_CALL}<|observation|>"]],
        TOOLS,
        stops=GLM_STOPS,
    ),
    FamilyChat(
        "GLM-4.5 with thoughts",
        GLM_45,
        GLM_TOKENS,
        THOUGHT,
        [["\n<think>one and one</think>\n2<|user|>"], ["\n<think>two and two</think>\n4<|user|>"]],
        stops=GLM_STOPS,
    ),
    FamilyChat(
        "GLM-4.5 that does not think",
        GLM_45,
        GLM_TOKENS,
        TALK,
        [["\nOne.<|user|>", "\nTwo.<|user|>"]],
        variables={"enable_thinking": False},
        stops=GLM_STOPS,
    ),
    FamilyChat(
        "DeepSeek V3 with calls",
        DEEPSEEK_V3,
        DEEPSEEK_TOKENS,
        WITH_CALLS,
        [[_DEEPSEEK_CALL, "Yes.</s>", "Still.</s>"]],
        TOOLS,
    ),
    FamilyChat(
        "Kimi K2 with calls",
        KIMI_K2,
        KIMI_TOKENS,
        WITH_NUMBERS,
        [
            [
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
                '{"city": "Ulm", "é": [1, true]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
                "Yes.<|im_end|>",
                "Still.<|im_end|>",
            ]
        ],
        TOOLS,
    ),
    FamilyChat(
        "Command A with calls",
        COMMAND_A,
        COMMAND_TOKENS,
        WITH_CALLS,
        [
            [
                '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
                '{"city": "Ulm", "é": [1, true]}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
                "<|START_RESPONSE|>Yes.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
                "<|START_RESPONSE|>Still.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            ]
        ],
        TOOLS,
    ),
    FamilyChat("DeepSeek V3", DEEPSEEK_V3, DEEPSEEK_TOKENS, TALK, [["One.</s>", "Two.</s>"]]),
    FamilyChat(
        "Qwen 3 with calls",
        QWEN_3,
        IM,
        WITH_CALLS,
        [[f"<think>\n\n</think>\n\n{text}"] for text in (_JSON_CALL, "Yes.<|im_end|>", "Still.<|im_end|>")],
        TOOLS,
    ),
    FamilyChat(
        "Qwen 3 with thoughts",
        QWEN_3,
        IM,
        THOUGHT,
        [
            ["<think>\none and one\n</think>\n\n2<|im_end|>"],
            ["<think>\ntwo and two\n</think>\n\n4<|im_end|>"],
        ],
    ),
    FamilyChat(
        "gpt-oss with calls",
        HARMONY,
        HARMONY_TOKENS,
        WITH_CALLS,
        [
            [
                ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm", "é": [1, true]}<|call|>',
                "<|channel|>final<|message|>Yes.<|end|>",
                "<|channel|>final<|message|>Still.<|return|>",
            ]
        ],
        TOOLS,
        {"reasoning_effort": "high"},
    ),
    FamilyChat(
        "gpt-oss with thoughts",
        HARMONY,
        HARMONY_TOKENS,
        THOUGHT,
        [
            [
                f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{content}<|return|>"
            ]
            for thought, content in (("one and one", "2"), ("two and two", "4"))
        ],
    ),
    FamilyChat(
        "MiniMax-M2 with calls",
        MINIMAX_M2,
        MINIMAX_TOKENS,
        WITH_CALLS,
        [[_XML_CALL, "Yes.[e~[", "Still.[e~["]],
        TOOLS,
    ),
    FamilyChat(
        "MiniMax-M2 with thoughts",
        MINIMAX_M2,
        MINIMAX_TOKENS,
        THOUGHT,
        [
            [
                f"<think>\n{thought}\n</think>\n\n{content}[e~["
                for thought, content in (("one and one", "2"), ("two and two", "4"))
            ]
        ],
    ),
    FamilyChat(
        "Granite 3.3 with calls",
        GRANITE_33,
        GRANITE_TOKENS,
        WITH_CALLS,
        [
            [
                '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ulm", "é": [1, true]}}]<|end_of_text|>',
                "Yes.<|end_of_text|>",
                "Still.<|end_of_text|>",
            ]
        ],
        TOOLS,
        {"thinking": True},
    ),
    FamilyChat(
        "Gemma 3",
        GEMMA_3,
        ("<start_of_turn>", "<end_of_turn>"),
        TALK,
        [["One.<end_of_turn>", "Two.<end_of_turn>"]],
    ),
    FamilyChat("SmolLM 3", SMOLLM_3, IM, TALK, [["One.<|im_end|>", "Two.<|im_end|>"]]),
    FamilyChat(
        "SmolLM 3 that does not think",
        SMOLLM_3,
        IM,
        TALK,
        [["One.<|im_end|>", "Two.<|im_end|>"]],
        variables={"enable_thinking": False},
    ),
)
"""Families whose templates have tools, thoughts or variables."""
