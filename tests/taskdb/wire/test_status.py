from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from taskdb import errors
from taskdb.wire import status


def classes(root: type[errors.TaskDBError] = errors.TaskDBError) -> Iterator[type[errors.TaskDBError]]:
    for cls in root.__subclasses__():
        if cls.__module__ == errors.__name__:
            yield cls
            yield from classes(cls)


class Failed(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: status.Metadata = ()):
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> status.Metadata:
        return self._parts[2]


@pytest.mark.parametrize("cls", list(classes()))
def test_an_error_comes_back_as_it_went(cls: type[errors.TaskDBError]) -> None:
    error = status.from_rpc_error(Failed(*status.to_status(cls("words"))))
    assert type(error) is cls
    assert (str(error), error.retryable) == ("words", cls.retryable)


def test_every_error_has_a_code_of_its_own_choice() -> None:
    internal = {cls for cls in classes() if status.to_status(cls(""))[0] is grpc.StatusCode.INTERNAL}
    assert internal == {errors.StoreError}


def test_the_transport_is_understood() -> None:
    error = status.from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "no route"), "host:1")
    assert isinstance(error, errors.Unavailable)
    assert str(error) == "host:1: no route"


def test_an_unknown_kind_is_still_an_error() -> None:
    assert type(status.from_kind("of_tomorrow", "words")) is errors.TaskDBError
