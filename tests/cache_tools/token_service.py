"""A service that gives tokens for a registry, as the large registries have one: a login for a short-lived token."""

import base64
import contextlib
import datetime
import http.server
import json
import time
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from real_registry import PASSWORD, USER
from ship_samples import served


@contextlib.contextmanager
def by_token(folder):
    """Who may enter a registry: those who have a token of a service that runs meanwhile."""
    folder.mkdir()
    key, certificate = _signer()
    (folder / "root.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    with served(_handler(key, certificate)) as address:
        of_token = f"realm: {address}/token, service: tests, issuer: tests, rootcertbundle: {folder}/root.pem"
        yield f"auth: {{token: {{{of_token}}}}}\n"


def _handler(key, certificate):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {login}":
                self.send_response(401)
                self.end_headers()
                return
            asked = parse_qs(urlsplit(self.path).query)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"token": _token(key, certificate, asked.get("scope", []))}).encode())

        def log_message(self, *_):
            pass

    return Handler


def _signer():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    return key, builder.sign(key, hashes.SHA256())


def _token(key, certificate, scopes):
    """A JSON web token that grants what was asked for."""
    kinds = [scope.split(":") for scope in scopes]
    access = [{"type": kind, "name": name, "actions": actions.split(",")} for kind, name, actions in kinds]
    now = int(time.time())
    header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()]}
    claims = {"iss": "tests", "aud": "tests", "sub": USER, "iat": now, "nbf": now - 60, "exp": now + 300, "jti": "1"}
    text = f"{_part(header)}.{_part(claims | {'access': access})}"
    return f"{text}.{_base64(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _part(document):
    return _base64(json.dumps(document).encode())


def _base64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
