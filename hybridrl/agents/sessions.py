"""Sessions of agents: the conversations of an episode, as a forest of turns. No torch.

A request that repeats an earlier turn and adds messages continues this turn: it keeps the tokens
that the engine received and sampled, and only the new messages are rendered. If there are several
such turns, the request continues the deepest. Any other request begins a new conversation, for
example after the agent summarised its history or changed its tools. Invariant: a row's tokens are
exactly the tokens that the engine received and sampled, and nothing is decoded and encoded again.

Any thread may call any function. No lock is held while a turn is sampled, so a session may have
several turns at the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.conversation import (
    BadRequest,
    Conversation,
    call_ids,
    next_digest,
    same_reasoning,
)
from hybridrl.agents.samples import Budgets, Message, Picker, Row, SessionResult, Span, picked
from hybridrl.contracts.blobs import Blobs
from hybridrl.errors import UserError
from hybridrl.rollout.engine import Completion

MAX_REMEMBERED = 4096  # ended sessions whose tokens are still recognised
TURN_BUDGET, TOKEN_BUDGET = "turn_budget_exhausted", "token_budget_exhausted"


@dataclass(eq=False)
class Turn:
    """A finished turn.

    Args:
        number: Number of the turn in its session, in the order in which turns finished.
        parent: Turn that it continues; None if it begins a conversation.
        num_shared: Number of tokens at the beginning of the parent's path that are the beginning of
            this turn's input.
        context: Tokens of the input after those.
        completion: Sampled tokens.
        digest: Digest of the conversation up to and including the turn; None if the client sent
            token ids.
        message: The turn as the client received it; None if the client sent token ids.
        request: What the client sent; None if it sent token ids.
        text: Sampled text, with reasoning and tool calls.
        is_delivered: Whether a client received the turn.
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
    is_delivered: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the beginning of the conversation to the end of the turn."""
        return self.num_shared + len(self.context) + len(self.completion.tokens)

    def path(self) -> list[Turn]:
        """Returns the turns from the beginning of the conversation to this one."""
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
        tokens: Input of the engine.
        parent, num_shared: See `Turn`.
        opens_reasoning: Whether the turn begins inside the reasoning.
        digest: Digest of the conversation before the turn; None if the client sent token ids.
        request: What the client sent; None if it sent token ids.
        max_new_tokens: Maximum number of tokens that the budgets and the context leave.
        turn: Number of turns that were requested earlier.
    """

    tokens: tuple[int, ...]
    parent: Turn | None
    num_shared: int
    opens_reasoning: bool = False
    digest: bytes | None = None
    request: Conversation | None = None
    max_new_tokens: int = 0
    turn: int = 0

    @property
    def blobs(self) -> Blobs:
        """Blobs recorded for the tokens that the turn shares with its parent."""
        return {} if self.parent is None else self.parent.completion.blobs


class ContextOverflow(BadRequest):
    """The messages leave no room for a turn.

    Args:
        num_tokens: Number of tokens in the messages.
        most: Maximum number of tokens in messages and turn.
    """

    def __init__(self, num_tokens: int, most: int) -> None:
        self.num_tokens, self.most = num_tokens, most
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages "
            f"resulted in {num_tokens} tokens. Please reduce the length of the messages.",
            "messages",
            "context_length_exceeded",
        )


class SessionEnded(BadRequest):
    """The session of a request has ended."""

    def __init__(self) -> None:
        super().__init__("This session has ended.", code="session_ended", status=410)


class Session:
    """The conversations of one episode.

    Args:
        sample_key: Number of the sample; with the number of a turn, it determines the seed.
        row: Row of the data that the session works on.
        budgets: Limits.
        max_context: Maximum number of tokens in a prompt and its turn.
        template: Renders messages; None if clients may send only token ids.
        max_kept: Number of turns that later requests can continue; older turns are forgotten, and
            are in no row. None keeps all turns.

    Attributes:
        session_id: Public name.
        token: Secret that clients send as their API key.
        counts: Number of events by name; see `SessionResult`.
    """

    def __init__(
        self,
        sample_key: int,
        row: Any,
        budgets: Budgets,
        max_context: int,
        template: ChatTemplate | None,
        max_kept: int | None = None,
    ) -> None:
        self.session_id = f"s{sample_key}-{secrets.token_hex(4)}"
        self.token = secrets.token_urlsafe(32)
        self.sample_key, self.row, self.counts = sample_key, row, Counter[str]()
        self.opened_at = time.monotonic()
        self._budgets, self._template, self._max_kept = budgets, template, max_kept
        bound = budgets.max_row_tokens
        self._max_context = max_context if bound is None else min(bound, max_context)
        self._lock = threading.RLock()
        self._turns: list[Turn] = []
        self._by_digest: dict[bytes, list[Turn]] = {}
        self._num_finished = self._num_requested = self._num_abandoned = self._num_sampled = 0
        self._is_open = True
        self._limit: Literal["turns", "tokens"] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the session accepts requests."""
        return self._is_open

    @property
    def limit(self) -> Literal["turns", "tokens"] | None:
        """First limit because of which a turn was refused; None if none was refused so."""
        return self._limit

    @property
    def num_turns(self) -> int:
        """Number of finished turns."""
        return self._num_finished

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Finished turns, in the order in which they finished."""
        with self._lock:
            return tuple(self._turns)

    def prepare(self, conversation: Conversation, max_tokens: int | None = None) -> Prepared:
        """Returns the input for a turn that answers a conversation.

        Args:
            max_tokens: Maximum number of tokens that the client wants.

        Raises:
            BadRequest: The session has ended, a budget is exhausted, the messages are too long, or
                the chat template rejects them.
        """
        return self._limited(self._input(conversation), max_tokens)

    def num_tokens(self, conversation: Conversation) -> int:
        """Returns the number of tokens that the model would receive for a conversation.

        Raises:
            BadRequest: The session has ended, or the chat template rejects the messages.
        """
        return len(self._input(conversation).tokens)

    def prepare_tokens(self, tokens: Sequence[int], max_tokens: int | None = None) -> Prepared:
        """Returns the input for a turn after token ids that the client rendered itself.

        The turn continues the earlier turn whose tokens are the longest beginning of `tokens`. The
        last token of that turn may be missing, because clients replace end tokens.

        Raises:
            BadRequest: The session has ended, a budget is exhausted, or `tokens` are too many.
        """
        given = tuple(tokens)
        parent, num_shared = None, 0
        matched: dict[Turn, int] = {}  # number of leading tokens that are those of `given`
        for turn in self.turns:  # parents come before their children
            if turn.parent is not None and matched.get(turn.parent, 0) < turn.num_shared:
                continue
            own = turn.context + turn.completion.tokens
            found = given[turn.num_shared : turn.num_tokens]
            if found != own and found[: len(own) - 1] != own[:-1]:
                continue
            length = turn.num_tokens - (found != own)
            matched[turn] = length
            if num_shared < length <= len(given):
                parent, num_shared = turn, length
        return self._limited(Prepared(given, parent, num_shared), max_tokens)

    def commit(
        self, prepared: Prepared, done: Completion, message: Message | None = None, text: str = ""
    ) -> Turn:
        """Adds a sampled turn.

        Args:
            message: The turn as the client receives it.
            text: Sampled text.

        Raises:
            SessionEnded: The session ended while the turn was sampled.
        """
        with self._lock:
            self._check_open()
            self._num_sampled += len(done.tokens)
            digest = None
            if prepared.digest is not None and message is not None:
                digest = next_digest(prepared.digest, message)
            turn = Turn(
                number=self._num_finished,
                parent=prepared.parent,
                num_shared=prepared.num_shared,
                context=prepared.tokens[prepared.num_shared :],
                completion=done,
                digest=digest,
                message=message,
                request=prepared.request,
                text=text,
            )
            self._turns.append(turn)
            self._num_finished += 1
            if digest is not None:
                self._by_digest.setdefault(digest, []).append(turn)
            self.counts["conversations"] += turn.parent is None
            if turn.parent is not None and turn.num_shared < turn.parent.num_tokens:
                self.counts["replaced_ends"] += 1
            if self._max_kept is not None and len(self._turns) > self._max_kept:
                self._forget(self._turns.pop(0))
            return turn

    def abandon(self) -> None:
        """Gives a turn that was prepared but not sampled back to the turn budget."""
        with self._lock:
            self._num_abandoned += 1
            self.counts["aborted_turns"] += 1

    def count(self, event: str) -> None:
        """Counts an event."""
        with self._lock:
            self.counts[event] += 1

    def end(self) -> None:
        """Refuses all later requests and turns."""
        with self._lock:
            self._is_open = False

    def rows(self) -> tuple[Row, ...]:
        """Returns a row for each turn that no other turn continues with all its tokens, in the
        order in which the turns finished. Leaves out the undelivered turns.
        """
        dropped = self._undelivered()
        kept = [turn for turn in self.turns if turn not in dropped]
        covered = {
            turn.parent
            for turn in kept
            if turn.parent is not None and turn.num_shared == turn.parent.num_tokens
        }
        return tuple(_row(turn) for turn in kept if turn not in covered)

    def num_undelivered(self) -> int:
        """Returns the number of turns that no client received and no delivered turn continues."""
        return len(self._undelivered())

    def _undelivered(self) -> set[Turn]:
        turns = self.turns
        continued: set[Turn | None] = set()
        dropped = set()
        for turn in reversed(turns):  # children come before their parents
            if turn.is_delivered or turn in continued:
                continued.add(turn.parent)
            else:
                dropped.add(turn)
        return dropped

    def _input(self, conversation: Conversation) -> Prepared:
        assert self._template is not None
        digests = conversation.digests()
        with self._lock:
            self._check_open()
            known, parent = self._deepest(conversation, digests)
        rendered = None
        if parent is not None:
            done = parent.completion
            last = done.tokens[-1] if done.finish_reason == "stop" else None
            rendered = self._template.continuation(conversation, known, last)
        if parent is None or rendered is None:
            parent, num_shared = None, 0
            rendered = self._template.whole(conversation)
        else:
            num_shared = parent.num_tokens - rendered.num_dropped
        return Prepared(
            tokens=(parent.tokens()[:num_shared] if parent else ()) + rendered.tokens,
            parent=parent,
            num_shared=num_shared,
            opens_reasoning=rendered.opens_reasoning,
            digest=digests[-1],
            request=conversation,
        )

    def _deepest(
        self, conversation: Conversation, digests: Sequence[bytes]
    ) -> tuple[int, Turn | None]:
        """Returns the deepest turn whose conversation is the beginning of `conversation`, and its
        number of messages. If several turns have the same messages, prefers the turn whose tool
        calls have the identifiers that the client sent, then the newest.
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
                return num, (alike or fitting)[0]
        return 0, None

    def _forget(self, turn: Turn) -> None:
        if turn.digest is not None:
            self._by_digest[turn.digest].remove(turn)
            if not self._by_digest[turn.digest]:
                del self._by_digest[turn.digest]

    def _limited(self, prepared: Prepared, max_tokens: int | None) -> Prepared:
        """Returns the turn with its number and token limit, after checking the budgets.

        Turns that are sampled at the same time may together exceed `max_sampled_tokens`.
        """
        if not prepared.tokens:
            raise BadRequest("The messages are empty.", "messages")
        if max_tokens is not None and max_tokens < 1:
            raise BadRequest(f"max_tokens: got {max_tokens}; allowed: 1 or more.", "max_tokens")
        with self._lock:
            self._check_open()
            budgets, num = self._budgets, len(prepared.tokens)
            if num >= self._max_context:
                self._limit = self._limit or "tokens"
                raise ContextOverflow(num, self._max_context)
            num_taken = self._num_requested - self._num_abandoned
            if budgets.max_turns is not None and num_taken >= budgets.max_turns:
                self._limit = self._limit or "turns"
                raise BadRequest(
                    f"This session may take {budgets.max_turns} turns, and has taken all of them.",
                    code=TURN_BUDGET,
                )
            limits = [self._max_context - num, max_tokens, budgets.max_turn_tokens]
            if budgets.max_sampled_tokens is not None:
                limits.append(budgets.max_sampled_tokens - self._num_sampled)
                if self._num_sampled >= budgets.max_sampled_tokens:
                    self._limit = self._limit or "tokens"
                    raise BadRequest(
                        f"This session may sample {budgets.max_sampled_tokens} tokens, and has "
                        "sampled all of them.",
                        code=TOKEN_BUDGET,
                    )
            most = min(limit for limit in limits if limit is not None)
            self._num_requested += 1
            return replace(prepared, max_new_tokens=most, turn=self._num_requested - 1)

    def _check_open(self) -> None:
        if not self._is_open:
            raise SessionEnded


def _row(leaf: Turn) -> Row:
    """Returns the row that ends with a turn, with all its sampled tokens trained."""
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
        messages=(*request.messages, leaf.message) if request and leaf.message else (),
        tools=request.tools if request else (),
        text=leaf.text,
    )


def _add_runs(runs: list[list[int]], added: Iterable[tuple[int, int]], num_tokens: int) -> None:
    """Appends the versions of the first `num_tokens` tokens of a turn to those of a row."""
    for version, whole in added:
        count = min(whole, num_tokens)
        num_tokens -= count
        if not count:
            break
        if runs and runs[-1][0] == version:
            runs[-1][1] += count
        else:
            runs.append([version, count])


@dataclass
class _Open:
    session: Session
    digest: bytes = field(repr=False)


class Sessions:
    """All open sessions of an endpoint.

    Args:
        max_context: Maximum number of tokens in a prompt and its turn.
        template: Renders messages; None if clients may send only token ids.
    """

    def __init__(self, max_context: int, template: ChatTemplate | None) -> None:
        self._max_context, self.template = max_context, template
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._request_ids = itertools.count()
        self._on_close: list[Any] = []

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        sample_key: int,
        row: Any = None,
        budgets: Budgets | None = None,
        max_kept: int | None = None,
    ) -> Session:
        """Opens a session, whose `token` a client sends as its API key.

        Args:
            sample_key: Number of the sample, for seeds and results.
            row: Row of the data that the agent works on; returned with the result.
            budgets: Limits of the session; default: none.
            max_kept: See `Session`.
        """
        session = Session(
            sample_key, row, budgets or Budgets(), self._max_context, self.template, max_kept
        )
        digest = _token_digest(session.token)
        with self._lock:
            self._open[digest] = _Open(session, digest)
        return session

    def find(self, token: str | None) -> Session:
        """Returns the session with a token, which is compared in constant time.

        Raises:
            BadRequest: No session has the token (status 401), or its session has ended (410).
        """
        digest = _token_digest(token or "")
        with self._lock:
            found = self._open.get(digest)
            has_ended = digest in self._ended
        if found is not None and hmac.compare_digest(found.digest, digest):
            return found.session
        if has_ended:
            raise SessionEnded
        raise BadRequest(
            "The API key is not the token of an open session. Send the session's token as "
            "`Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.",
            code="invalid_api_key",
            status=401,
        )

    def all(self) -> list[Session]:
        """Returns the open sessions."""
        with self._lock:
            return [one.session for one in self._open.values()]

    def close(self, session: Session, picker: Picker | None = None) -> SessionResult:
        """Ends a session and returns its rows.

        Turns that are being sampled are stopped: their clients receive an error, and the rows do
        not contain them.

        Args:
            picker: Chooses the rows; default: all.

        Raises:
            UserError: The picker returned something else than some of the rows.
        """
        digest = _token_digest(session.token)
        with self._lock:
            if self._open.pop(digest, None) is None:
                raise UserError(
                    "session", session.session_id, "an open session", "Close a session only once."
                )
            self._ended[digest] = None
            while len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)
            listeners = list(self._on_close)
        session.end()
        for listener in listeners:
            listener(session)
        rows = session.rows()
        session.counts["undelivered_turns"] = session.num_undelivered()
        chosen = picked(rows, picker or (lambda found: found))
        return SessionResult(
            session.sample_key, session.row, chosen, session.num_turns, dict(session.counts)
        )

    def on_close(self, listener: Any) -> None:
        """Calls `listener(session)` after a session ended, from the thread that closes it."""
        with self._lock:
            self._on_close.append(listener)

    def next_request_id(self) -> int:
        """Returns a number for a turn that no other turn of these sessions has."""
        return next(self._request_ids)


def _token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", errors="replace")).digest()


def total_counts(results: Iterable[SessionResult]) -> Mapping[str, int]:
    """Returns the sums of the counts of several sessions."""
    found: Counter[str] = Counter()
    for result in results:
        found.update(result.counts)
    return dict(found)
