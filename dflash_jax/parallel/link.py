"""Control messages from process 0 to the other processes, over one TCP connection each: records in order, and signs of life.

A record is a JSON object and some arrays. Both ends send signs of life; where those stay out, or a connection ends, the process
that notices says so and ends too: what it waits for on its GPUs would never come.
"""

import hmac
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax.errors import DeviceError

BEAT_S = 5.0  # from one sign of life to the next
SILENCE_S = 20.0  # after which a process counts as gone
CONNECT_S = 120.0  # for all to find process 0: they have just read weights
_INVITATION_BYTES = 1024
_TOKEN_BYTES = 32
_LENGTH = struct.Struct("<I")

type Record = tuple[dict[str, Any], list[np.ndarray]]


def end_process(reason: str) -> None:
    """Ends this process at once, whatever its other threads wait for."""
    print(f"dflash_jax: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


class Leader:
    """Process 0's end of all connections. Made on all processes at once, as `Member` is on the others.

    Raises:
      DeviceError: a process did not come.
    """

    def __init__(self) -> None:
        self._sending, self._closed = threading.Lock(), False
        token = secrets.token_hex(_TOKEN_BYTES)
        with socket.create_server(("", 0), family=socket.AF_INET) as server:
            _invitation({"hosts": _own_names(), "port": server.getsockname()[1], "token": token})
            server.settimeout(CONNECT_S)
            self._members = self._accept(server, token)
        for number, member in self._members.items():
            threading.Thread(target=self._listen, args=(number, member), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def tell(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a record to all others."""
        message = packed(header, arrays)
        with self._sending:
            for number, member in self._members.items():
                try:
                    member.sendall(message)
                except OSError as error:
                    self._lost(number, str(error))

    def close(self) -> None:
        """The others end, too, and without complaint."""
        if not self._closed:
            self._closed = True
            self.tell({"stop": True})

    def _accept(self, server: socket.socket, token: str) -> dict[int, socket.socket]:
        members, others = dict[int, socket.socket](), jax.process_count() - 1
        while len(members) < others:
            try:
                member, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, others + 1)} - {*members})
                raise DeviceError(
                    f"processes {missing} have not come to process 0 in {CONNECT_S:.0f} s: see that they run, and that their hosts "
                    f"reach this one ({', '.join(_own_names())}) by TCP"
                ) from None
            member.settimeout(SILENCE_S)
            number = _greeted(member, token)
            if number is None:  # somebody else's connection
                member.close()
            else:
                members[number] = member
        return members

    def _listen(self, number: int, member: socket.socket) -> None:
        try:
            while member.recv(1):
                pass
            reason = "its connection ended"
        except OSError as error:
            reason = "it gave no sign of life" if isinstance(error, TimeoutError) else str(error)
        if not self._closed:
            self._lost(number, reason)

    def _beat(self) -> None:
        while not self._closed:
            self.tell({"beat": True})
            threading.Event().wait(BEAT_S)

    def _lost(self, number: int, reason: str) -> None:
        if not self._closed:
            end_process(
                f"process {number} is gone ({reason}), and with it its part of the model: process 0 ends, too. What process "
                f"{number} wrote last says why"
            )


class Member:
    """Another process's end of its connection to process 0.

    Raises:
      DeviceError: process 0 cannot be reached.
    """

    def __init__(self) -> None:
        invitation = _invitation(None)
        self._leader = _connected(invitation)
        self._leader.sendall(packed({"token": invitation["token"], "process": jax.process_index()}, ()))
        self._leader.settimeout(SILENCE_S)
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def records(self) -> Iterator[Record]:
        """Records of process 0, until it stops."""
        while "stop" not in (record := self._records.get())[0]:
            yield record

    def _read(self) -> None:
        try:
            while True:
                record = received(self._leader)
                if "beat" not in record[0]:
                    self._records.put(record)
                if "stop" in record[0]:
                    return
        except (OSError, ValueError) as error:
            reason = "it gave no sign of life" if isinstance(error, TimeoutError) else str(error)
            number = jax.process_index()
            end_process(f"process 0 is gone ({reason}), which decides for all: process {number} ends, too")

    def _beat(self) -> None:
        with suppress(OSError):  # whoever reads says what became of the connection
            while True:
                self._leader.sendall(b".")
                threading.Event().wait(BEAT_S)


def _greeted(member: socket.socket, token: str) -> int | None:
    """The number of the process that has come; None for a stranger, who may say anything."""
    try:
        size = _LENGTH.unpack(_exactly(member, _LENGTH.size))[0]
        if size > _INVITATION_BYTES:
            return None
        said = json.loads(_exactly(member, size))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not hmac.compare_digest(str(said.get("token")).encode(), token.encode()):
        return None
    return int(said["process"])


def _own_names() -> list[str]:
    """Names and addresses under which others may reach this host."""
    names = [socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # The interface of the route to other networks; nothing is sent.
        probe.connect(("192.0.2.1", 9))
        names.append(probe.getsockname()[0])
    return [*names, "127.0.0.1"]


def _invitation(ours: dict[str, Any] | None) -> dict[str, Any]:
    """Broadcasts the argument of process 0 to all processes."""
    padded = np.zeros(_INVITATION_BYTES, np.uint8)
    if ours is not None:
        text = json.dumps(ours).encode()
        padded[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return json.loads(told.astype(np.uint8).tobytes().rstrip(b"\0"))


def _connected(invitation: dict[str, Any]) -> socket.socket:
    errors = []
    for host in invitation["hosts"]:
        try:
            return socket.create_connection((host, invitation["port"]), timeout=CONNECT_S / len(invitation["hosts"]))
        except OSError as error:
            errors.append(f"{host}: {error}")
    raise DeviceError(
        f"process 0 cannot be reached at port {invitation['port']} ({'; '.join(errors)}): see that hosts reach one another by TCP"
    )


def packed(header: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    shapes = [[list(array.shape), str(array.dtype)] for array in arrays]
    text = json.dumps(header | {"arrays": shapes}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def received(source: socket.socket) -> Record:
    """The next record. Raises OSError where there is none any more, ValueError for what is no record."""
    header = json.loads(_exactly(source, _LENGTH.unpack(_exactly(source, _LENGTH.size))[0]))
    arrays = []
    for shape, name in header["arrays"]:
        kind = jnp.dtype(name)
        content = _exactly(source, int(np.prod(shape, dtype=np.int64)) * kind.itemsize)
        arrays.append(np.frombuffer(content, kind).reshape(shape))
    return header, arrays


def _exactly(source: socket.socket, count: int) -> bytearray:
    content = bytearray()
    while len(content) < count:
        if not (piece := source.recv(min(count - len(content), 1 << 20))):
            raise ConnectionError("its connection ended")
        content += piece
    return content
