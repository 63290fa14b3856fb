"""Tokenizer and chat template of the small Qwen3.5, for its oracle of films and for tests: words w0 to w99 and named tokens.

A time below ten seconds, as it stands before a pair of frames, is a word of its own number of tenths and w7.
"""

import tokenizers

NAMED = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>", "user", "assistant",
    "system", "mask",
)  # fmt: skip
# Contents alone, so that a test can give any tokens.
TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string %} {{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %} {{ part.text }} {% endif %}
{%- endfor %}{% endif %}{% endfor %}"""


def tokenizer() -> tokenizers.Tokenizer:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    times = [tokenizers.normalizers.Replace(f"<{i / 10:.1f} seconds>", f" w{i} w7 ") for i in range(100)]
    words.normalizer = tokenizers.normalizers.Sequence(times)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in NAMED])
    return words
