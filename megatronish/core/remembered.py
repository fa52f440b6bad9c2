"""Methods whose results are kept with their object: computed once for the same arguments."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class remembered(Generic[Owner, Arguments, Result]):  # noqa: N801 - a decorator, as `cached_property` is one
    """Decorator of a method: its results are kept as long as its object. Arguments must be hashable.

    `functools.cache` on a method would keep every object, too. The first access puts a cache of the object's own in its
    place, so that later calls cost no more than a look into a dict. Object and cache refer to each other, so that the
    garbage collector frees them, and there should be few: a search with a cache in each of its 20,000 short-lived
    objects took a fifth longer. `dataclasses.replace` makes an object with caches of its own; `copy.copy` would share
    those of the first one.
    """

    def __init__(self, method: Callable[Concatenate[Owner, Arguments], Result]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Owner, owner: Any = None) -> Callable[Arguments, Result]:
        kept = cast("Callable[Arguments, Result]", cache(partial(self._method, instance)))
        vars(instance)[self._name] = kept
        return kept
