"""What the owner of the server allows and has set up, on its command line."""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.text import host_name, one_line
from unisono.front.http_headers import LOOPBACK
from unisono.front.http_server import address_of

_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True)
class ServerAccess:
    """Where browsers reach the server. Beyond this machine the line is encrypted: by the server, or
    by a proxy before it.

    Attributes:
        host: the address that it listens on.
        certificate: a PEM file with the certificate and those between it and its authority.
        certificate_key: a PEM file; None: it is in that of the certificate.
        proxy: the URL at which a proxy with TLS is reached; empty: there is none.
    """

    host: str = "127.0.0.1"
    certificate: Path | None = None
    certificate_key: Path | None = None
    proxy: str = ""

    def check(self) -> None:
        """Refuses a line that is not encrypted.

        Raises:
            UsageError: also if the certificate cannot be read, or the URL is not one of a server.
        """
        if self.host not in LOOPBACK and self.certificate is None and not self.proxy:
            raise UsageError.of(
                f"others can reach {one_line(self.host)}, and the line would not be encrypted",
                where="--host",
                why="whoever reads it can start programs as you",
                fix=(
                    "add --tls-cert FILE and --tls-key FILE, or --proxy https://NAME for a proxy with TLS; an"
                    " SSH tunnel needs no --host"
                ),
            )
        for option, file in (("--tls-cert", self.certificate), ("--tls-key", self.certificate_key)):
            if file is not None and not file.is_file():
                raise UsageError.of(f"{file} is not a file", where=option, fix="give a file in PEM")
        if self.certificate is None and self.certificate_key is not None:
            raise UsageError.of("--tls-key has no certificate", where="--tls-key", fix="add --tls-cert FILE")
        if self.proxy:
            self._check_proxy()
        if self.certificate is not None:
            self._check_certificate(self.certificate)

    def _check_proxy(self) -> None:
        server = host_name(self.proxy.removeprefix("https://").rstrip("/"))
        if server is None or not self.proxy.startswith("https://"):
            raise UsageError.of(
                f"{one_line(self.proxy)} is not the address of a proxy",
                where="--proxy",
                fix="give the address that a browser opens, as in https://studio.example.org",
            )

    def _check_certificate(self, certificate: Path) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                certificate,
                self.certificate_key,
                password="",  # a key with one is refused, not asked for
            )
        except (OSError, ValueError) as error:
            raise UsageError.of(
                f"{certificate} cannot be used",
                where="--tls-cert, --tls-key",
                why=one_line(str(error)),
                fix="give a certificate and its key without a password, both in PEM",
            ) from error

    @property
    def name(self) -> str:
        """The host in the address that is printed."""
        if self.proxy:
            return str(host_name(self.proxy.removeprefix("https://").rstrip("/")))
        return socket.gethostname() if self.host in _ANY else self.host

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach it with TLS."""
        return self.certificate is not None or bool(self.proxy)

    def address(self, listener: socket.socket) -> str:
        """What a browser opens."""
        if self.proxy:
            return self.proxy.rstrip("/")
        address = address_of(listener, self.name)
        return address.replace("http:", "https:", 1) if self.certificate is not None else address

    def server_settings(self) -> dict[str, Any]:
        """Of uvicorn."""
        if self.certificate is None:
            return {}
        return {"ssl_certfile": self.certificate, "ssl_keyfile": self.certificate_key}


@dataclass(frozen=True)
class OwnerSettings:
    """What the page may do.

    Attributes:
        roots: the directories that may be read and written; the first is the working directory.
        trusts_code: whether configs may name Python code.
        may_push: whether results may be uploaded to the hub.
        launchers: options of `unisono train` by the name under which runs are started with them.
    """

    roots: list[Path]
    trusts_code: bool = False
    may_push: bool = False
    launchers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    access: ServerAccess = field(default_factory=ServerAccess)

    def launcher_options(self, name: str) -> list[str]:
        """The options of a launcher; of an empty name: none.

        Raises:
            UsageError: if the owner has not set it up.
        """
        if name and name not in self.launchers:
            raise UsageError.of(
                f"this studio has no launcher {one_line(name, limit=60)!r}",
                why="runs are started elsewhere only if the owner of the server has set it up",
                fix=(
                    f"use one of {', '.join(self.launchers)}"
                    if self.launchers
                    else "start `unisono studio --launchers FILE.yaml`, or `unisono train --launcher NAME`"
                ),
            )
        return list(self.launchers.get(name, ()))
