"""The connection to a Ray cluster: one that is there, or a new one of this machine; and why there is none."""

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from probe.engines.interface import reason_of
from probe.engines.process import own_cpus
from probe.interrupts import interrupt_later

#: Seconds to wait for an answer of the cluster's address.
CONNECT_TIMEOUT = 5.0
#: How a client of gRPC, which is HTTP/2, greets; and the type of the frame with which a server does.
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 4
#: The address of a cluster of this machine alone. Ray takes 127.0.0.1 for that of the machine in its network.
LOOPBACK = "127.0.0.2"
#: What Ray prints, or raises, where the token of a cluster is missing or wrong. Of itself it sends the user's token to
#: a cluster that it finds on this machine, but to no address.
UNAUTHENTICATED = ("InvalidAuthToken", "Unauthenticated", "AuthenticationError", "authentication token")
#: What it raises where the user asks for a token and has none.
NO_TOKEN = "no authentication token was found"
#: Variables that name a token; without them Ray takes the one of the user's file.
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN = (
    "To send it: export RAY_AUTH_MODE=token; the token is that of ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or "
    "RAY_AUTH_TOKEN, and must be the one of the machine where the cluster was started"
)


def load_ray() -> ModuleType:
    """Ray, or a message that says how to install it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning with every actor without a GPU
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a cluster is started where the one in use was lost
    try:
        import ray
    except ImportError as problem:
        raise ValueError(
            f"the engine ray needs Ray, which cannot be loaded ({problem}). Install it here and on every node: "
            "pip install 'quant-probe[cluster]'"
        ) from None
    return ray


class Connection:
    """The connection of this process: the one that it has, or a new one, which `close` ends.

    While there is a new one, a signal to end is taken as Ctrl-C, so that the cluster ends in order: the handler of Ray
    prints where its code was.
    """

    def __init__(self, ray: ModuleType, address: str | None) -> None:
        self._ray, self._named = ray, address
        self._is_own = not ray.is_initialized()
        self._on_termination = signal.getsignal(signal.SIGTERM)
        if self._is_own:
            try:
                with interrupt_later():  # it would leave half a connection, with which Ray crashes
                    _connect(ray, address)
            except KeyboardInterrupt:
                ray.shutdown()
                raise
            is_plain = self._on_termination is signal.SIG_DFL
            _handle_termination(signal.default_int_handler if is_plain else self._on_termination)
        elif address not in (None, "auto", self.address) and not str(address).startswith("ray://"):
            raise ValueError(
                f"this process is connected to the Ray cluster at {self.address}, and the one at {address} was asked "
                "for. Leave the address out, or call ray.shutdown() first."
            )

    @property
    def address(self) -> str:
        """Where other processes reach the cluster."""
        found: str = self._ray.get_runtime_context().gcs_address
        return found

    @property
    def is_client(self) -> bool:
        """Whether it goes through the client server of the head, which loads all that passes."""
        return bool(self._ray.util.client.ray.is_connected())

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address}" if self._named else "a Ray cluster of this machine"

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._is_own:
            self._ray.shutdown()
            _handle_termination(self._on_termination)


def _handle_termination(handler: Any) -> None:
    """Set what SIGTERM does; only the main thread can."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _connect(ray: ModuleType, address: str | None) -> None:
    """Connect this process; without an address, to a cluster that is started on this machine."""
    # what Ray says of lost nodes goes to stdout, whatever it was told; results are there, and the progress says as much
    vars(import_module("ray._private.worker"))["print_to_stdstream"] = lambda data, ignore_prefix: None
    if address is None:  # of this machine alone, and not to be reached from another
        options: dict[str, Any] = {"address": "local", "num_cpus": own_cpus(), "include_dashboard": False}
        options |= {"_node_ip_address": LOOPBACK} if sys.platform == "linux" else {}
        _name_token()
    else:
        options = {"address": address}
        if address != "auto":
            _check_reachable(address)
    logging.getLogger("ray.util.client.logsclient").disabled = True  # what fails on the head is raised here as well
    with _printed() as printed:
        try:
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except Exception as problem:  # Ray raises bare ones too
            with suppress(Exception):
                ray.shutdown()
            printed.seek(0)
            raise ValueError(_no_connection(address, reason_of(problem), printed.read())) from None


def _no_connection(address: str | None, reason: str, printed: str) -> str:
    reason = reason[:300].rstrip(".")
    if address is None:
        return f"Ray could not be started on this machine: {reason}. /tmp/ray/session_latest/logs says more."
    if NO_TOKEN in reason + printed:
        return (
            f"RAY_AUTH_MODE asks for a token, and this machine has none, so the Ray cluster at {address!r} is not "
            "used. Put its token into ~/.ray/auth_token or RAY_AUTH_TOKEN; if it asks for none, unset RAY_AUTH_MODE."
        )
    if any(word in reason + printed for word in UNAUTHENTICATED):
        return f"the Ray cluster at {address!r} asks for its token, and got none or another. {TOKEN}."
    start = "Start one with: ray start --head; or leave the address out, and one is started on this machine."
    if address != "auto":
        start += " HOST:PORT has the port of the cluster, usually 6379, ray://HOST:PORT that of its clients, 10001."
    if address.startswith("ray://"):  # Ray says no more than that nobody answered in time
        start += f" If there is one, perhaps it asks for its token. {TOKEN}."
    return f"there is no Ray cluster to be used at {address!r}: {reason}. {start}"


def _name_token() -> None:
    """A token for the cluster of this machine. Ray would write one to the user's file, which other clusters refuse."""
    if not any(name in os.environ for name in TOKEN_VARIABLES) and not Path.home().joinpath(".ray/auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _printed() -> Iterator[IO[str]]:
    """What is written to stderr, also by C++ code: it goes to this file instead."""
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        before = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)


def _check_reachable(address: str) -> None:
    """Refuse an address where nobody answers, or something else than Ray: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"the address of the cluster is {address!r}. Expected auto, HOST:PORT, or ray://HOST:PORT.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT) as connected:
            is_grpc = _speaks_grpc(connected)
    except OSError as problem:
        raise ValueError(
            f"nobody answers at {address}: {reason_of(problem)}. Look for the address with: ray status; or leave it "
            "out, and a cluster is started on this machine."
        ) from None
    if not is_grpc:
        raise ValueError(
            f"what answers at {address} is not a Ray cluster. HOST:PORT has the port of the cluster, usually 6379, "
            "ray://HOST:PORT that of its clients, 10001."
        )


def _speaks_grpc(connected: socket.socket) -> bool:
    """Whether the other side greets as gRPC does. With TLS that cannot be seen."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    connected.sendall(PREFACE)
    try:
        greeting = connected.recv(9)
    except TimeoutError:
        return False
    return len(greeting) > 3 and greeting[3] == SETTINGS
