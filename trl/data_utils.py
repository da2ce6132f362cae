"""Datasets of conversations: what format an example is in, and how it becomes text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


Messages = list[dict[str, Any]]

_REPLIES = ("completion", "chosen", "rejected")

_TEMPLATED_COLUMNS = (
    {"messages"},  # language modeling
    {"prompt"},  # prompt only
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},  # preference
    {"chosen", "rejected"},  # preference, the prompt within
    {"prompt", "completion", "label"},  # unpaired preference
)


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether `example` holds messages with a `role` rather than text.

    Looks at the columns `prompt`, `completion`, `chosen`, `rejected` and `messages`, whichever are there.

    ```python
    >>> is_conversational({"prompt": [{"role": "user", "content": "How old is the sun?"}]})
    True
    >>> is_conversational({"prompt": "The sun is"})
    False
    ```
    """
    return any(_has_messages(example.get(column), {"role"}) for column in ("prompt", *_REPLIES, "messages"))


def is_conversational_from_value(example: dict[str, Any]) -> bool:
    """Whether `example` is a conversation in the older format: a `conversations` column with `from` and `value`.

    ```python
    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "How old is the sun?"}]})
    True
    >>> is_conversational_from_value({"conversations": [{"role": "user", "content": "How old is the sun?"}]})
    False
    ```
    """
    return _has_messages(example.get("conversations"), {"from", "value"})


def maybe_convert_to_chatml(example: dict[str, Any]) -> dict[str, Any]:
    """Rename `from` and `value` of every message to `role` and `content`, and `conversations` to `messages`.

    Returns a new example; anything else in it stays as it is.

    ```python
    >>> maybe_convert_to_chatml({"conversations": [{"from": "user", "value": "Hello"}]})
    {'messages': [{'role': 'user', 'content': 'Hello'}]}
    ```
    """
    columns = {"prompt", *_REPLIES, "messages", "conversations"}
    fields = {"from": "role", "value": "content"}
    converted = {}
    for column, value in example.items():
        if column in columns and isinstance(value, list):
            value = [
                {fields.get(field, field): content for field, content in message.items()}
                if isinstance(message, dict)
                else message
                for message in value
            ]
        converted["messages" if column == "conversations" else column] = value
    return converted


def apply_chat_template(
    example: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Turn the messages of one example into text, as the tokenizer's chat template writes them.

    A prompt that ends with the user's turn gets the opening of the assistant's; one that ends with the assistant's is
    left open, to be continued. Replies (`completion`, `chosen`, `rejected`) are what the template writes after the
    prompt. Where a template opens the assistant's turn in another way than it later writes it, the prompt is cut to
    what the two have in common, so that prompt and reply always add up to the whole conversation.

    Args:
        example (`dict`): Conversational columns, in one of these sets: `messages`; `prompt`; `prompt` and `completion`
            (perhaps with `label`); `chosen` and `rejected` (perhaps with `prompt`). Its `tools` and
            `chat_template_kwargs` are honoured where the arguments are silent. Other columns are ignored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Has a chat template.
        tools (`list`, *optional*): Functions, or their JSON schemas, that the template may describe.
        **template_kwargs: Further variables for the template.

    Returns:
        `dict`: `messages` as `text`, the others under their own name, and `label` if there is one.

    Raises:
        KeyError: For any other set of columns.
        ValueError: If a prompt has no message or ends with a message that nobody can answer, such as a system message.
    """
    columns = {"prompt", *_REPLIES, "messages", "label"} & example.keys()
    if columns not in _TEMPLATED_COLUMNS:
        accepted = "; ".join(", ".join(sorted(known)) for known in _TEMPLATED_COLUMNS)
        raise KeyError(
            f"No chat template applies to the columns {sorted(columns)}. Sets that are accepted: {accepted}."
        )
    tools = tools or example.get("tools")
    template_kwargs = {**(example.get("chat_template_kwargs") or {}), **template_kwargs}

    def render(messages: Messages, **ending: bool) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **ending, **template_kwargs)

    if "messages" in columns:
        return {"text": render(example["messages"])}

    replies = [column for column in _REPLIES if column in columns]
    if "prompt" not in columns:
        return {column: render(example[column]) for column in replies}

    prompt = render(example["prompt"], **_open_ending(example["prompt"]))
    conversations = {column: render(example["prompt"] + example[column]) for column in replies}
    for text in conversations.values():
        prompt = prompt[: _shared_length(prompt, text)]
    rendered = {"prompt": prompt} | {column: text[len(prompt) :] for column, text in conversations.items()}
    return rendered | ({"label": example["label"]} if "label" in columns else {})


def maybe_apply_chat_template(
    example: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """[`apply_chat_template`] if `example` is conversational, else `example` itself."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Split what `chosen` and `rejected` begin with in common off as the `prompt`.

    Works on text and on messages. A space before the first difference belongs to the replies.

    ```python
    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' green.'}
    ```
    """
    chosen, rejected = example["chosen"], example["rejected"]
    length = _shared_length(chosen, rejected)
    if length and chosen[length - 1] == " ":
        length -= 1
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """[`extract_prompt`] for a preference example whose prompt lies within its replies, else `example` itself.

    That is the case where there is no `prompt` beside `chosen` and `rejected`, or where one is text and the other
    messages.
    """
    if not {"chosen", "rejected"} <= example.keys():
        return example
    if "prompt" in example:
        same_format = is_conversational({"prompt": example["prompt"]}) == is_conversational(
            {"chosen": example["chosen"]}
        )
        if same_format:
            return example
    return extract_prompt({"chosen": example["chosen"], "rejected": example["rejected"]})


def _has_messages(value: Any, fields: set[str]) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and fields <= value[0].keys()


def _shared_length(left: str | Messages, right: str | Messages) -> int:
    """How many characters or messages both begin with."""
    differences = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differences, min(len(left), len(right)))


def _open_ending(prompt: Messages) -> dict[str, bool]:
    """How the template leaves a prompt open for the assistant."""
    role = prompt[-1]["role"] if prompt else None
    if role in ("user", "tool"):
        return {"add_generation_prompt": True}
    if role == "assistant":
        return {"continue_final_message": True}
    last = "has no message" if role is None else f"ends with a message of the role {role!r}"
    raise ValueError(f"A prompt that {last} cannot be completed: let it end with role 'user', 'tool' or 'assistant'.")
