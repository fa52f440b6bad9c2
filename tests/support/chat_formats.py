"""Chat formats of public models for tests, in Jinja of our own: what each writes around messages, and its traps.

Most formats only put texts around a content; `around` makes their templates. The others look ahead or back, move or
cut contents, and have templates written out. An entry says which text of a dialogue must be trained.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Ends(NamedTuple):
    """What is trained around the content of an answer."""

    before: str = ""
    after: str = ""
    after_last: str | None = None
    """Where the last answer ends otherwise."""
    before_last: str | None = None


class ChatForm(NamedTuple):
    """A public format: the template, the control tokens of its tokenizer, and what must be trained."""

    models: str
    template: str
    controls: Sequence[str]
    ends: Ends
    trims: bool = False
    has_system: bool = True
    bos: str = "<s>"
    eos: str = "</s>"


def around(
    *,
    user: tuple[str, str],
    answer: tuple[str, str],
    prompt: str,
    system: tuple[str, str] | None = None,
    start: str = "",
    trims: bool = False,
) -> str:
    """Template that writes each message between two texts; without `system` one of the system is refused."""
    content = "m['content'] | trim" if trims else "m['content']"

    def branch(role: str, texts: tuple[str, str]) -> str:
        return f"if m['role'] == {role!r} %}}{{{{ {texts[0]!r} ~ ({content}) ~ {texts[1]!r} }}}}{{% "

    refused = "{{ raise_exception('it has no role for the system') }}{% "
    first = branch("system", system) if system else f"if m['role'] == 'system' %}}{refused}"
    return (
        f"{{{{ {start!r} }}}}{{% for m in messages %}}{{% {first}el{branch('user', user)}"
        f"el{branch('assistant', answer)}endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )


def chatml(start: str = "", default_system: str | None = None) -> str:
    plain = around(
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        answer=("<|im_start|>assistant\n", "<|im_end|>\n"),
        prompt="<|im_start|>assistant\n",
        start=start,
    )
    if default_system is None:
        return plain
    written = f"<|im_start|>system\n{default_system}<|im_end|>\n"
    return f"{{% if messages[0]['role'] != 'system' %}}{{{{ {written!r} }}}}{{% endif %}}{plain}"


def headed(open_: str, close: str, end: str, *, names: Sequence[str], start: str = "", trims: bool = False) -> str:
    """Each message as open + name of its role + close + content + end."""
    system, user, assistant = (f"{open_}{name}{close}" for name in names)
    return around(
        system=(system, end), user=(user, end), answer=(assistant, end), prompt=assistant, start=start, trims=trims
    )


ROLES = ("system", "user", "assistant")

LLAMA_2 = """
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
  {%- if m['role'] == 'system' -%}{%- set ns.system = '<<SYS>>\n' ~ m['content'] ~ '\n<</SYS>>\n\n' -%}
  {%- elif m['role'] == 'user' -%}
    {{- bos_token ~ '[INST] ' ~ ns.system ~ (m['content'] | trim) ~ ' [/INST]' -}}{%- set ns.system = '' -%}
  {%- else -%}{{- ' ' ~ (m['content'] | trim) ~ ' ' ~ eos_token -}}{%- endif -%}
{%- endfor -%}"""

# The system's message stands before the last message of the user, so a longer dialogue moves it.
MISTRAL_LATER = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list -%}
{{- bos_token -}}
{%- for m in turns -%}
  {%- if m['role'] == 'user' -%}
    {%- if tools and m == users[-1] -%}
      {{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' ~ (system ~ '\n\n' if system and m == users[-1] else '') ~ m['content'] ~ '[/INST]' -}}
  {%- elif m['role'] == 'tool' -%}{{- '[TOOL_RESULTS] ' ~ m['content'] ~ '[/TOOL_RESULTS]' -}}
  {%- elif m['tool_calls'] -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in m['tool_calls'] -%}{{- call['function'] | tojson ~ (', ' if not loop.last else '') -}}{%- endfor -%}
    {{- ']' ~ eos_token -}}
  {%- else -%}{{- ' ' ~ (m['content'] | trim) ~ eos_token -}}{%- endif -%}
{%- endfor -%}"""

MISTRAL_FIRST = """
{{- bos_token -}}
{%- for m in messages -%}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
  {%- if m['role'] == 'user' -%}{{- '[INST] ' ~ m['content'] ~ ' [/INST]' -}}
  {%- else -%}{{- ' ' ~ m['content'] ~ eos_token -}}{%- endif -%}
{%- endfor -%}"""

# A message of the system becomes the beginning of the first message of the user.
GEMMA_3 = """
{{- bos_token -}}
{%- set first = messages[0]['content'] ~ '\n\n' if messages[0]['role'] == 'system' else '' -%}
{%- for m in (messages[1:] if first else messages) -%}
  {{- '<start_of_turn>' ~ ('model' if m['role'] == 'assistant' else m['role']) ~ '\n' -}}
  {{- first if loop.first else '' -}}
  {{- (m['content'] | trim) ~ '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""

LLAMA_31 = """
{%- if strftime_now is defined -%}{%- set date = strftime_now('%d %b %Y') -%}{%- endif -%}
{{- bos_token ~ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' ~ date ~ '\n\n' -}}
{%- if messages[0]['role'] == 'system' -%}
  {{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}
{%- else -%}{%- set turns = messages -%}{%- endif -%}
{%- if tools -%}{{- '\n' ~ (tools | tojson(indent=4)) -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for m in turns -%}
  {%- set role = 'ipython' if m['role'] == 'tool' else m['role'] -%}
  {{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' -}}
  {%- if m['tool_calls'] -%}
    {%- set call = m['tool_calls'][0]['function'] -%}
    {{- '{"name": "' ~ call['name'] ~ '", "parameters": ' ~ (call['arguments'] | tojson) ~ '}' -}}
  {%- else -%}{{- m['content'] | trim -}}{%- endif -%}
  {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

# Results of tools that follow each other are in one turn, so a template looks at its neighbours.
QWEN_25 = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are an assistant.' -%}
{{- '<|im_start|>system\n' ~ system -}}
{%- if tools -%}{{- '\n\n<tools>' -}}{%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools>' -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{- '<|im_start|>user\n' ~ m['content'] ~ '<|im_end|>\n' -}}
  {%- elif m['role'] == 'assistant' -%}
    {{- '<|im_start|>assistant' -}}
    {%- if m['content'] -%}{{- '\n' ~ m['content'] -}}{%- endif -%}
    {%- for call in m['tool_calls'] or [] -%}
      {{- '\n<tool_call>\n' ~ (call['function'] | tojson) ~ '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m['role'] == 'tool' -%}
    {%- if messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' ~ m['content'] ~ '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Thoughts stay in the last turn alone, which has an empty place for them if there are none.
QWEN_3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m['role'] != 'assistant' -%}{{- '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' -}}
  {%- else -%}
    {%- set thought = '' -%}{%- set content = m['content'] -%}
    {%- if '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last -%}{{- '<think>\n' ~ thought ~ '\n</think>\n\n' -}}{%- endif -%}
    {{- content ~ '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Thoughts are cut off in every turn, and the system's messages are collected first.
DEEPSEEK_R1 = """
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}{%- if m['role'] == 'system' -%}{%- set ns.system = ns.system ~ m['content'] -%}{%- endif -%}
{%- endfor -%}
{{- bos_token ~ ns.system -}}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{- '<|User|>' ~ m['content'] -}}
  {%- elif m['role'] == 'assistant' -%}
    {{- '<|Assistant|>' ~ m['content'].split('</think>')[-1] ~ eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""

# The last answer ends with another token than those before.
HARMONY = """
{%- for m in messages -%}
  {%- if m['role'] == 'assistant' -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' ~ m['content'] -}}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
  {%- else -%}{{- '<|start|>' ~ m['role'] ~ '<|message|>' ~ m['content'] ~ '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

OLMO_2 = """
{{- bos_token -}}
{%- for m in messages -%}
  {{- '<|' ~ m['role'] ~ '|>\n' ~ m['content'] -}}
  {%- if m['role'] == 'assistant' -%}{{- eos_token ~ ('' if loop.last else '\n') -}}
  {%- else -%}{{- '\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""

SMOLLM_3 = """
{%- for m in messages -%}
  {%- if m['role'] == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}{{- m['content'] ~ '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}
  {%- else -%}{{- '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# The block leaves out the token that ends the turn, which must be trained nevertheless.
GENERATION_WITHOUT_END = SMOLLM_3.replace(
    "{{- m['content'] ~ '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
    "{{- m['content'] -}}{%- endgeneration -%}{{- '<|im_end|>\\n' -}}",
)

IM = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
BARS = ("<|system|>", "<|user|>", "<|assistant|>")
IM_END = Ends(after="<|im_end|>")
EOS = Ends(after="</s>")

VERIFIED = (
    ChatForm("chatml: Yi, Dolphin, OpenHermes", chatml(), IM, IM_END),
    ChatForm("InternLM 2", chatml(start="<s>"), IM, IM_END),
    ChatForm("SmolLM 2", chatml(default_system="You help."), IM, IM_END, has_system=False),
    ChatForm("Qwen 1.5", chatml(default_system="You help."), IM, IM_END),
    ChatForm("Qwen 2.5", QWEN_25, IM, IM_END),
    ChatForm("Qwen 3", QWEN_3, IM, Ends("", "<|im_end|>", before_last="<think>\n\n</think>\n\n")),
    ChatForm("SmolLM 3", SMOLLM_3, IM, IM_END),
    ChatForm("blocks without the end", GENERATION_WITHOUT_END, IM, IM_END),
    ChatForm("Llama 2", LLAMA_2, (), Ends(" ", " </s>"), trims=True),
    ChatForm(
        "Llama 3",
        headed(HEADERS[0], HEADERS[1] + "\n\n", HEADERS[2], names=ROLES, start="<s>", trims=True),
        HEADERS,
        Ends(after="<|eot_id|>"),
        trims=True,
    ),
    ChatForm("Llama 3.1", LLAMA_31, HEADERS, Ends(after="<|eot_id|>"), trims=True),
    ChatForm("Mistral 7B v0.1", MISTRAL_FIRST, (), Ends(" ", "</s>"), has_system=False),
    ChatForm(
        "Mistral 7B v0.3",
        MISTRAL_LATER,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        Ends(" ", "</s>"),  # the system's message moves, so only marks find the first answer
        trims=True,
    ),
    ChatForm(
        "Gemma 2",
        around(
            user=("<start_of_turn>user\n", "<end_of_turn>\n"),
            answer=("<start_of_turn>model\n", "<end_of_turn>\n"),
            prompt="<start_of_turn>model\n",
            start="<s>",
            trims=True,
        ),
        TURNS,
        Ends(after="<end_of_turn>"),
        trims=True,
        has_system=False,
    ),
    ChatForm("Gemma 3", GEMMA_3, TURNS, Ends(after="<end_of_turn>"), trims=True),
    ChatForm("Phi 3", headed("<|", "|>\n", "<|end|>\n", names=ROLES), (*BARS, "<|end|>"), Ends(after="<|end|>")),
    ChatForm(
        "Phi 4",
        headed("<|im_start|>", "<|im_sep|>", "<|im_end|>", names=ROLES),
        (*IM, "<|im_sep|>"),
        IM_END,
    ),
    ChatForm("Zephyr", headed("<|", "|>\n", "</s>\n", names=ROLES), (), EOS),
    ChatForm("TinyLlama", headed("<|", "|>\n", "</s>\n", names=ROLES, trims=True), (), EOS, trims=True),
    ChatForm("StableLM 2", headed("<|", "|>\n", "</s>\n", names=ROLES), BARS, EOS),
    ChatForm("Falcon 3", headed("<|", "|>\n", "</s>\n", names=ROLES), BARS, EOS),
    ChatForm(
        "Vicuna",
        around(
            system=("", " "), user=("USER: ", " "), answer=("ASSISTANT: ", "</s>"), prompt="ASSISTANT:", start="<s>"
        ),
        (),
        Ends(" ", "</s>"),
    ),
    ChatForm(
        "Alpaca",
        around(
            system=("", "\n\n"),
            user=("### Instruction:\n", "\n\n"),
            answer=("### Response:\n", "</s>\n\n"),
            prompt="### Response:\n",
        ),
        (),
        EOS,
    ),
    ChatForm(
        "OpenChat 3.5",
        headed("", ": ", "<|end_of_turn|>", names=("System", "GPT4 User", "GPT4 Assistant"), start="<s>"),
        ("<|end_of_turn|>",),
        Ends(after="<|end_of_turn|>"),
    ),
    ChatForm(
        "DeepSeek 2",
        around(
            system=("", "\n\n"),
            user=("User: ", "\n\n"),
            answer=("Assistant: ", "</s>"),
            prompt="Assistant:",
            start="<s>",
        ),
        (),
        Ends(" ", "</s>"),
    ),
    ChatForm("DeepSeek 3 and R1", DEEPSEEK_R1, ("<|User|>", "<|Assistant|>"), EOS),
    ChatForm(
        "Command R, Aya",
        headed(
            "<|START|><|",
            "|>",
            "<|END|>",
            names=("SYSTEM_TOKEN", "USER_TOKEN", "CHATBOT_TOKEN"),
            start="<s>",
            trims=True,
        ),
        ("<|START|>", "<|END|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        Ends(after="<|END|>"),
        trims=True,
    ),
    ChatForm(
        "Granite 3",
        headed("<|start_of_role|>", "<|end_of_role|>", "</s>\n", names=ROLES),
        ("<|start_of_role|>", "<|end_of_role|>"),
        EOS,
    ),
    ChatForm("OLMo 2", OLMO_2, BARS, EOS),
    ChatForm(
        "EXAONE",
        headed("[|", "|]", "[|endofturn|]\n", names=ROLES),
        ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
        Ends(after="[|endofturn|]"),
    ),
    ChatForm(
        "Kimi K2",
        around(
            system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
            user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
            answer=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
            prompt="<|im_assistant|>assistant<|im_middle|>",
        ),
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        IM_END,
    ),
    ChatForm(
        "Baichuan 2",
        around(
            system=("", ""),
            user=("<reserved_106>", ""),
            answer=("<reserved_107>", "</s>"),
            prompt="<reserved_107>",
        ),
        ("<reserved_106>", "<reserved_107>"),
        EOS,
    ),
    ChatForm(
        "MiniCPM",
        around(system=("", ""), user=("<User>", ""), answer=("<AI>", "</s>"), prompt="<AI>", start="<s>", trims=True),
        (),
        EOS,
        trims=True,
    ),
    ChatForm(
        "Jamba",
        headed("<|bom|><|", "|>", "<|eom|>", names=ROLES, start="<s>"),
        ("<|bom|>", "<|eom|>", *BARS),
        Ends(after="<|eom|>"),
    ),
    ChatForm(
        "gpt-oss",
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        Ends(
            "<|channel|>final<|message|>",
            "<|end|>",
            after_last="<|return|>",
        ),
    ),
)
"""Formats whose answers must be found."""

REFUSED = {
    "Falcon 7B": around(
        system=("", "\n\n"), user=("User: ", "\n\n"), answer=("Assistant: ", "\n\n"), prompt="Assistant:"
    ),
    "SOLAR": around(
        system=("### System:\n", "\n\n"),
        user=("### User:\n", "\n\n"),
        answer=("### Assistant:\n", "\n\n"),
        prompt="### Assistant:\n",
    ),
    "GLM 4": around(
        system=("<|system|>\n", ""), user=("<|user|>\n", ""), answer=("<|assistant|>\n", ""), prompt="<|assistant|>\n"
    ),
    "Code Llama by names": around(
        system=("Source: system\n\n ", " <step> "),
        user=("Source: user\n\n ", " <step> "),
        answer=("Source: assistant\n\n ", " <step> "),
        prompt="Source: assistant\nDestination: user\n\n ",
    ),
}
"""Formats that end an answer with no token of their own."""
