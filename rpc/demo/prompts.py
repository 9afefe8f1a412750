"""Turn conversations into prompts of token ids: one per assistant turn, each a continuation of the one before it.

Prefixes only match if the token ids do, so a turn's prompt is never tokenised anew: the text that has been added since
the last one is tokenised by itself and appended. Tokens then never merge across the border between two turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from radixpool.rpc.demo.conversations import Conversation, Message
from radixpool.rpc.worker.model_source import ModelSource, ModelUnavailable


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt of one assistant turn: `tokens` is uint32."""

    conversation: str
    number: int
    tokens: npt.NDArray[np.uint32]


class ChatTokenizer(Protocol):
    """What this module needs of a tokenizer."""

    def text(self, messages: Sequence[Message]) -> str:
        """Return the chat so far as the model wants it, ending where the assistant is to speak.

        Raises ValueError for a chat that the model's template does not take.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, with no token added around it."""
        ...


class TemplateTokenizer:
    """A Hugging Face tokenizer with its chat template; without a template, plain `role: text` lines."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message]) -> str:
        """Return the chat so far; see `ChatTokenizer`."""
        if not self._tokenizer.chat_template:
            lines = [f"{message.role}: {message.text}\n" for message in messages]
            return "".join([*lines, "assistant: "])
        chat = [{"role": message.role, "content": message.text} for message in messages]
        from jinja2 import TemplateError  # comes with the worker extra, which `--help` does not need

        try:
            rendered: str = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error
        return rendered

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def load_tokenizer(source: ModelSource) -> TemplateTokenizer:
    """Return the tokenizer of a model. Raises `ModelUnavailable`."""
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ModelUnavailable(f"the demo needs {error.name}: pip install 'radixpool[worker]'") from error
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.directory, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelUnavailable(f"model {source.name}: no tokenizer in {source.directory}: {error}") from error
    return TemplateTokenizer(tokenizer)


def turns(conversation: Conversation, tokenizer: ChatTokenizer) -> Iterator[Turn]:
    """Yield one turn per assistant message: the prompt is the recorded history before it."""
    text, tokens = "", np.empty(0, np.uint32)
    number = 0
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        number += 1
        full = tokenizer.text(conversation.messages[:index])
        if full.startswith(text):
            added = np.asarray(tokenizer.encode(full[len(text) :]), np.uint32)
            tokens = np.concatenate((tokens, added))
        else:  # a template that rewrites history: nothing of it can be shared beyond what happens to be equal
            tokens = np.asarray(tokenizer.encode(full), np.uint32)
        text = full
        yield Turn(conversation.name, number, tokens)
