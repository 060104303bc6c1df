"""Which strings can be sent as text, and templates that programs give.

Owns these checks. It imports nothing of the language.
"""


def check_unicode(text: str) -> None:
    """ValueError for half of a surrogate pair, which UTF-8 cannot express. Cost: a pass over text
    that is not ASCII."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"the text is not valid Unicode: it has half of a surrogate pair, {half!r}, at "
            f"character {error.start}; decode it with errors='replace'"
        ) from None


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def filled(template: str, **fields: str | int) -> str:
    """A template with its fields. ValueError for one that has others."""
    try:
        return template.format(**fields)
    except (LookupError, ValueError, AttributeError) as error:
        names = " and ".join(f"{{{name}}}" for name in fields)
        raise ValueError(
            f"{template!r} may have no field but {names}: write other braces twice"
        ) from error
