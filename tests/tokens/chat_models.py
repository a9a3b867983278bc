"""Tokenizers with chat templates of the kinds that published models have, small and made here."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken

from etude.tokens import CHATML_TEMPLATE, QWEN3_TEMPLATE, Tokenizer, train_tokenizer
from etude.tokens.chat_template import write_chat_template
from etude.tokens.grammar.call_forms import KIMI_JSON

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEXTS = (
    "You are a coding agent. Fix lib/tally.py, then run its tests.\n\n\nassistant user system tool\n" * 8,
)
TOLD = """\
{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with words of the system's own; it knows no tools and no calls, and fails on content null."""
DATED = """\
{{- bos_token + '<|start|>system<|header|>\\n\\nToday: ' }}\
{{- strftime_now('%d') if strftime_now is defined else 'a day' }}\
{{- '\\n\\n' + (messages[0].content if messages[0].role == 'system' else '') + '<|eot|>' }}\
{%- for message in messages[(1 if messages[0].role == 'system' else 0):] %}\
{{- '<|start|>' + message.role + '<|header|>\\n\\n' + message.content + '<|eot|>' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start|>assistant<|header|>\\n\\n' }}{%- endif %}"""
"""The same, with a system message in every conversation, which names the day where that is known."""
HEADERS = """\
{{- bos_token }}{%- for message in messages %}\
{{- '<|start|>' + message.role + '<|header|>\\n\\n' + message.content + '<|eot|>' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start|>assistant<|header|>\\n\\n' }}{%- endif %}"""
"""Headers of their own tokens, and one token before everything."""

OPENERS = """\
{%- for message in messages %}\
{%- if loop.first and message.role != 'system' %}\
{{- '<|system|>system<|header|>You help.<|eot|>' }}{%- endif %}\
{{- '<|' + ('system' if message.role == 'tool' else message.role) + '|>' + message.role + '<|header|>' }}\
{{- '## Return of ' + message.tool_call_id + '\\n' if message.role == 'tool' else '' }}\
{{- message.content + '<|eot|>' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>assistant<|header|>' }}{%- endif %}"""
"""A token of its own opens each role, and results name the call that they answer."""

UNENDED = """\
{{- bos_token }}{%- for message in messages %}\
{%- if message.role == 'system' %}{{- message.content }}{%- endif %}\
{%- if message.role == 'user' %}{{- '<|user|>' + message.content }}{%- endif %}\
{%- if message.role == 'assistant' %}{{- '<|assistant|>' + message.content + '<|eot|>' }}{%- endif %}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
"""Only answers end with a token; the system's words have no frame at all."""

THINKING = """\
{%- set ns = namespace(last=-1) %}{%- for message in messages %}\
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}\
{%- if message.role == 'assistant' and loop.index0 > ns.last %}\
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}\
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Prompts open reasoning, and answers before the user's last words are shown without any."""

CHANNELS = """\
{{- '<|start|>system<|message|>Today: ' + strftime_now('%d') + '<|end|>' }}{%- for message in messages %}\
{%- if message.role == 'system' %}\
{{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '\\n\\n<|end|>' }}\
{%- elif message.role == 'assistant' %}\
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}\
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}\
{%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""Answers come in channels, end with a token of their own, are shown without reasoning; it needs a clock."""


@cache
def chat_tokenizer(
    template: str = "",
    tags: bool = False,
    marks: tuple[str, ...] = (),
    vocab_size: int = 330,
    texts: tuple[str, ...] = TEXTS,
) -> Tokenizer:
    """A tokenizer with ChatML's control tokens, and with `tags` those of Qwen3's that are not special."""
    base = train_tokenizer(texts, vocab_size, ["<|im_start|>", "<|im_end|>", *marks])
    whole = tokenizers.Tokenizer.from_str(base._definition)
    whole.add_tokens([AddedToken(name, special=False, normalized=False) for name in (TAGS if tags else ())])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>" if marks else None}
    return Tokenizer(whole.to_str(), {**config, **({"chat_template": template} if template else {})})


def headers_tokenizer() -> Tokenizer:
    return chat_tokenizer(HEADERS, marks=("<|begin|>", "<|start|>", "<|header|>", "<|eot|>"))


def openers_tokenizer() -> Tokenizer:
    return chat_tokenizer(
        OPENERS, marks=("<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|header|>", "<|eot|>")
    )


def unended_tokenizer() -> Tokenizer:
    return chat_tokenizer(UNENDED, marks=("<|begin|>", "<|user|>", "<|assistant|>", "<|eot|>"))


def dated_tokenizer() -> Tokenizer:
    return chat_tokenizer(DATED, marks=("<|begin|>", "<|start|>", "<|header|>", "<|eot|>"))


def thinking_tokenizer() -> Tokenizer:
    return chat_tokenizer(THINKING, tags=True)


def channels_tokenizer() -> Tokenizer:
    return chat_tokenizer(
        CHANNELS, marks=("<|begin|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>")
    )


def qwen_like() -> Tokenizer:
    """Its own template announces tools and writes calls as our grammar does."""
    return chat_tokenizer(write_chat_template(QWEN3_TEMPLATE), tags=True)


def told_chatml() -> Tokenizer:
    return chat_tokenizer(TOLD)


def plain_chatml() -> Tokenizer:
    return chat_tokenizer(write_chat_template(CHATML_TEMPLATE))


CODER = """\
{%- set start = 1 if messages[0].role == 'system' else 0 %}\
{%- if tools or start %}{{- '<|im_start|>system\\n' }}\
{%- if tools %}{{- '# Tools' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}\
{{- '\\nCall: <tool_call>' }}{{- '\\n\\n' if start else '' }}{%- endif %}\
{{- (messages[0].content if start else '') + '<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages[start:] %}\
{%- if message.role == 'tool' %}\
{{- '<|im_start|>user' if loop.previtem.role != 'tool' else '' }}\
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}\
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}\
{%- for call in message.tool_calls or [] %}\
{{- '\\n' if not loop.first else '\\n\\n' if message.content else '' }}\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}\
{%- for name, value in call.function.arguments.items() %}\
{{- '<parameter=' + name + '>\\n' }}\
{{- (value | tojson if value is sequence and value is not string else value | string) }}\
{{- '\\n</parameter>\\n' }}{%- endfor %}\
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
"""It announces tools in words of its own, and writes calls as Qwen3-Coder does."""


def coder_tokenizer() -> Tokenizer:
    return chat_tokenizer(CODER, tags=True)


GLM = """\
{{- '<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools' }}\
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}\
{{- '\\nCall: <tool_call>NAME' }}{%- endif %}\
{%- set ns = namespace(last=-1) %}{%- for message in messages %}\
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for message in messages %}\
{%- if message.role == 'assistant' %}{{- '<|assistant|>\\n<think>' }}\
{{- (message.reasoning_content or '') if loop.index0 > ns.last else '' }}{{- '</think>' }}\
{{- '\\n' + message.content if message.content else '' }}\
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}\
{%- for name, value in call.function.arguments.items() %}{{- '<arg_key>' + name + '</arg_key>\\n' }}\
{{- '<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\\n' }}{%- endfor %}\
{{- '</tool_call>' }}{%- endfor %}\
{%- elif message.role == 'tool' %}{{- '<|observation|>' if loop.previtem.role != 'tool' else '' }}\
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{%- elif message.role == 'user' %}{{- '<|user|>\\n' + message.content }}\
{%- else %}{{- '<|system|>\\n' + message.content }}{%- endif %}{%- endfor %}\
{{- '<|assistant|>' if add_generation_prompt else '' }}"""
"""No message ends with a token: the one that opens the next ends an answer. Calls are written as GLM's."""

KIMI = """\
{{- '<|im_system|>tools<|im_middle|>' + (tools | tojson) + '<|im_end|>' if tools else '' }}\
{%- for message in messages %}{%- if loop.first and message.role != 'system' %}\
{{- '<|im_system|>system<|im_middle|>You help.<|im_end|>\\n' }}{%- endif %}\
{%- if message.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' }}\
{%- elif message.role == 'assistant' %}{{- '<|im_assistant|>assistant<|im_middle|>' }}\
{%- else %}{{- '<|im_system|>' + (message.name or message.role) + '<|im_middle|>' }}{%- endif %}\
{{- '## Return of ' + message.tool_call_id + '\\n' if message.role == 'tool' else '' }}\
{{- message.content }}\
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in message.tool_calls %}\
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}\
{{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}\
{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}\
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' }}"""
"""Calls have ids, which their results name, and the words that it adds itself are followed by a newline."""


GLM_MARKS = (
    *("<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
KIMI_MARKS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", *KIMI_JSON.tags)


def glm_tokenizer() -> Tokenizer:
    return chat_tokenizer(GLM, tags=True, marks=GLM_MARKS)


def kimi_tokenizer(template: str = KIMI) -> Tokenizer:
    return chat_tokenizer(template, "<think>" in template, marks=KIMI_MARKS)
