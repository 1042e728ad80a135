"""A certificate for loopback that clients can trust as its own authority."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from servers.missing import program


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path

    @property
    def words(self) -> list[tuple[str, str]]:
        """What Redis is told of it, whether server or sentinel."""
        return [
            ("tls-cert-file", str(self.certificate)),
            ("tls-key-file", str(self.key)),
            ("tls-ca-cert-file", str(self.certificate)),
            ("tls-auth-clients", "no"),
            ("tls-replication", "yes"),
        ]


def make_certificate(folder: Path) -> Certificate:
    """Writes a self-signed certificate for 127.0.0.1 and localhost into the folder, once."""
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    if made.certificate.exists():
        return made
    options = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    options += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    options += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    options += ["-keyout", str(made.key), "-out", str(made.certificate)]
    openssl = program("openssl", "openssl")
    subprocess.run([openssl, *options], check=True, capture_output=True)
    made.key.chmod(0o600)
    return made
