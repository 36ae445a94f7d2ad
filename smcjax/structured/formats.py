"""Formats of strings, as JSON schemas name them, as regular expressions: each text is of the format, not each is said.

Days are those that the calendar has, of the years 0001 to 9999. Hosts have at most four labels of 16 letters and
digits, and no hyphen beside another; names of mailboxes have at most three parts of 16 characters between dots.
"""

from __future__ import annotations


def _day() -> str:
    days = "(01|03|05|07|08|10|12)-(0[1-9]|[12][0-9]|3[01])|(04|06|09|11)-(0[1-9]|[12][0-9]|30)"
    year = "[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9]"
    by_four = "0[48]|[2468][048]|[13579][26]"
    leap = f"[0-9]{{2}}({by_four})|({by_four})00"
    return f"(({year})-({days}|02-(0[1-9]|1[0-9]|2[0-8]))|({leap})-02-29)"


def _ipv6() -> str:
    """RFC 4291, without an IPv4 address at its end."""
    word = "[0-9A-Fa-f]{1,4}"
    some = [f"({word}:){{7}}{word}", f"({word}:){{1,7}}:", "::"]
    some += [f"({word}:){{1,{left}}}(:{word}){{1,{7 - left}}}" for left in range(1, 7)]
    return "|".join([*some, f":(:{word}){{1,7}}"])


def _uri(scheme: str) -> str:
    """RFC 3986."""
    plain = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
    character = f"({plain}|[:@])"
    rootless = f"({f'{character}+' if scheme else f'({plain}|@)+'}(/{character}*)*)?"
    path = f"(//(({plain}|:)*@)?({plain})*(:[0-9]*)?(/{character}*)*|/({character}+(/{character}*)*)?|{rootless})"
    return rf"{scheme}{path}(\?({character}|[/?])*)?(#({character}|[/?])*)?"


_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,15}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_WORD = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,16}"
_SPAN = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)"
_URI = _uri("[A-Za-z][A-Za-z0-9+.-]*:")
FORMATS = {
    "date": _day(),
    "time": _TIME,
    "date-time": f"{_day()}T{_TIME}",
    "duration": f"P({_DAYS}(T{_SPAN})?|T{_SPAN}|[0-9]+W)",
    "email": rf"{_WORD}(\.{_WORD}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": _ipv6(),
    "uri": _URI,
    "uri-reference": f"{_URI}|{_uri('')}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "json-pointer": "(/([^~/]|~[01])*)*",
}
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"], "url": _URI, "iri": _URI}
FORMATS["iri-reference"] = FORMATS["uri-reference"]
FREE = {"password", "binary"}  # which say how a text is shown or meant, not what it is
WHOLE = {  # formats of whole numbers, with bounds
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
REAL = {"float", "double"}
