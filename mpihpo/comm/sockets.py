"""The sockets of a gloo process group, so that a blocked collective can be released.

gloo cannot be aborted: its `abort` and `shutdown` do nothing in torch 2.6 to 2.14, and a rank
blocked in one of its collectives stays there until a peer's process ends or the time-out of half an
hour is over. Shutting down the connections between the members makes every collective on them fail
at once, here and at the peers, within a millisecond.

A connection belongs to the group if it was opened while the group was built and one of its ends is
the port that a member listens on; so no connection of MPI, which may open some at the same time, is
touched.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/dev/fd")


def open_sockets() -> frozenset[int]:
    """Descriptors of this process's internet stream sockets; local."""
    return frozenset(number for number, _ in _internet_streams())


def listening_ports(before: frozenset[int]) -> list[int]:
    """Ports listened on by sockets that were not open ``before``; local."""
    return [
        port(connection.getsockname())
        for number, connection in _internet_streams()
        if number not in before and _listens(connection)
    ]


def shut_down(before: frozenset[int], ports: frozenset[int]) -> int:
    """Shut down the connections opened since ``before`` of which one end is in ``ports``; local.

    Returns:
        How many there were.
    """
    count = 0
    for number, connection in _internet_streams():
        if number in before or _listens(connection):
            continue
        try:
            ends = {port(connection.getsockname()), port(connection.getpeername())}
            if ends & ports:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            continue  # closed in the meantime, which is as good
    return count


def port(address: tuple[object, ...]) -> int:
    """The port of an IPv4 or IPv6 address."""
    return int(str(address[1]))


def loopback_interface() -> str:
    """Name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _internet_streams() -> Iterator[tuple[int, socket.socket]]:
    for entry in _DESCRIPTORS.iterdir():
        number = int(entry.name)
        try:
            # A duplicate, so that closing the Python object leaves the descriptor itself open.
            copy = os.dup(number)
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # not a socket
            continue
        with connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and connection.type == socket.SOCK_STREAM:
                yield number, connection
