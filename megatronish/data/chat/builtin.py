"""Built-in chat templates, for models without one of their own: a line in `BUILT_IN` each.

A format that ends a turn with a control token of its own needs a tokenizer that has it. Those that end a turn with
`eos_token` fit every tokenizer: alpaca, vicuna, zephyr and plain.
"""

_FIRST_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
"""Sets `system`, the content of a first message of the system, and `turns`, the others."""
_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('it has no place for tools') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('it has no place for the role ' ~ message['role']) }}"
    "{% elif message.get('tool_calls') %}{{ raise_exception('it has no place for tool calls') }}{% endif %}{% endfor %}"
)

CHATML = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] ~ '\n\n' }}"
    "{% endif %}Functions that may be called, one a line:\n{% for tool in tools %}{{ tool | tojson ~ '\n' }}{% endfor %}"
    "A call is JSON with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] ~ '\n' }}{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{% if not loop.first or message['content'] %}{{ '\n' }}{% endif %}"
    "<tool_call>{{ '\n' ~ ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) }}"
    "{{ '\n' }}</tool_call>{% endfor %}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
LLAMA3 = (
    _NO_TOOLS + "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "{{ '\n\n' ~ (message['content'] | trim) }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
LLAMA2 = (
    _NO_TOOLS + _FIRST_SYSTEM + "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ bos_token ~ '[INST] ' }}{% if loop.first and system %}{{ '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ (message['content'] | trim) ~ ' [/INST]' }}{% else %}{{ ' ' ~ (message['content'] | trim) ~ ' ' ~ eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL = (
    _NO_TOOLS + _FIRST_SYSTEM + "{{ bos_token }}{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' }}{% if loop.first and system %}{{ system ~ '\n\n' }}{% endif %}{{ message['content'] ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ (message['content'] | trim) ~ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    _NO_TOOLS + _FIRST_SYSTEM + "{{ bos_token }}{% for message in turns %}"
    "<start_of_turn>{{ ('model' if message['role'] == 'assistant' else 'user') ~ '\n' }}"
    "{% if loop.first and system %}{{ system ~ '\n\n' }}{% endif %}{{ message['content'] | trim }}<end_of_turn>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model{{ '\n' }}{% endif %}"
)
PHI3 = (
    _NO_TOOLS + "{% for message in messages %}<|{{ message['role'] }}|>{{ '\n' ~ message['content'] }}<|end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}"
)
ZEPHYR = (
    _NO_TOOLS + "{% for message in messages %}<|{{ message['role'] }}|>{{ '\n' ~ message['content'] ~ eos_token ~ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}"
)
ALPACA = (
    _NO_TOOLS + _FIRST_SYSTEM + "{{ bos_token }}{% if system %}{{ system ~ '\n\n' }}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}{{ '### Instruction:\n' ~ message['content'] ~ '\n\n' }}"
    "{% else %}{{ '### Response:\n' ~ message['content'] ~ eos_token ~ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
VICUNA = (
    _NO_TOOLS + _FIRST_SYSTEM + "{{ bos_token }}{% if system %}{{ system ~ ' ' }}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}{{ 'USER: ' ~ (message['content'] | trim) ~ ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' ~ (message['content'] | trim) ~ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PLAIN = (
    _NO_TOOLS + "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Answer:' ~ '\n' ~ message['content'] ~ eos_token ~ '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question:\n' ~ message['content'] ~ '\n\n' }}"
    "{% else %}{{ message['content'] ~ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:\n' }}{% endif %}"
)

BUILT_IN = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "llama2": LLAMA2,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi3": PHI3,
    "zephyr": ZEPHYR,
    "alpaca": ALPACA,
    "vicuna": VICUNA,
    "plain": PLAIN,
}
"""Templates by the names of --chat-template."""
