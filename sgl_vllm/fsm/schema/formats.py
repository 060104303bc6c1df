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
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
"""A leap second is the last one of a day in UTC, and is only written in UTC."""

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_REG_NAME = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}})"
_PATH_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_PIECE = f"{_HEX}{{1,4}}"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LAST_32_BITS = f"(?:{_PIECE}:{_PIECE}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_PIECE}:){{6}}{_LAST_32_BITS}",
        *(
            f"{'' if before == 0 else f'(?:(?:{_PIECE}:){{0,{before - 1}}}{_PIECE})?'}::{after}"
            for before, after in enumerate(
                (
                    *(f"(?:{_PIECE}:){{{count}}}{_LAST_32_BITS}" for count in (5, 4, 3, 2, 1)),
                    _LAST_32_BITS,
                    _PIECE,
                    "",
                )
            )
        ),
    ]
)
"""`IPv6address` of RFC 3986: `::` stands once, for any number of zeros, and then fewer pieces may
stand before it the more stand behind."""

_AUTHORITY = (
    rf"(?:(?:{_REG_NAME}|:)*@)?(?:\[(?:{_IPV6})\]|{_REG_NAME}*)(?::[0-9]*)?(?:/{_PATH_CHAR}*)*"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT ]{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOST,
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}|/?(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?)"
        rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
    ),
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
}
"""RFC 3339, 4122, 2673, 4291, 1123, 3986 and 5321, in the syntax of Rust's regex. None of their
characters needs an escape in JSON. Not checked: that a hostname is of 253 characters at most, that
its labels which begin with `xn--` are valid in IDNA, and `IPvFuture` in a URI, which is refused."""

UNSUPPORTED_FORMATS = frozenset(
    {
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
