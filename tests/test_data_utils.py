from __future__ import annotations

import copy

import pytest

from tests.testing_utils import make_tokenizer
from trl.data_utils import (
    apply_chat_template,
    extract_prompt,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
)


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}
OTHER = {"role": "assistant", "content": "Go away."}


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"prompt": [USER]}, True),
        ({"messages": [USER, ANSWER]}, True),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, True),
        ({"prompt": [USER], "completion": [ANSWER], "label": True}, True),
        ({"prompt": "Hi"}, False),
        ({"prompt": []}, False),
        ({"prompt": ["Hi"]}, False),
        ({"prompt": [{"from": "user", "value": "Hi"}]}, False),
        ({"question": [USER]}, False),
        ({}, False),
    ],
)
def test_is_conversational(example, expected):
    assert is_conversational(example) is expected


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}]}, True),
        ({"conversations": [USER]}, False),
        ({"conversations": "Hi"}, False),
        ({"messages": [{"from": "human", "value": "Hi"}]}, False),
    ],
)
def test_is_conversational_from_value(example, expected):
    assert is_conversational_from_value(example) is expected


def test_convert_to_chatml():
    example = {
        "conversations": [{"from": "user", "value": "Hi", "weight": 1}],
        "prompt": [{"from": "user", "value": "Hi"}],
        "source": [{"from": "the web"}],
        "completion": "text",
    }
    before = copy.deepcopy(example)
    assert maybe_convert_to_chatml(example) == {
        "messages": [{"role": "user", "content": "Hi", "weight": 1}],
        "prompt": [USER],
        "source": [{"from": "the web"}],
        "completion": "text",
    }
    assert example == before
    assert maybe_convert_to_chatml({"messages": [USER, ANSWER]}) == {"messages": [USER, ANSWER]}


PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"messages": [USER, ANSWER]}, {"text": PROMPT + "Hello!<|im_end|>\n"}),
        ({"prompt": [USER]}, {"prompt": PROMPT}),
        ({"prompt": [USER, ANSWER]}, {"prompt": PROMPT + "Hello!"}),
        ({"prompt": [USER], "completion": [ANSWER]}, {"prompt": PROMPT, "completion": "Hello!<|im_end|>\n"}),
        (
            {"prompt": [USER], "completion": [ANSWER], "label": False, "unknown": 1},
            {"prompt": PROMPT, "completion": "Hello!<|im_end|>\n", "label": False},
        ),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
            {"prompt": PROMPT, "chosen": "Hello!<|im_end|>\n", "rejected": "Go away.<|im_end|>\n"},
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            {"chosen": PROMPT + "Hello!<|im_end|>\n", "rejected": PROMPT + "Go away.<|im_end|>\n"},
        ),
    ],
    ids=lambda value: "+".join(value),
)
def test_apply_chat_template(tokenizer, example, expected):
    assert apply_chat_template(example, tokenizer) == expected
    assert maybe_apply_chat_template(example, tokenizer) == expected


def test_text_is_left_alone(tokenizer):
    example = {"prompt": "Hi", "answer": 3}
    assert maybe_apply_chat_template(example, tokenizer) is example


def test_prompt_and_reply_add_up_where_the_template_opens_a_turn_in_another_way():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    rendered = apply_chat_template({"prompt": [USER], "completion": [ANSWER]}, tokenizer)
    assert rendered == {"prompt": "<user>Hi<assistant>", "completion": "Hello!"}
    assert apply_chat_template({"prompt": [USER]}, tokenizer) == {"prompt": "<user>Hi<assistant><think>"}


def test_template_gets_tools_and_variables_of_call_and_example():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mode }} {{ level }} {{ tools | length if tools else 0 }}"
    tool = {"type": "function", "function": {"name": "add"}}
    example = {"prompt": [USER], "tools": [tool, tool], "chat_template_kwargs": {"mode": "a", "level": 1}}
    assert apply_chat_template(example, tokenizer) == {"prompt": "a 1 2"}
    assert apply_chat_template(example, tokenizer, tools=[tool], mode="b") == {"prompt": "b 1 1"}
    assert maybe_apply_chat_template(example, tokenizer, [tool], mode="b") == {"prompt": "b 1 1"}


def test_apply_chat_template_refuses_bad_examples(tokenizer):
    with pytest.raises(KeyError, match=r"\['completion'\].*prompt, completion|completion, prompt"):
        apply_chat_template({"completion": [ANSWER]}, tokenizer)
    with pytest.raises(ValueError, match="the role 'system'"):
        apply_chat_template({"prompt": [{"role": "system", "content": "Be kind."}]}, tokenizer)
    with pytest.raises(ValueError, match="has no message"):
        apply_chat_template({"prompt": []}, tokenizer)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),
        ("blue", "green", ("", "blue", "green")),
        ("sky blue", "sky", ("sky", " blue", "")),
        ([USER, ANSWER], [USER, OTHER], ([USER], [ANSWER], [OTHER])),
    ],
)
def test_extract_prompt(chosen, rejected, expected):
    result = dict(zip(("prompt", "chosen", "rejected"), expected, strict=True))
    assert extract_prompt({"chosen": chosen, "rejected": rejected}) == result
    assert maybe_extract_prompt({"chosen": chosen, "rejected": rejected}) == result


def test_maybe_extract_prompt_trusts_a_prompt_in_the_same_format():
    explicit = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}
    assert maybe_extract_prompt(explicit) is explicit
    unrelated = {"prompt": "Hi", "answer": 3}
    assert maybe_extract_prompt(unrelated) is unrelated
    mixed = {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert maybe_extract_prompt(mixed) == explicit
