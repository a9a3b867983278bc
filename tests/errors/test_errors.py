import copy
import pickle
from collections.abc import Iterator

import pytest

from etude.errors import (
    AgentError,
    ConfigError,
    EtudeError,
    InfrastructureError,
    PrefixMissError,
    SamplerError,
    UserError,
)


def subclasses(kind: type[EtudeError]) -> Iterator[type[EtudeError]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from subclasses(inner)


OURS = [kind for kind in subclasses(EtudeError) if kind.__module__ == "etude.errors"]


@pytest.mark.parametrize("kind", OURS)
def test_errors_keep_their_fields_across_processes(kind: type[EtudeError]) -> None:
    error = kind("is wrong", field="a.b", received=[1, 2], fix="mend it")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.message, again.field, again.received, again.fix) == (
            "is wrong",
            "a.b",
            [1, 2],
            "mend it",
        )
        assert str(again) == str(error)


def test_an_error_says_what_where_and_how_to_mend_it() -> None:
    error = ConfigError("must be >= 0", field="seed", received=-1, fix="use 0")
    assert str(error) == "seed: must be >= 0; received -1; fix: use 0"
    assert str(EtudeError("plain")) == "plain"


def test_every_error_is_public_and_of_exactly_one_kind() -> None:
    assert len(OURS) > 15
    for kind in OURS:
        assert not kind.__name__.startswith("_")
        if kind is not EtudeError:
            assert (
                sum(issubclass(kind, family) for family in (UserError, AgentError, InfrastructureError)) == 1
            )


def test_a_prefix_miss_is_a_failure_of_the_sampler() -> None:
    assert issubclass(PrefixMissError, SamplerError)
