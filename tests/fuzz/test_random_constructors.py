"""Random calls of each constructor and check: right, or refused by an argument's name."""

import pytest

from tests.chosen import those_of
from tests.fuzz import constructors, loading, sharing
from tests.fuzz.attempts import check_many

PLACES = {name: place for place in (constructors, sharing, loading) for name in place.TARGETS}


@pytest.mark.parametrize("calls", those_of([150], [150, 300]))
@pytest.mark.parametrize("name", PLACES)
def test_what_is_made_is_right_or_refused_by_name(name: str, calls: int) -> None:
    check_many(lambda number: PLACES[name].attempt(name, number), least=0.05, calls=calls)


def test_a_number_names_one_attempt() -> None:
    first, again = (str(constructors.attempt("place", 7)) for _ in range(2))
    assert first == again != str(constructors.attempt("place", 8))
