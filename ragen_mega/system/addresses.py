"""Addresses of servers in the settings of a run: credentials, and servers of this machine."""

import os
import re
import socket
from functools import cache
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

_ADDRESS = re.compile(r"(?:https?|wss?)://[^\s\"'<>\\]+", re.IGNORECASE)
_PASSWORD = re.compile(r"\w+://[^/:@]*:(?!\d+[?#])[^/]*@")
"""A name and a password, in which `?` or `#` may stand; a port before them is none."""
_SECRET = re.compile(
    r"^(code|sig|auth|jwt)$|(^|[-_]|api|access|subscription|secret)key$"
    r"|(^|[-_])(token|bearer|secret|pass|password|passwd|pwd|signature|authorization|credentials?)$"
    r"|(?-i:[a-z](Token|Secret|Password|Signature|Authorization))$",
    re.IGNORECASE,
)
"""Names of query parameters that hold credentials."""


def check_addresses(text: str) -> None:
    """Raise ValueError, which does not repeat them, if an address in `text` holds credentials."""
    for address in _ADDRESS.findall(text):
        place, *parameters = re.split("[?#]", address)  # urlsplit would repeat what it cannot read
        host = place.partition("://")[2].partition("/")[0]
        names = parse_qsl("&".join(parameters), keep_blank_values=True)
        has_password = "@" in host or _PASSWORD.match(address)
        if not has_password and not any(_SECRET.search(name) for name, _ in names):
            continue
        raise ValueError(
            "an address must hold no name, password or key, since config.json, the list of"
            " processes and reports would show it; give the value of the header Authorization,"
            " e.g. 'Bearer ...', in the environment variable RAGEN_JUDGE_AUTHORIZATION,"
            " RAGEN_AGENT_AUTHORIZATION, RAGEN_MCP_AUTHORIZATION or RAGEN_ENGINE_AUTHORIZATION"
        )


def credentials(variable: str) -> str:
    """Return the header Authorization from an environment variable; empty if there is none. Raises
    ValueError, which does not repeat the value, as libraries do, for one that no header can hold.
    """
    value = os.environ.get(variable, "").strip()  # a file's value ends with a line end
    if not (value.isascii() and value.isprintable()):
        raise ValueError(
            f"the environment variable {variable} must hold one line of printable ASCII characters,"
            " such as 'Bearer KEY', and holds others; export it anew"
        )
    return value


@cache
def is_local(url: str) -> bool:
    """Return whether a server is on this machine, where it must not be asked through a proxy."""
    import psutil

    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = {ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries}
    except (OSError, UnicodeError):  # a name that the proxy alone may know
        return False
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    addresses = {getattr(address, "ipv4_mapped", None) or address for address in found}
    return all(
        address.is_loopback or address.is_unspecified or str(address) in here
        for address in addresses
    )


def address_towards(host: str) -> str:
    """Return the address of this machine that connections to `host` come from. Raises OSError for a
    name that nobody knows.
    """
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def bypass_proxy(url: str) -> None:
    """Have libraries that read `no_proxy` ask a server of this machine without a proxy."""
    host = urlsplit(url).hostname
    others = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    known = [other.strip() for other in others.split(",")]
    if is_local(url) and not {host, "*"}.intersection(known):
        os.environ["no_proxy"] = f"{others},{host}".lstrip(",")
