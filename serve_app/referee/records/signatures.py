"""Ed25519 signatures, by keys in PEM files."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from speculative.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, and which key made it."""

    algorithm: Literal["ed25519"]
    key_id: str  # the first 16 hex digits of the SHA-256 of the 32 bytes of the public key
    value: str  # base64 of the 64 bytes


class PublicKey:
    """Checks signatures."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.id = hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]

    @classmethod
    def from_file(cls, path: Path) -> "PublicKey":
        """Read a key (`openssl pkey -in key.pem -pubout`). Raises ConfigError: the file holds none."""
        try:
            key = load_pem_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{path} holds no public key in PEM: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"{path} holds a key that is not Ed25519.")
        return cls(key)

    def signed(self, text: bytes, signature: Signature) -> bool:
        """Return whether the signature is this key's, of this text."""
        try:
            self._key.verify(base64.b64decode(signature.value, validate=True), text)
        except (ValueError, InvalidSignature):
            return False
        return signature.key_id == self.id


class SigningKey:
    """Signs.

    Args:
        path: a PEM file (`openssl genpkey -algorithm ed25519`), such as a mounted secret.

    Raises:
        ConfigError: it holds no such key.
    """

    def __init__(self, path: Path) -> None:
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            reason = "it is encrypted" if isinstance(error, TypeError) else str(error)
            raise ConfigError(f"receipts.key_file {path} holds no private key in PEM: {reason}.") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"receipts.key_file {path} holds a key that is not Ed25519.")
        self._key = key
        self.public = PublicKey(key.public_key())

    def sign(self, text: bytes) -> Signature:
        """The signature of a text."""
        return Signature("ed25519", self.public.id, base64.b64encode(self._key.sign(text)).decode("ascii"))
