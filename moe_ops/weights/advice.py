"""Errors whose advice is for who made a layer; a load into a model, which makes layers of its own,
gives other advice in its place.
"""

from __future__ import annotations

from typing import TypeVar

Wrong = TypeVar("Wrong", ValueError, TypeError)
_ADVICE = "_moe_ops_advice"


def advising(kind: type[Wrong], what: str, advice: str) -> Wrong:
    """An error that says what is wrong, and then what to do with the layer."""
    error = kind(f"{what}; {advice}")
    setattr(error, _ADVICE, advice)
    return error


def reworded(error: Exception, text: str) -> ValueError | TypeError:
    """An error of the same kind and advice with a longer text."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    made = kind(text)  # subclasses may want more than a message, as UnicodeDecodeError does
    setattr(made, _ADVICE, getattr(error, _ADVICE, ""))
    return made


def readvised(error: Exception, advice: str) -> Exception:
    """The error with other advice, if its own is for who made a layer."""
    own = getattr(error, _ADVICE, "")
    return reworded(error, str(error).replace(f"; {own}", f"; {advice}")) if own else error
