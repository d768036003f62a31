"""Secrets in text: found where they are refused, and masked wherever text is written.

`find` is for what a person hands over (URLs in settings and on the command line), `mask` for errors, tracebacks and
records, which may repeat what a library was told.
"""

from __future__ import annotations

import os
import re

from storage.errors import StorageError

MASK = "***"
_USER_IN_URL = re.compile(
    r"(?<=://)(?!anonymous@)"  # which stores take as no user at all
    r"(?:[^\s/@'\"\\?#]+@"  # user, or user:password
    r"|[^\s/@:'\"\\?#]+:(?!\d+(?:[/?#\s'\"]|$))[^\s@'\"\\]+@)"  # user:password with a slash in it; not host:port/...@
)
_IN_QUERY = re.compile(
    r"(?<=[?&;])((?:[\w.-]*(?:secret|token|passw|signature|credential|api[_-]?key|access[_-]?key)[\w.-]*|sig|key)=)"
    r"[^\s&;#'\"\\]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|wandb_v1_\w{20,}|sk-[A-Za-z0-9_-]{32,})"
)
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASS|PASSWD|PASSWORD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)(?:_|$)"
)
_SHORTEST = 12  # characters of a variable's value that is masked: a shorter one may be a common word


def find(text: str) -> str | None:
    """What secret stands in a text (a URL's user, a parameter, a token by its form); None if none is seen."""
    if _USER_IN_URL.search(text):
        return "a user name or password in a URL"
    if found := _IN_QUERY.search(text):
        return f"the URL's parameter {found[1].rstrip('=')}"
    return "an access token" if _TOKEN.search(text) else None


def cure(text: str) -> str:
    """The variables from which the library behind a URL reads what must not stand in it."""
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    return {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file",
        "gcs": "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file",
    }.get(scheme, "set HF_TOKEN for a hub, HTTPS_PROXY for a proxy, or the variable that the service's client reads")


def refuse(text: str, what: str) -> None:
    """Raises StorageError for a text with a secret in it; the message says `what` it is, without the secret."""
    if (found := find(text)) is not None:
        raise StorageError(
            f"{what} {mask(text)!r} holds {found}, which would be kept in records, logs and messages: take it out, "
            f"and {cure(text)}"
        )


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret, and not the path of one or a public setting."""
    return _SECRET_NAME.search(name.upper()) is not None and not name.upper().endswith(("_PATH", "_FILE", "_MODE"))


def mask(text: str) -> str:
    """The text without secrets: those that `find` sees, and the values of this process's own secret variables."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and is_secret_name(name) and value[0] != "/":
            text = text.replace(value, MASK)
    text = _USER_IN_URL.sub(f"{MASK}@", text)
    return _TOKEN.sub(MASK, _IN_QUERY.sub(rf"\g<1>{MASK}", text))
