"""Converts trees of messages, as published by OpenAssistant, into conversations, pairs or prompts.

A tree is one row (`prompt`, a message whose `replies` are messages), or adjacent rows, one per
message (`message_id`, `parent_id`, `message_tree_id`). The resulting rows have the column
`messages`, or `chosen` and `rejected`. Only one tree is in memory at a time. No torch.

Rank 0 is the best of the ranked replies; unranked ones are last. Deleted messages and the replies
to them are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hybridrl.data.messages import ASSISTANT, Message, chat
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import BadRowError, DataError, short

DESCRIPTION = "prompt with replies, or message_id and parent_id (OpenAssistant's trees)"
_ID, _PARENT, _TREE = "message_id", "parent_id", "message_tree_id"
_FLAT = frozenset({_ID, _TREE, "text", "role"})
_KEPT = (_TREE, "lang")  # columns that are copied from a tree to its rows
_REMEDY = "Fix that row, or remove the tree."


@dataclass
class _Node:
    message: Message
    rank: float
    is_deleted: bool
    replies: list[_Node] = field(default_factory=list)


def expand_trees(rows: Iterable[Row], kind: str, bad: BadRows) -> Iterator[Row]:
    """Yields all rows, with each tree replaced by the rows made from it.

    A demonstration is the conversation that follows the best replies. A prompt is the first
    message. Pairs are the best and the worst reply of the assistant to each message whose replies
    have different ranks. Trees have no labels, so `labels` leaves them unchanged. An unusable tree
    counts as one row in `bad`. Raises DataError at the end if no rows could be made from the trees.
    """
    if kind == "labels":
        yield from rows
        return
    tree: Row | None = None  # the first row of the first tree
    is_empty = True
    for found in _grouped(rows):
        first = found[0]
        if not (_is_flat(first) or _is_nested(first)):
            is_empty = False
            yield first
            continue
        try:
            root = _tree_of_rows(found) if _is_flat(first) else _tree_of_row(first)
        except BadRowError as error:
            bad.add(first.source, error)
            continue
        tree = tree or first
        for columns in _tree_columns(first, root, kind):
            is_empty = False
            yield replace(first, columns=columns)
    if is_empty and tree is not None:
        allowed = "at least two replies of the assistant to one message, with different ranks"
        remedy = "Use other rows, or algorithm.name=sft."
        if kind != "pairs":
            allowed, remedy = "a first message that is not deleted", "Use other rows."
        raise DataError(tree.place, f"trees from which no {kind} can be made", allowed, remedy)


def _grouped(rows: Iterable[Row]) -> Iterator[list[Row]]:
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
        raise BadRowError(place, f"rank = {short(rank)}", "a number, or null", _REMEDY)
    (message,) = chat(place, "text", named)
    return _Node(message, inf if rank is None else rank, given.get("deleted") is True)


def _tree_of_row(row: Row) -> _Node:
    root = _node(row.place, row.columns["prompt"])  # type: ignore[arg-type]  # _is_nested
    waiting = [(root, row.columns["prompt"])]
    while waiting:
        node, given = waiting.pop()
        replies = given.get("replies") or []  # type: ignore[attr-defined]
        if not isinstance(replies, Sequence) or not all(isinstance(r, Mapping) for r in replies):
            raise BadRowError(
                row.place, f"replies = {short(replies)}", "a list of messages", _REMEDY
            )
        for reply in replies:
            node.replies.append(_node(row.place, reply))
            waiting.append((node.replies[-1], reply))
    return root


def _tree_of_rows(rows: Sequence[Row]) -> _Node:
    nodes: dict[object, _Node] = {}
    for row in rows:
        name = row.columns[_ID]
        if not isinstance(name, str) or name in nodes:
            raise BadRowError(row.place, f"{_ID} = {short(name)}", "a unique text", _REMEDY)
        nodes[name] = _node(row.place, row.columns)
    root: _Node | None = None
    for row in rows:
        node, parent = nodes[row.columns[_ID]], row.columns.get(_PARENT)
        if parent is None and root is None:
            root = node
        elif isinstance(parent, str) and parent in nodes:
            nodes[parent].replies.append(node)
        else:
            raise _orphan_error(row)
    reached = {id(node) for node in _walk(root)} if root is not None else set()
    for row in rows:
        if id(nodes[row.columns[_ID]]) not in reached:
            raise _orphan_error(row)
    assert root is not None
    return root


def _orphan_error(row: Row) -> BadRowError:
    return BadRowError(
        row.place,
        f"{_PARENT} = {short(row.columns.get(_PARENT))}",
        f"the {_ID} of another row of its tree, or null in the row that begins the tree",
        "Make the rows of each tree adjacent, or remove the tree.",
    )


def _walk(root: _Node) -> Iterator[_Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.replies)


def _tree_columns(first: Row, root: _Node, kind: str) -> Iterator[dict[str, object]]:
    if root.is_deleted:
        return
    for node in _walk(root):
        kept = [reply for reply in node.replies if not reply.is_deleted]
        node.replies = sorted(kept, key=lambda reply: reply.rank)
    holders = first.columns, first.columns.get("prompt")
    values = {k: v for part in holders if isinstance(part, Mapping) for k, v in part.items()}
    others = {key: values[key] for key in _KEPT if values.get(key) is not None}
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
    waiting = [(root, [root.message])]
    while waiting:
        node, earlier = waiting.pop()
        ranked = [
            reply
            for reply in node.replies
            if reply.message["role"] == ASSISTANT and reply.rank < inf
        ]
        if ranked and ranked[0].rank < ranked[-1].rank:
            better, worse = ranked[0].message, ranked[-1].message
            if better != worse:  # raters may have ranked the same text twice
                yield [*earlier, better], [*earlier, worse]
        waiting += [(reply, [*earlier, reply.message]) for reply in reversed(node.replies)]
