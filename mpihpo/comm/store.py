"""The store of a process group, over MPI messages: no server, no port, no host name.

A process group is built through a key-value store: each rank sets its own addresses and gets those
of the others. Here `set` posts the pair to every member and `get` reads the local copy, waiting for
the message if need be, so that building needs no server to answer and no thread to serve. What
needs one place (`add`, `compare_set`) is done by the group's rank 0, whenever that rank is in a
store call or its agent reads its mail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from mpihpo.comm.mailbox import Mailbox, Tag
from mpihpo.comm.waiting import wait_until

LISTENS = "mpihpo/listens/"
"""Prefix of the keys that tell which ports the members listen on: ``mpihpo/listens/RANK/PORT``."""


class StoreMail:
    """Hands the store messages of a rank to the stores they are for.

    A peer may be quick: messages for a group that this rank has not begun to build are kept until
    it does, and those for groups that are gone are dropped. Serials of a rank only grow.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.lock = threading.RLock()
        self._store: MpiStore | None = None
        self._newest = -1
        self._early: list[tuple[int, tuple[Any, ...]]] = []

    def open(self, store: MpiStore) -> None:
        """Deliver to ``store`` from now on; local."""
        with self.lock:
            self._store, self._newest = store, store.serial
            early, self._early = self._early, []
            for sender, message in early:
                self._deliver(sender, message)

    def close(self) -> None:
        """Deliver to no store until the next `open`; local."""
        with self.lock:
            self._store = None

    def pump(self) -> bool:
        """Read what has arrived; local. Returns whether anything had."""
        arrived = False
        with self.lock:
            while (mail := self.mailbox.take(Tag.STORE)) is not None:
                self._deliver(*mail)
                arrived = True
        return arrived

    def _deliver(self, sender: int, message: tuple[Any, ...]) -> None:
        serial = message[0]
        if self._store is not None and serial == self._store.serial:
            self._store.deliver(sender, *message[1:])
        elif serial > self._newest:
            self._early.append((sender, message))


class MpiStore(Store):
    """A `torch.distributed.Store` over the members of one group.

    Args:
        mail: The rank's reader of store messages.
        serial: The group's serial; names its messages.
        ranks: World ranks of the members.
        rank: This rank's place in ``ranks``.
        timeout_seconds: How long `get` and `wait` wait for a key.
        check: Called while waiting; whatever it raises ends the wait.
    """

    def __init__(
        self,
        mail: StoreMail,
        serial: int,
        ranks: Sequence[int],
        rank: int,
        timeout_seconds: float,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self.serial = serial
        self._mail = mail
        self._owner = ranks[0]
        self._me = ranks[rank]
        self._others = [other for other in ranks if other != self._me]
        self._values: dict[str, bytes] = {}
        self._replies: dict[int, bytes] = {}
        self._asked = 0
        self._timeout_seconds = timeout_seconds
        self._check = check
        self.longest_seconds: float | None = None
        """No wait is longer, whatever its caller asks for; None: as long as that."""
        mail.open(self)

    # What the process group calls, from Python and from C++ threads.

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key on every member; local, returns at once."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._tell_others("set", key, data)

    def get(self, key: str) -> bytes:
        """The value of a key, waiting until some member has set it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key is set.

        Raises:
            RuntimeError: The time is over; names the keys that are missing.
        """
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        if self.longest_seconds is not None:
            seconds = min(seconds, self.longest_seconds)
        if not self._pump_until(lambda: all(key in self._values for key in keys), seconds):
            missing = [key for key in keys if key not in self._values]
            raise RuntimeError(
                f"store of group {self.serial}: {missing} not set in {seconds:.0f} s"
            )

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is set by now; local."""
        self._mail.pump()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically, and return its new value; asks the group's rank 0."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected`` (or unset and that is empty)."""
        return self._ask("compare_set", key, _as_bytes(expected), _as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Forget a key on every member; local. Returns whether it was here."""
        self._tell_others("delete", key)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys are set here."""
        self._mail.pump()
        return len(self._values)

    def has_extended_api(self) -> bool:
        """No: multi_get and the like are made of single calls by torch."""
        return False

    def clone(self) -> MpiStore:
        """This store itself: it may be used from several threads."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait from now on."""
        self._timeout_seconds = timeout.total_seconds()

    def ports_of_members(self) -> frozenset[int]:
        """Ports that the members said they listen on; local."""
        with self._mail.lock:
            names = [key for key in self._values if key.startswith(LISTENS)]
        return frozenset(int(name.rsplit("/", 1)[1]) for name in names)

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return timedelta(seconds=self._timeout_seconds)

    # Messages.

    def deliver(self, sender: int, action: str, key: str, *arguments: Any) -> None:
        """Carry out one message of another member; called by `StoreMail` under its lock."""
        if action == "set":
            self._values[key] = arguments[0]
        elif action == "delete":
            self._values.pop(key, None)
        elif action == "reply":
            self._replies[arguments[0]] = arguments[1]
        else:
            token, *rest = arguments
            value = self._act(action, key, rest)
            self._mail.mailbox.post((self.serial, "reply", key, token, value), sender, Tag.STORE)

    def _act(self, action: str, key: str, arguments: Sequence[Any]) -> bytes:
        old = self._values.get(key)
        if action == "add":
            new = str(int(old or b"0") + arguments[0]).encode()
        else:
            expected: bytes = arguments[0]
            desired: bytes = arguments[1]
            if old is None and expected:
                return expected  # as TCPStore answers for a key that is not there
            new = desired if old is None or old == expected else old
        if new != old:
            self.set(key, new)
        return new

    def _ask(self, action: str, key: str, *arguments: Any) -> bytes:
        if self._me == self._owner:
            with self._mail.lock:
                return self._act(action, key, arguments)
        with self._mail.lock:
            self._asked += 1
            token = self._asked
        message = (self.serial, action, key, token, *arguments)
        self._mail.mailbox.post(message, self._owner, Tag.STORE)
        if not self._pump_until(lambda: token in self._replies, self._timeout_seconds):
            raise RuntimeError(f"store of group {self.serial}: no answer to {action}({key!r})")
        reply: bytes = self._replies.pop(token)
        return reply

    def _tell_others(self, *message: Any) -> None:
        for other in self._others:
            self._mail.mailbox.post((self.serial, *message), other, Tag.STORE)

    def _pump_until(self, ready: Callable[[], bool], seconds: float) -> bool:
        def arrived() -> bool:
            self._mail.pump()
            return ready()

        return wait_until(arrived, check=self._check, timeout_seconds=seconds)


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
