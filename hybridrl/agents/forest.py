"""Finished turns of a session as a forest, the input of the next turn, and rows of training data.

Invariant: a row's tokens are exactly the tokens that the engine received and sampled. No torch.

A request that repeats an earlier turn and adds messages continues this turn: it keeps the tokens
that the engine received and sampled, and only the new messages are rendered. If there are several
such turns, the request continues the deepest. Any other request begins a new conversation, for
example after the agent summarised its history or changed its tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.conversation import Conversation, call_ids, same_reasoning
from hybridrl.agents.samples import Message, Row, Span
from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Content
from hybridrl.rollout.engine import Completion


@dataclass(eq=False)
class Turn:
    """A finished turn.

    Args:
        number: Number of the turn in its session, in the order in which turns finished.
        parent: Turn that it continues; None if it begins a conversation.
        num_shared: Number of tokens at the beginning of the parent's path that are the beginning of
            this turn's input.
        context: Tokens of the input after those.
        message, request: The turn as the client received it, and what the client sent. They and
            `digest` are None if it sent token ids.
        contents: Images of the whole path, at their places among its tokens.
    """

    number: int
    parent: Turn | None
    num_shared: int
    context: tuple[int, ...]
    completion: Completion
    digest: bytes | None = None
    message: Message | None = None
    request: Conversation | None = None
    text: str = ""
    contents: tuple[Content, ...] = ()
    is_delivered: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_shared + len(self.context) + len(self.completion.tokens)

    def path(self) -> list[Turn]:
        found, turn = [], self
        while True:
            found.append(turn)
            if turn.parent is None:
                return found[::-1]
            turn = turn.parent

    def tokens(self) -> tuple[int, ...]:
        """Returns the tokens from the beginning of the conversation to the end of the turn."""
        found: list[int] = []
        for turn in self.path():
            del found[turn.num_shared :]
            found += turn.context
            found += turn.completion.tokens
        return tuple(found)


@dataclass(frozen=True)
class Prepared:
    """A turn that is ready to be sampled.

    Args:
        parent, num_shared, request: See `Turn`.
        digest: Digest of the conversation before the turn; None if the client sent token ids.
        contents: Images, at their places among `tokens`.
        max_new_tokens: Maximum number of tokens that the budgets and the context leave.
        turn: Number of turns that were requested earlier.
    """

    tokens: tuple[int, ...]
    parent: Turn | None
    num_shared: int
    opens_reasoning: bool = False
    digest: bytes | None = None
    request: Conversation | None = None
    contents: tuple[Content, ...] = ()
    max_new_tokens: int = 0
    turn: int = 0

    @property
    def blobs(self) -> Blobs:
        """Blobs recorded for the tokens that the turn shares with its parent."""
        return {} if self.parent is None else self.parent.completion.blobs


@dataclass(frozen=True)
class Match:
    """An earlier turn that a request continues, with its first `num_messages` messages."""

    turn: Turn
    num_messages: int


class Forest:
    """Finished turns of a session. The caller must not change it from two threads at the same time.

    Args:
        max_kept: Number of turns that later requests can continue; None keeps all turns.

    Attributes:
        turns: Turns that were not forgotten, in the order in which they finished.
    """

    def __init__(self, max_kept: int | None = None) -> None:
        self.turns: list[Turn] = []
        self._max_kept = max_kept
        self._by_digest: dict[bytes, list[Turn]] = {}

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        if turn.digest is not None:
            self._by_digest.setdefault(turn.digest, []).append(turn)
        if self._max_kept is not None and len(self.turns) > self._max_kept:
            self._forget(self.turns.pop(0))

    def deepest(self, conversation: Conversation, digests: Sequence[bytes]) -> Match | None:
        """Returns the deepest turn whose conversation is the beginning of `conversation`, if any.

        Of several with the same messages, prefers the turn whose tool calls have the identifiers
        that the client sent, then the newest. `digests` are those of `conversation`.
        """
        for num in range(len(conversation.messages), 0, -1):
            found = self._by_digest.get(digests[num])
            received = conversation.messages[num - 1]
            fitting = [
                turn
                for turn in reversed(found or ())
                if turn.message is not None and same_reasoning(turn.message, received)
            ]
            if fitting:
                wanted = call_ids(received)
                alike = [turn for turn in fitting if call_ids(turn.message or {}) == wanted]
                return Match((alike or fitting)[0], num)
        return None

    def _forget(self, turn: Turn) -> None:
        if turn.digest is not None:
            self._by_digest[turn.digest].remove(turn)
            if not self._by_digest[turn.digest]:
                del self._by_digest[turn.digest]


def rendered_input(
    template: ChatTemplate,
    conversation: Conversation,
    digests: Sequence[bytes],
    match: Match | None,
    max_context: int,
) -> Prepared:
    """Returns the input for a turn that answers a conversation. Renders only the messages after
    `match`, unless the template does not render this turn.

    Raises:
        BadRequest: The chat template rejects the messages.
        ContextOverflow: The messages are so long that they were not tokenized to their end.
    """
    rendered, parent, num_shared = None, None, 0
    if match is not None:
        parent, done = match.turn, match.turn.completion
        last = done.tokens[-1] if done.finish_reason == "stop" else None
        rendered = template.continuation(conversation, match.num_messages, last, max_context)
    if parent is None or rendered is None:
        parent = None
        rendered = template.whole(conversation, max_context)
    else:
        num_shared = parent.num_tokens - rendered.num_dropped
    new = (replace(one, start=num_shared + one.start) for one in rendered.contents)
    return Prepared(
        tokens=(parent.tokens()[:num_shared] if parent else ()) + rendered.tokens,
        parent=parent,
        num_shared=num_shared,
        opens_reasoning=rendered.opens_reasoning,
        digest=digests[-1],
        request=conversation.sharing(parent.request) if parent and parent.request else conversation,
        contents=(*(parent.contents if parent else ()), *new),
    )


def token_input(turns: Sequence[Turn], tokens: Sequence[int]) -> Prepared:
    """Returns the input for a turn after token ids that the client rendered itself.

    The turn continues the earlier turn whose tokens are the longest beginning of `tokens`. The last
    token of that turn may be missing, because clients replace end tokens. A turn with images is not
    continued, because equal tokens may stand for other images.
    """
    given = tuple(tokens)
    parent, num_shared = None, 0
    matched: dict[Turn, int] = {}  # number of leading tokens that are those of `given`
    for turn in turns:  # parents come before their children
        if turn.parent is not None and matched.get(turn.parent, 0) < turn.num_shared:
            continue
        if turn.contents:
            continue
        own = turn.context + turn.completion.tokens
        found = given[turn.num_shared : turn.num_tokens]
        if found != own and found[: len(own) - 1] != own[:-1]:
            continue
        length = turn.num_tokens - (found != own)
        matched[turn] = length
        if num_shared < length <= len(given):
            parent, num_shared = turn, length
    return Prepared(given, parent, num_shared)


def rows_of(turns: Sequence[Turn]) -> tuple[Row, ...]:
    """Returns a row for each delivered turn that no turn continues with all tokens, in order."""
    dropped = undelivered(turns)
    kept = [turn for turn in turns if turn not in dropped]
    covered = {
        turn.parent
        for turn in kept
        if turn.parent is not None and turn.num_shared == turn.parent.num_tokens
    }
    return tuple(_row(turn) for turn in kept if turn not in covered)


def undelivered(turns: Sequence[Turn]) -> set[Turn]:
    """Returns the turns that no client received and no delivered turn continues."""
    continued: set[Turn | None] = set()
    dropped = set()
    for turn in reversed(turns):  # children come before their parents
        if turn.is_delivered or turn in continued:
            continued.add(turn.parent)
        else:
            dropped.add(turn)
    return dropped


def _row(leaf: Turn) -> Row:
    path = leaf.path()
    kept = [turn.num_shared for turn in path[1:]] + [leaf.num_tokens]
    tokens: list[int] = []
    logps: list[float] = []
    observed: list[bool] = []
    runs: list[list[int]] = []
    spans = []
    prompt: tuple[int, ...] = ()
    for turn, end in zip(path, kept, strict=True):
        if not runs:
            prompt += turn.context
        else:
            tokens += turn.context
            logps += [0.0] * len(turn.context)
            observed += [True] * len(turn.context)
            runs[-1][1] += len(turn.context)
        num = end - (turn.num_tokens - len(turn.completion.tokens))
        spans.append(Span(turn.number, len(tokens), num))
        tokens += turn.completion.tokens[:num]
        logps += turn.completion.logps[:num]
        observed += [False] * num
        _add_runs(runs, turn.completion.runs, num)
    request = leaf.request
    return Row(
        prompt=prompt,
        tokens=tuple(tokens),
        logps=tuple(logps),
        observed=tuple(observed),
        versions=tuple((version, count) for version, count in runs),
        finish_reason=leaf.completion.finish_reason,
        spans=tuple(spans),
        blobs=leaf.completion.blobs,
        contents=leaf.contents,
        messages=(*request.messages, leaf.message) if request and leaf.message else (),
        tools=request.tools if request else (),
        text=leaf.text,
    )


def _add_runs(runs: list[list[int]], added: Iterable[tuple[int, int]], num_tokens: int) -> None:
    for version, whole in added:
        count = min(whole, num_tokens)
        num_tokens -= count
        if not count:
            break
        if runs and runs[-1][0] == version:
            runs[-1][1] += count
        else:
            runs.append([version, count])
