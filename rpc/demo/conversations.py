"""Read conversations: lists of OpenAI-style messages, or records that hold one under `messages` or `traj`.

JSON (one list), JSON Lines, and either of them compressed with xz or gzip. What cannot be read is reported by its line
(JSON Lines) or record (JSON) and skipped; the rest is used.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

_LIST_KEYS = ("messages", "traj")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Message:
    """One message as text. `role` is system, user or assistant; tool results count as the user's."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat with at least one assistant turn."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class ConversationFile:
    """What a file holds: conversations, and a line for each place that could not be read."""

    conversations: tuple[Conversation, ...]
    problems: tuple[str, ...]


def own_script() -> ConversationFile:
    """Return the conversations that ship with the package."""
    return parse_conversations(resources.files("radixpool.rpc.demo").joinpath("script.json").read_text("utf-8"))


def read_conversations(path: Path) -> ConversationFile:
    """Return what the file at `path` holds. Raises ValueError when there is no conversation in it at all."""
    try:
        found = parse_conversations(_read_text(path))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"conversations: cannot read {path}: {error}") from error
    if not found.conversations:
        first = found.problems[0] if found.problems else "it is empty"
        raise ValueError(f"conversations: no conversation in {path}: {first}")
    return found


def parse_conversations(text: str) -> ConversationFile:
    """Return the conversations of a JSON or JSON Lines text."""
    conversations: list[Conversation] = []
    problems: list[str] = []
    for place, record in _records(text):
        try:
            if isinstance(record, json.JSONDecodeError):
                raise ValueError(f"not JSON: {record.msg} at column {record.colno}")
            name = _unused(_name(record, place), {conversation.name for conversation in conversations})
            conversations.append(_conversation(record, name))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    return ConversationFile(tuple(conversations), tuple(problems))


def _read_text(path: Path) -> str:
    match path.suffix:
        case ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        case ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        case _:
            return path.read_text("utf-8")


def _records(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of a JSON document, or of each line where the text is not one document."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        yield from _lines(text)
        return
    if isinstance(document, list) and not _is_message_list(document):
        for number, record in enumerate(document, 1):
            yield f"record {number}", record
    else:
        yield "record 1", document


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                yield f"line {number}", error


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _name(record: Any, place: str) -> str:
    return str(record["name"]) if isinstance(record, dict) and "name" in record else place


def _unused(name: str, taken: Container[str]) -> str:
    candidates = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in taken else next(candidate for candidate in candidates if candidate not in taken)


def _conversation(record: Any, name: str) -> Conversation:
    messages = record
    if isinstance(record, dict):
        messages = next((record[key] for key in _LIST_KEYS if key in record), None)
        if messages is None:
            raise ValueError(f"a record must hold a list under {' or '.join(_LIST_KEYS)}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list with at least 1 message, got {_shown(messages)}")
    rendered = [_message(message, index) for index, message in enumerate(messages)]
    if not any(message.role == "assistant" for message in rendered):
        raise ValueError("messages must hold at least 1 of role assistant")
    return Conversation(name, tuple(_merged(rendered)))


def _message(message: Any, index: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"messages[{index}] must be an object, got {_shown(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"messages[{index}].role must be one of {', '.join(_ROLES)}, got {_shown(role)}")
    text = _content_text(message.get("content"), index)
    if role in ("tool", "function"):
        return Message("user", f"Result of {message.get('name') or 'tool'}: {text}")
    calls = [_call_text(call, index) for call in _tool_calls(message, index)]
    return Message("system" if role == "developer" else role, "\n".join(part for part in (text, *calls) if part))


def _content_text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)
    raise ValueError(f"messages[{index}].content must be text, a list of parts or null, got {_shown(content)}")


def _tool_calls(message: dict[str, Any], index: int) -> list[Any]:
    calls = message.get("tool_calls") or (
        [{"function": message["function_call"]}] if message.get("function_call") else []
    )
    if not isinstance(calls, list):
        raise ValueError(f"messages[{index}].tool_calls must be a list, got {_shown(calls)}")
    return calls


def _call_text(call: Any, index: int) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"messages[{index}].tool_calls must name a function, got {_shown(call)}")
    return f"Call {function['name']}: {function.get('arguments', '')}"


def _merged(messages: list[Message]) -> Iterator[Message]:
    """Join neighbours of one role, which many chat templates refuse, except the assistant's, which are turns."""
    held: Message | None = None
    for message in messages:
        if held and held.role == message.role != "assistant":
            held = Message(held.role, f"{held.text}\n{message.text}")
            continue
        if held:
            yield held
        held = message
    if held:
        yield held


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
