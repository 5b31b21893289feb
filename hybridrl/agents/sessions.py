"""Sessions of agents: the conversations of an episode, and all open sessions. No torch.

forest.py finds the turn that a request continues, and makes rows of training data.

Any thread may call any function. No lock is held while a turn is sampled, so a session may have
several turns at the same time.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.conversation import BadRequest, ContextOverflow, Conversation, next_digest
from hybridrl.agents.forest import (
    Forest,
    Prepared,
    Turn,
    rendered_input,
    rows_of,
    token_input,
    undelivered,
)
from hybridrl.agents.samples import Budgets, Message, Picker, Row, SessionResult, picked
from hybridrl.errors import UserError
from hybridrl.rollout.engine import Completion

MAX_REMEMBERED = 4096  # ended sessions whose tokens are still recognised
TURN_BUDGET, TOKEN_BUDGET = "turn_budget_exhausted", "token_budget_exhausted"


class SessionEnded(BadRequest):
    """The session of a request has ended."""

    def __init__(self) -> None:
        super().__init__("This session has ended.", code="session_ended", status=410)


class Limits:
    """Admits turns while the limits of a session allow it. Not for several threads at the same
    time.
    """

    def __init__(self, budgets: Budgets, max_context: int) -> None:
        bound = budgets.max_row_tokens
        self._budgets = budgets
        self.max_context = max_context if bound is None else min(bound, max_context)
        self._num_requested = self._num_abandoned = self._num_sampled = 0
        self.reached: Literal["turns", "tokens"] | None = None

    def admit(self, prepared: Prepared, max_tokens: int | None) -> Prepared:
        """Returns a turn with its number and token limit.

        Turns that are sampled at the same time may together exceed `max_sampled_tokens`.

        Raises:
            BadRequest: A budget is exhausted, or the messages are too long.
        """
        budgets, num = self._budgets, len(prepared.tokens)
        if num >= self.max_context:
            self.note_overflow()
            raise ContextOverflow(num, self.max_context)
        num_taken = self._num_requested - self._num_abandoned
        if budgets.max_turns is not None and num_taken >= budgets.max_turns:
            self.reached = self.reached or "turns"
            raise BadRequest(
                f"This session may take {budgets.max_turns} turns, and has taken all of them.",
                code=TURN_BUDGET,
            )
        limits = [self.max_context - num, max_tokens, budgets.max_turn_tokens]
        if budgets.max_sampled_tokens is not None:
            limits.append(budgets.max_sampled_tokens - self._num_sampled)
            if self._num_sampled >= budgets.max_sampled_tokens:
                self.reached = self.reached or "tokens"
                raise BadRequest(
                    f"This session may sample {budgets.max_sampled_tokens} tokens, and has "
                    "sampled all of them.",
                    code=TOKEN_BUDGET,
                )
        most = min(limit for limit in limits if limit is not None)
        self._num_requested += 1
        return replace(prepared, max_new_tokens=most, turn=self._num_requested - 1)

    def give_back(self) -> None:
        """Gives an admitted turn that was not sampled back to the turn budget."""
        self._num_abandoned += 1

    def note_overflow(self) -> None:
        self.reached = self.reached or "tokens"

    def note_sampled(self, num_tokens: int) -> None:
        self._num_sampled += num_tokens


class Session:
    """The conversations of one episode.

    Args:
        sample_key: Number of the sample; with the number of a turn, it determines the seed.
        max_kept: Number of turns that later requests can continue; older turns are forgotten, and
            are in no row. None keeps all turns.

    Attributes:
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
        self._template = template
        self._lock = threading.RLock()
        self._forest, self._limits = Forest(max_kept), Limits(budgets, max_context)
        self._num_finished = 0
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def limit(self) -> Literal["turns", "tokens"] | None:
        return self._limits.reached

    @property
    def num_turns(self) -> int:
        return self._num_finished

    @property
    def turns(self) -> tuple[Turn, ...]:
        with self._lock:
            return tuple(self._forest.turns)

    def prepare(self, conversation: Conversation, max_tokens: int | None = None) -> Prepared:
        """Returns the input for a turn that answers a conversation.

        Raises:
            BadRequest: The session has ended, a budget is exhausted, the messages are too long, or
                the chat template rejects them.
        """
        try:
            found = self._input(conversation)
        except ContextOverflow:
            with self._lock:
                self._limits.note_overflow()
            raise
        return self._limited(found, max_tokens)

    def num_tokens(self, conversation: Conversation) -> int:
        """Returns the number of tokens that the model would receive for a conversation.

        Raises:
            BadRequest: The session has ended, the chat template rejects the messages, or they are
                so much longer than the context that they were not counted.
        """
        return len(self._input(conversation).tokens)

    def prepare_tokens(self, tokens: Sequence[int], max_tokens: int | None = None) -> Prepared:
        """As `prepare`, after token ids that the client rendered; see `token_input`."""
        found = token_input(self.turns, tokens)
        images = None if self._template is None else self._template.images
        if images is not None and images.placeholder in found.tokens[found.num_shared :]:
            raise BadRequest(
                f"token_ids: got {images.placeholder}, the placeholder of images; allowed: token "
                "ids of text. Send images as parts of messages to the other APIs.",
                "token_ids",
                "invalid_value",
            )
        return self._limited(found, max_tokens)

    def commit(
        self, prepared: Prepared, done: Completion, message: Message | None = None, text: str = ""
    ) -> Turn:
        """Adds a turn, which the client receives as `message`; SessionEnded if it is too late."""
        with self._lock:
            self._check_open()
            self._limits.note_sampled(len(done.tokens))
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
                contents=prepared.contents,
            )
            self._forest.add(turn)
            self._num_finished += 1
            self.counts["conversations"] += turn.parent is None
            if turn.parent is not None and turn.num_shared < turn.parent.num_tokens:
                self.counts["replaced_ends"] += 1
            return turn

    def abandon(self) -> None:
        """Gives a turn that was prepared but not sampled back to the turn budget."""
        with self._lock:
            self._limits.give_back()
            self.counts["aborted_turns"] += 1

    def count(self, event: str) -> None:
        with self._lock:
            self.counts[event] += 1

    def end(self) -> None:
        with self._lock:
            self._is_open = False

    def rows(self) -> tuple[Row, ...]:
        return rows_of(self.turns)

    def num_undelivered(self) -> int:
        return len(undelivered(self.turns))

    def _input(self, conversation: Conversation) -> Prepared:
        assert self._template is not None
        most = self._limits.max_context
        if (num := len(conversation.messages)) > most:
            raise ContextOverflow(num, most, is_bound=True)
        digests = conversation.digests()
        with self._lock:
            self._check_open()
            match = self._forest.deepest(conversation, digests)
        return rendered_input(self._template, conversation, digests, match, most)

    def _limited(self, prepared: Prepared, max_tokens: int | None) -> Prepared:
        if not prepared.tokens:
            raise BadRequest("The messages are empty.", "messages")
        if max_tokens is not None and max_tokens < 1:
            raise BadRequest(f"max_tokens: got {max_tokens}; allowed: 1 or more.", "max_tokens")
        with self._lock:
            self._check_open()
            return self._limits.admit(prepared, max_tokens)

    def _check_open(self) -> None:
        if not self._is_open:
            raise SessionEnded


class Sessions:
    """All open sessions of an endpoint.

    Args:
        template: Renders messages; None if clients may send only token ids.
        request_ids: Numbers for turns; default: from 0 on.
    """

    def __init__(
        self,
        max_context: int,
        template: ChatTemplate | None,
        request_ids: Iterator[int] | None = None,
    ) -> None:
        self._max_context, self.template = max_context, template
        self._lock = threading.Lock()
        self._open: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._request_ids = itertools.count() if request_ids is None else request_ids
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
        """Opens a session, whose `token` is the API key of its clients; see `Session`."""
        session = Session(
            sample_key, row, budgets or Budgets(), self._max_context, self.template, max_kept
        )
        with self._lock:
            self._open[_token_digest(session.token)] = session
        return session

    def find(self, token: str | None) -> Session:
        """Returns a token's session. Raises BadRequest if none is open (401) or it ended (410)."""
        digest = _token_digest(token or "")
        with self._lock:
            found = self._open.get(digest)
            has_ended = digest in self._ended
        if found is not None:
            return found
        if has_ended:
            raise SessionEnded
        raise BadRequest(
            "The API key is not the token of an open session. Send the session's token as "
            "`Authorization: Bearer TOKEN` or `x-api-key: TOKEN`.",
            code="invalid_api_key",
            status=401,
        )

    def close(self, session: Session, picker: Picker | None = None) -> SessionResult:
        """Ends a session and returns the rows that `picker` chooses, by default all.

        Turns that are being sampled are stopped: their clients receive an error, and the rows do
        not contain them. Raises UserError if the picker returned something else than some of the
        rows.
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
