"""The patterns of `format`: which formats are compiled here, and what they match."""

from __future__ import annotations

from functools import lru_cache

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.regex import of_pattern

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

_LETTER = "[A-Za-z0-9]"


def _label(longest: int) -> str:
    return f"(?:{_LETTER}(?:[A-Za-z0-9-]{{0,{longest - 2}}}{_LETTER})?)"


_LABEL = _label(63)
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_HOSTNAME = "|".join(
    [
        rf"(?:{_LABEL}\.){{0,3}}{_label(61)}",
        rf"(?:{_label(31)}\.){{0,2}}{_LABEL}(?:\.{_label(31)}){{0,3}}",
        rf"{_LABEL}(?:\.{_label(31)}){{0,5}}",
        rf"(?:{_label(15)}\.){{0,14}}{_label(15)}",
    ]
)
"""Hostnames, so few or short labels that together they are of 253 characters at most."""

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ENCODED = f"%{_HEX}{{2}}"
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


_UCS = (
    r"\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join([rf"\U{plane:04x}0000-\U{plane:04x}fffd" for plane in range(1, 14)])
    + r"\U000e1000-\U000efffd"
)
"""`ucschar` of RFC 3987."""

_PRIVATE = r"\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"


def _references(more: str = "", private: str = "") -> tuple[str, str]:
    """URIs and URI references of RFC 3986, with more characters: IRIs of RFC 3987."""
    unreserved = f"A-Za-z0-9._~!$&'()*+,;={more}-"
    name = f"(?:[{unreserved}]|{_ENCODED})"
    char = f"(?:[:@{unreserved}]|{_ENCODED})"
    no_colon = f"(?:[@{unreserved}]|{_ENCODED})"
    future = rf"[vV]{_HEX}+\.[:{unreserved}]+"
    host = rf"(?:\[(?:{_IPV6}|{future})\]|{name}*)"
    authority = rf"//(?:(?:{name}|:)*@)?{host}(?::[0-9]*)?(?:/{char}*)*"
    absolute = f"/(?:{char}+(?:/{char}*)*)?"
    rootless = f"{char}+(?:/{char}*)*"
    relative = f"{no_colon}+(?:/{char}*)*"
    query = rf"(?:\?(?:[/?:@{private}{unreserved}]|{_ENCODED})*)?"
    end = f"{query}(?:#(?:{char}|[/?])*)?"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{absolute}|{rootless}|){end}"
    return uri, f"(?:{uri}|(?:{authority}|{absolute}|{relative}|){end})"


_URI, _URI_REFERENCE = _references()
_IRI, _IRI_REFERENCE = _references(_UCS, _PRIVATE)

_POINTED = r'(?:[^"\\/~\x00-\x1f]|\\["\\bfnrt]|\\u00[01][0-9a-fA-F])'
_POINTER = f"(?:/(?:{_POINTED}|~[01])*)*"

_VARIABLE = rf"(?:[A-Za-z0-9_]|{_ENCODED})(?:\.?(?:[A-Za-z0-9_]|{_ENCODED}))*"
_VARIABLE_SPEC = rf"{_VARIABLE}(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_ENCODED}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE_SPEC}(?:,{_VARIABLE_SPEC})*\}})*"
)

_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT ]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOSTNAME,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "uri-template": _TEMPLATE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""RFC 3339, 4122, 2673, 4291, 1123, 3986, 3987, 5321, 6570 and 6901, as written in JSON. Some valid
texts are refused: leap seconds that are not in UTC, hostnames of many long labels, quoted names in
`email`."""

_WITHOUT = {
    "hostname": r'(?:[^"]*\.)?[^".]{2}--[^"]*',
    "email": r'[^"@]*@(?:[^"]*\.)?[^".]{2}--[^"]*',
}
"""Of labels with `--` at this place, only those that are valid in IDNA are labels."""

EXACT_FORMATS = frozenset(
    {
        *("date", "duration", "uuid", "ipv4", "ipv6", "uri", "uri-reference"),
        *("json-pointer", "relative-json-pointer"),
    }
)
"""Formats whose every text is matched, so that all other texts are known to be of another."""

UNSUPPORTED_FORMATS = frozenset({"idn-email", "idn-hostname", "regex", "unknown"})
"""Formats that other backends check. Any other name is no constraint."""


@lru_cache(maxsize=64)
def format_dfa(form: str) -> ByteDfa:
    """The automaton of the JSON strings of a format, quotes included."""
    dfa = of_pattern(f'"(?:{FORMATS[form]})"')
    if form in _WITHOUT:
        dfa = combined(dfa, of_pattern(f'"(?:{_WITHOUT[form]})"'), minus=True)
    return dfa


def compile_formats() -> None:
    """Compile all formats, so that no schema waits for one. Takes about 50 ms the first time."""
    for form in FORMATS:
        format_dfa(form)
