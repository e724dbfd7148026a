"""What went wrong with the model hub, in words and with the fix. hub.py asks the questions.

The hub's library raises errors of its HTTP library, whose module name changes between its
versions; so they are told apart by class name, and only by what has been stable.
"""

# pyright: strict

import errno
import json
import ssl
from collections.abc import Iterator

HUB = "https://huggingface.co"
OFFLINE = "OfflineModeIsEnabled"
NETWORK = {"NetworkError", "ConnectionError", "RemoteProtocolError", "ProxyError"}
NO_ANSWER = (408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529)


class HubError(ValueError):
    """The hub, or the way to it, said no; the message has the fix.

    `unreachable` is true where the hub gave no answer about the repository itself (no network,
    offline mode, its own trouble), so that a cached copy may stand in.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, where there was an answer at all."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def retry_after(error: BaseException) -> int | None:
    """The seconds that the hub asks to wait, where it does."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    value = str(headers.get("Retry-After", ""))
    return int(value) if value.isascii() and value.isdigit() else None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later: a cut line, a busy server."""
    status = status_of(error)
    if status is not None:
        return status in NO_ANSWER
    names = _names(error)
    cut = bool(names & (NETWORK | {"TimeoutException"})) and OFFLINE not in names
    return cut and not _insecure(error)


def in_words(
    error: BaseException,
    *,
    repo: str,
    revision: str | None = None,
    endpoint: str = HUB,
    has_token: bool = False,
) -> HubError:
    """A HubError that says what `error` means for this repository and what to do about it."""
    cause = _root(error)
    names, status = _names(cause), status_of(cause)
    if "RevisionNotFoundError" in names:
        return HubError(f"{repo} has no revision {revision!r}: give a branch, a tag or a commit")
    if "GatedRepoError" in names:
        then = (
            "the account of your token has not been let in yet"
            if has_token
            else "then log in with `hf auth login`, or set HF_TOKEN"
        )
        return HubError(f"{repo} is gated: accept its terms at {endpoint}/{repo}; {then}")
    if "DisabledRepoError" in names:
        return HubError(f"{repo} has been disabled at {endpoint} by its owner or by the hub")
    if "RemoteEntryNotFoundError" in names:
        return HubError(f"{repo} lacks a file that its own list names; the list may be stale")
    if status is not None:
        return _status_in_words(status, cause, repo, endpoint, has_token)
    if OFFLINE in names:
        return HubError(
            f"{repo} cannot be asked for: offline mode is on (HF_HUB_OFFLINE)", unreachable=True
        )
    return _line_in_words(cause, repo, endpoint, names)


def _status_in_words(
    status: int, error: BaseException, repo: str, endpoint: str, has_token: bool
) -> HubError:
    where = f"{endpoint} answers {status} for {repo}"
    if status == 401 and has_token:
        return HubError(
            f"{where}: it refuses the token, which is wrong or has expired; make a new one at "
            f"{endpoint}/settings/tokens, then `hf auth login` or set HF_TOKEN, or unset it"
        )
    if status in (401, 404):
        token = (
            "a private one looks the same to a token that may not read it"
            if has_token
            else "a private one looks the same without a token (`hf auth login`, or HF_TOKEN)"
        )
        return HubError(f"no model {repo} at {endpoint} ({status}): check the spelling; {token}")
    if status == 403:
        return HubError(f"{where}: access denied; the token, if any, may not read this repository")
    if status == 429:
        wait = retry_after(error)
        when = f"in {wait} seconds" if wait else "in some minutes"
        login = "" if has_token else "; logged in (`hf auth login`) the limit is higher"
        return HubError(f"{where}: too many requests; try again {when}{login}", unreachable=True)
    if status in NO_ANSWER or status >= 500:
        return HubError(f"{where}: the trouble is on its side; try again later", unreachable=True)
    return HubError(f"{where}: {_first_line(error)}")


def _line_in_words(error: BaseException, repo: str, endpoint: str, names: set[str]) -> HubError:
    mirror = "" if endpoint == HUB else " (the mirror that HF_ENDPOINT names)"
    place, reason = f"{endpoint}{mirror}", _first_line(error)
    if _certificate(error):
        return HubError(
            f"the certificate of {place} is not trusted: {reason}. Add the certificate of your "
            "company or mirror to the system's store, or name its file in SSL_CERT_FILE",
            unreachable=True,
        )
    if _insecure(error):
        return HubError(
            f"no secure connection to {place}: {reason}; check HF_ENDPOINT and HTTPS_PROXY",
            unreachable=True,
        )
    if "ProxyError" in names:
        return HubError(
            f"the proxy on the way to {place} says: {reason}; check HTTPS_PROXY", unreachable=True
        )
    if "TimeoutException" in names or "TimeoutError" in names:
        return HubError(
            f"{place} did not answer in time for {repo}; try again, or raise HF_HUB_ETAG_TIMEOUT "
            "and HF_HUB_DOWNLOAD_TIMEOUT (seconds)",
            unreachable=True,
        )
    if names & NETWORK:
        fix = (
            "check the network and HTTPS_PROXY"
            if endpoint == HUB
            else "check HF_ENDPOINT, or unset it"
        )
        return HubError(f"cannot reach {place} for {repo}: {reason}; {fix}", unreachable=True)
    if names & {"UnsupportedProtocol", "InvalidURL"}:
        return HubError(f"HF_ENDPOINT = {endpoint!r} is no address; it starts with https://")
    if names & {"LocalProtocolError", "UnicodeEncodeError"}:
        return HubError(
            "the request cannot be sent; HF_TOKEN, if set, has a character that no token has "
            "(a line break, a quote): set it again"
        )
    if isinstance(error, OSError) and error.errno is not None:
        full = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return HubError(f"{error.filename or repo}: {error.strerror}{full}")
    if isinstance(error, json.JSONDecodeError) or names & {"FileMetadataError", "DecodingError"}:
        return HubError(
            f"{place} does not answer like a model hub; check HF_ENDPOINT, or whether a login "
            "page of the network stands before it",
            unreachable=True,
        )
    return HubError(f"{place} could not serve {repo}: {reason}")


def _names(error: BaseException) -> set[str]:
    """The class names of an error and of what it derives from."""
    return {kind.__name__ for kind in type(error).__mro__}


def _root(error: BaseException) -> BaseException:
    """The library wraps what it could not make up for by its cache; the cause tells more."""
    while "LocalEntryNotFoundError" in _names(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _certificate(error: BaseException) -> bool:
    return any("CERTIFICATE_VERIFY_FAILED" in str(step) for step in _chain(error))


def _insecure(error: BaseException) -> bool:
    return any(isinstance(step, ssl.SSLError) for step in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    step: BaseException | None = error
    while step is not None:
        yield step
        step = step.__cause__ or step.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
