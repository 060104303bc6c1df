"""The patterns of `format`: which formats are compiled here, and what they match."""

from __future__ import annotations

_HEX = "[0-9a-fA-F]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_REG_NAME = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}})"
_PATH_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_AUTHORITY = (
    rf"(?:(?:{_REG_NAME}|:)*@)?(?:\[[0-9a-fA-F:.]+\]|{_REG_NAME}*)(?::[0-9]*)?(?:/{_PATH_CHAR}*)*"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT ]{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": _HOST,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}|/?(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?)"
        rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
    ),
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
}
"""RFC 3339, 4122, 2673, 1123, 3986 and 5321, in the syntax of Rust's regex. None of their
characters needs an escape in JSON."""

UNSUPPORTED_FORMATS = frozenset(
    {
        "ipv6",
        "uri-reference",
        "uri-template",
        "iri",
        "iri-reference",
        "duration",
        "json-pointer",
        "relative-json-pointer",
        "idn-email",
        "idn-hostname",
        "regex",
        "unknown",
    }
)
"""Formats that other backends check. Any other name is no constraint."""
