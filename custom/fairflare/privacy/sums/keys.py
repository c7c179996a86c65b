"""Agree on a secret key for each pair of sites; the server, which passes the messages on, learns none of them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import ExtensionPolicy, PolicyBuilder, Store, VerificationError

from fairflare.base.checks import refuse
from fairflare.base.disk.files import private_folder, write_whole
from fairflare.methods.base.site_run import SiteError

MAGIC, KEY = b"fairflare-sum-1", "sums.key"
SIZE = 32  # bytes of keys, nonces and digests
FEWEST = 3  # with two sites, each could compute the other's numbers from the sum
LIFE = 7 * 24 * 3600.0  # seconds that a private key is kept after its last use if its run never ends properly
PSS = padding.PSS(padding.MGF1(hashes.SHA256()), salt_length=SIZE)
EXTENSIONS = {"ca_policy": ExtensionPolicy.webpki_defaults_ca(), "ee_policy": ExtensionPolicy.permit_all()}


class SumRefused(SiteError):
    """Signal that a site refuses a sum that would reveal too much of it; the text is also sent to the server."""

    def __init__(self, site: str, why: str) -> None:
        super().__init__(f"site {site!r}: secure sums: {why}", skipped=True)


def need(good: object, error: Exception) -> None:
    """Raise the given error unless the condition holds."""
    if not good:
        raise error


def fields(*parts: bytes) -> bytes:
    """Return byte strings joined to one, each preceded by its length (4 bytes, little-endian)."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def derive_key(key: bytes, salt: bytes, *info: bytes) -> bytes:
    """Return a key derived from another key by HKDF with SHA-256."""
    return HKDF(hashes.SHA256(), SIZE, salt, fields(MAGIC, *info)).derive(key)


@dataclass(frozen=True)
class Kit:
    """Hold the certificate and key with which a provisioned site proves its name.

    Attributes:
        certificate, key, root: contents of the site's certificate, of its key and of the root's certificate, PEM.
        pins: SHA-256 of the certificates (DER, hexadecimal) of all other sites; if empty, every certificate that the
            root signed is accepted, also the server's, so that the server could take part as a site.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    root: bytes
    pins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pairs:
    """Hold the keys that a site shares with each other site after the agreement.

    Attributes:
        site, run: name of the site, and the run's random bytes.
        roster: digest of the hello messages of all sites.
        keys: the key that the site shares with each other site.
        own: secret that the keys of the site's own masks are made of.
        first: number of sites at the run's first agreement.
    """

    site: str
    run: bytes
    roster: bytes
    keys: Mapping[str, bytes] = field(repr=False)
    own: bytes = field(repr=False)
    first: int


class SiteKeys:
    """Make, keep and remove a site's key of a run, and agree on a key with every other site.

    Args:
        site: name of the site.
        folder: where the site keeps the key, for its owner only.
        kit: certificate and key of the site; ``None`` if keys are not signed: this protects only from a curious server.
    """

    def __init__(self, site: str, folder: Path, kit: Kit | None = None) -> None:
        self.site, self.kit, self.file = site, kit, folder / KEY
        self._refusal = partial(SumRefused, site)  # an error by its text

    def hello(self, run: Any) -> dict[str, bytes]:
        """Return a site's hello to other sites: name and public key; with a startup kit also certificate and signature.

        Args:
            run: 32 random bytes that the server draws for a run; for the same bytes the site returns the same key.

        Raises:
            SumRefused: ``run`` is not 32 bytes.
        """
        if not (stored := self._read_stored(run)):
            private = X25519PrivateKey.generate()
            hello = hello_of(run, self.site, fields(os.urandom(SIZE), private.public_key().public_bytes_raw()))
            stored = {
                "run": run.hex(), "first": 0, "hello": hello.hex(), "hellos": {},
                "private": private.private_bytes_raw().hex(), "own": os.urandom(SIZE).hex(),
            }  # fmt: skip
            self._keep(stored)
        hello = bytes.fromhex(stored["hello"])
        if self.kit is None:
            return {"hello": hello}
        key: Any = serialization.load_pem_private_key(self.kit.key, None)  # an RSA key, as FLARE provisions them
        return {"hello": hello, "certificate": self.kit.certificate, "signature": key.sign(hello, PSS, hashes.SHA256())}

    def agree(self, run: Any, messages: Sequence[Mapping[str, Any]]) -> Pairs:
        """Check and save the hello of every site, and return the keys that this site shares with the others.

        Args:
            run: the run's random bytes.
            messages: what :meth:`hello` gave at each site, as the server hands it on.

        Raises:
            SumRefused: a hello is invalid; the text names the site.
        """
        stored, hellos, owners = self._load_run(run), dict[str, str](), dict[bytes, str]()
        for one in messages:
            name, public = self._read(run, one)
            owner = owners.setdefault(public, name)
            refuse({
                f"field 'hellos' has the site {name!r} twice; each needs a name of its own": name in hellos,
                f"the sites {owner!r} and {name!r} have one key; ask both for new ones": owner != name,
            }, self._refusal)  # fmt: skip
            if self.kit is not None:
                self._check_signature(self.kit, name, one)
            hellos[name] = one["hello"].hex()
        refuse({
            "field 'hellos' has not its own hello, or a changed one; the server must hand it on unchanged":
                hellos.get(self.site) != stored["hello"],
            f"field 'hellos' has {len(hellos)} sites; a sum needs at least {FEWEST}, so wait for more":
                len(hellos) < FEWEST,
        }, self._refusal)  # fmt: skip
        stored |= {"first": max(stored["first"], len(hellos)), "hellos": hellos}
        pairs = self._pairs(stored)
        self._keep(stored)
        return pairs

    def pairs(self, run: Any) -> Pairs:
        """Return the pair keys of an earlier agreement of this site, perhaps in another process.

        Raises:
            SumRefused: ``run`` is not 32 bytes, the site has no key of it, or there was no agreement.
        """
        stored = self._load_run(run)
        need(
            stored["hellos"],
            self._refusal("the sites have not agreed on keys in this run; the server must ask for keys first"),
        )
        os.utime(self.file)  # a run that takes weeks keeps its key
        return self._pairs(stored)

    def forget(self) -> None:
        """Remove the site's private key at the end of a run."""
        self.file.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------ inside

    def _read(self, run: bytes, one: Any) -> tuple[str, bytes]:
        """Return name and public key of a hello."""
        try:
            hello = one["hello"]
            name, public = hello[len(fields(MAGIC, b"hello", run, b"")) : -72].decode(), hello[-SIZE:]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._refusal(
                f"a hello cannot be read: {one!r:.200}; use the same version at server and sites"
            ) from error
        need(
            hello == hello_of(run, name, hello),
            self._refusal(f"the hello of site {name!r} is of another run or version; ask that site for a new one"),
        )
        return name, public

    def _check_signature(self, kit: Kit, name: str, one: Mapping[str, Any]) -> None:
        """Check that the root signed a site's certificate, and that the certificate's key signed the site's hello."""
        try:
            certificate, root = map(x509.load_pem_x509_certificate, (one["certificate"], kit.root))
            policy = PolicyBuilder().store(Store([root])).extension_policies(**EXTENSIONS)
            policy.build_client_verifier().verify(certificate, [])
        except (KeyError, TypeError, ValueError, VerificationError) as error:
            raise self._refusal(
                f"the certificate of site {name!r} is none of this project now, {datetime.now(timezone.utc):%Y-%m-%d} "
                f"by this site's clock; set this clock right, or provision that site again ({error})"
            ) from error
        names = [str(entry.value) for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        pin = kit.pins.get(name, fingerprint if name == self.site or not kit.pins else "none").lower()
        refuse({
            f"the certificate that site {name!r} shows is for {names}; it must show its own": names != [name],
            f"the certificate of site {name!r} is {fingerprint}, pinned is {pin}; ask that site why":
                pin != fingerprint,
        }, self._refusal)  # fmt: skip
        try:
            public: Any = certificate.public_key()
            public.verify(one["signature"], one["hello"], PSS, hashes.SHA256())
        except (AttributeError, KeyError, TypeError, InvalidSignature) as error:
            raise self._refusal(
                f"the signature of site {name!r} is not of its hello; ask that site for a new one"
            ) from error

    def _pairs(self, stored: Mapping[str, Any]) -> Pairs:
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(stored["private"]))
        run, hellos = (
            bytes.fromhex(stored["run"]),
            {n: bytes.fromhex(hello) for n, hello in sorted(stored["hellos"].items())},
        )
        roster, keys = hashlib.sha256(fields(MAGIC, b"roster", run, *hellos.values())).digest(), {}
        for name in hellos.keys() - {self.site}:
            try:
                shared = private.exchange(X25519PublicKey.from_public_bytes(hellos[name][-SIZE:]))
            except ValueError as error:
                raise self._refusal(f"the public key of site {name!r} is none; ask that site for a new one") from error
            keys[name] = derive_key(shared, roster, b"pair", *sorted([self.site.encode(), name.encode()]))
        return Pairs(self.site, run, roster, keys, bytes.fromhex(stored["own"]), stored["first"])

    def _load_run(self, run: Any) -> dict[str, Any]:
        stored = self._read_stored(run)
        need(stored, self._refusal(
            "it has no key of this run, and takes part again after the next agreement on keys; of two jobs of one "
            "experiment at a time end one, as each replaces the other's keys",
        ))  # fmt: skip
        return stored

    def _read_stored(self, run: Any) -> dict[str, Any]:
        """Return the key file's content, empty if it belongs to another run; remove outdated keys of all runs."""
        need(isinstance(run, bytes) and len(run) == SIZE, self._refusal(
            f"field 'run' must be {SIZE} bytes, got {run!r:.80}; use the same version at server and sites",
        ))  # fmt: skip
        for path in self.file.parents[2].glob(f"*/*/{self.file.name}"):
            with suppress(OSError):  # a run that is just ending removes its own key
                if time.time() - path.stat().st_mtime > LIFE:
                    path.unlink()
        checksum, _, text = (self.file.read_bytes() if self.file.exists() else b"").partition(b" ")
        # A damaged file counts as missing.
        stored = json.loads(text) if checksum.decode("latin-1") == hashlib.sha256(text).hexdigest() else {}
        return stored if stored.get("run") == run.hex() else {}

    def _keep(self, secrets: Mapping[str, Any]) -> None:
        private_folder(self.file.parent)
        text = json.dumps(dict(secrets)).encode()
        write_whole(self.file, lambda path: path.write_bytes(f"{hashlib.sha256(text).hexdigest()} ".encode() + text))


def hello_of(run: bytes, name: str, like: bytes) -> bytes:
    """Return the hello of a site in a run, with the nonce and the public key that the hello ``like`` ends with."""
    return fields(MAGIC, b"hello", run, name.encode(), like[-68:-36], like[-SIZE:])
