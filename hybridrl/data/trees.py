"""Trees of messages, as OpenAssistant published them: read into conversations, pairs or prompts. No
torch.

A tree is one row (`prompt`, a message whose `replies` are messages) or a row for each message
(`message_id`, `parent_id`, `message_tree_id`), those of a tree one after the other. What comes out
has the columns `messages`, or `chosen` and `rejected`, which forms.py knows. One tree at a time is
in memory.

Raters ranked the replies to a message, 0 the best; a reply without a rank comes after those that
have one. Deleted messages are left out, and what replies to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hybridrl.data.messages import ASSISTANT, Message, chat
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import DataError, RowError, short

SAID = "prompt with replies, or message_id and parent_id (OpenAssistant's trees)"
_ID, _PARENT, _TREE = "message_id", "parent_id", "message_tree_id"
_FLAT = frozenset({_ID, _TREE, "text", "role"})
_KEPT = (_TREE, "lang")  # columns of what comes out
_MEND = "Mend that row, or leave the tree out."


@dataclass
class _Node:
    """A message with its replies, the best first."""

    message: Message
    rank: float
    is_deleted: bool
    replies: list[_Node] = field(default_factory=list)


def unfolded(rows: Iterable[Row], kind: str, bad: BadRows) -> Iterator[Row]:
    """Passes rows on, what is asked of a tree in its place.

    Args:
        rows: in the order of their sources.
        kind: what is asked, as of forms.py. A demonstration is the conversation of the best
            replies, to the assistant's last; a prompt is the first message; pairs are the best and
            the worst reply of the assistant to each message where raters ranked two apart. Trees
            have no labels, and stay as they are.
        bad: counts trees that cannot be used, each as one row.

    Raises:
        DataError: after the last row, if no tree has a pair.
    """
    if kind == "labels":
        yield from rows
        return
    tree: Row | None = None  # the first row of one
    is_empty = True
    for found in _grouped(rows):
        first = found[0]
        if not (_is_flat(first) or _is_nested(first)):
            is_empty = False
            yield first
            continue
        try:
            root = _joined(found) if _is_flat(first) else _nested(first)
        except RowError as error:
            bad.add(first.source, error)
            continue
        tree = tree or first
        for columns in _asked(first, root, kind):
            is_empty = False
            yield replace(first, columns=columns)
    if is_empty and tree is not None:
        allowed = "two replies of the assistant in one of them, which raters ranked apart"
        remedy = "Use other rows, or algorithm.name=sft."
        if kind != "pairs":
            allowed, remedy = "a first message that is not deleted", "Use other rows."
        raise DataError(tree.place, f"trees that give no {kind}", allowed, remedy)


def _grouped(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields those rows together that are one tree, others by themselves."""
    group: list[Row] = []
    for row in rows:
        if group and not (_is_flat(row) and _same_tree(row, group[0])):
            yield group
            group = []
        if _is_flat(row):
            group.append(row)
        else:
            yield [row]
    if group:
        yield group


def _same_tree(row: Row, first: Row) -> bool:
    return row.source == first.source and row.columns[_TREE] == first.columns[_TREE]


def _is_flat(row: Row) -> bool:
    return row.columns.keys() >= _FLAT and row.columns[_TREE] is not None


def _is_nested(row: Row) -> bool:
    prompt = row.columns.get("prompt")
    return isinstance(prompt, Mapping) and {"text", "role", "replies"} <= prompt.keys()


def _node(place: str, given: Mapping[str, Any]) -> _Node:
    named = [{"role": given.get("role"), "content": given.get("text")}]
    rank = given.get("rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int | float)):
        raise RowError(place, f"rank = {short(rank)}", "a number, or null", _MEND)
    (message,) = chat(place, "text", named)
    return _Node(message, inf if rank is None else rank, given.get("deleted") is True)


def _nested(row: Row) -> _Node:
    """Returns the first message of a tree that is one row."""
    root = _node(row.place, row.columns["prompt"])  # type: ignore[arg-type]  # _is_nested
    waiting = [(root, row.columns["prompt"])]
    while waiting:
        node, given = waiting.pop()
        replies = given.get("replies") or []  # type: ignore[attr-defined]
        if not isinstance(replies, Sequence) or not all(isinstance(r, Mapping) for r in replies):
            raise RowError(row.place, f"replies = {short(replies)}", "a list of messages", _MEND)
        for reply in replies:
            node.replies.append(_node(row.place, reply))
            waiting.append((node.replies[-1], reply))
    return root


def _joined(rows: Sequence[Row]) -> _Node:
    """Returns the first message of a tree that is a row for each message."""
    nodes: dict[object, _Node] = {}
    for row in rows:
        name = row.columns[_ID]
        if not isinstance(name, str) or name in nodes:
            raise RowError(row.place, f"{_ID} = {short(name)}", "a text of one row", _MEND)
        nodes[name] = _node(row.place, row.columns)
    root: _Node | None = None
    for row in rows:
        node, parent = nodes[row.columns[_ID]], row.columns.get(_PARENT)
        if parent is None and root is None:
            root = node
        elif isinstance(parent, str) and parent in nodes:
            nodes[parent].replies.append(node)
        else:
            raise _lost(row)
    reached = {id(node) for node in _all(root)} if root is not None else set()
    for row in rows:
        if id(nodes[row.columns[_ID]]) not in reached:
            raise _lost(row)
    assert root is not None
    return root


def _lost(row: Row) -> RowError:
    return RowError(
        row.place,
        f"{_PARENT} = {short(row.columns.get(_PARENT))}",
        f"the {_ID} of another row of its tree, or null in the one that begins the tree",
        "Bring the rows of each tree together, or leave the tree out.",
    )


def _all(root: _Node) -> Iterator[_Node]:
    """Yields every message, each before its replies."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.replies)


def _asked(first: Row, root: _Node, kind: str) -> Iterator[dict[str, object]]:
    """Yields the columns of what is asked of a tree."""
    if root.is_deleted:
        return
    for node in _all(root):
        kept = [reply for reply in node.replies if not reply.is_deleted]
        node.replies = sorted(kept, key=lambda reply: reply.rank)
    holders = first.columns, first.columns.get("prompt")
    given = {k: v for one in holders if isinstance(one, Mapping) for k, v in one.items()}
    others = {key: given[key] for key in _KEPT if given.get(key) is not None}
    if kind == "prompts":
        yield {**others, "messages": [root.message]}
    elif kind == "demonstrations":
        path = [root]
        while path[-1].replies:
            path.append(path[-1].replies[0])
        yield {**others, "messages": [node.message for node in path]}
    else:
        for better, worse in _pairs(root):
            yield {**others, "chosen": better, "rejected": worse}


def _pairs(root: _Node) -> Iterator[tuple[list[Message], list[Message]]]:
    """Yields the best and the worst reply to each message, after all that was said before."""
    waiting = [(root, [root.message])]
    while waiting:
        node, said = waiting.pop()
        ranked = [
            reply
            for reply in node.replies
            if reply.message["role"] == ASSISTANT and reply.rank < inf
        ]
        if ranked and ranked[0].rank < ranked[-1].rank:
            better, worse = ranked[0].message, ranked[-1].message
            if better != worse:  # else raters saw the same text twice
                yield [*said, better], [*said, worse]
        waiting += [(reply, [*said, reply.message]) for reply in reversed(node.replies)]
