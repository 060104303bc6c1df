"""How the plugin changes vLLM: `adopt` a live object, `wrap` a function, `add_method` to a class.

Owns these mechanisms, and not what they are used for. No other module changes the class of an
object, or what a class, a module or an object of vLLM's does when it is called
(tests/unit/test_architecture.py). Setting an attribute that holds state, or a part such as the
waiting queue, is no patch: the stubs declare it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar  # Any: whatever is wrapped

Subclass = TypeVar("Subclass")
Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

_WRAPPED_BY = "_sgl_vllm_wrapped_by"


def adopt(instance: object, subclass: type[Subclass]) -> Subclass:
    """Make a live object an instance of a subclass of its class, in place.

    Every reference to the object that vLLM has handed out stays valid. The subclass's `__init__`
    does not run: the caller sets the attributes that it adds.

    Returns:
        The same object, typed as the subclass.

    Raises:
        TypeError: `subclass` does not derive from the object's class, so its methods would be lost.
    """
    if not issubclass(subclass, type(instance)):
        raise TypeError(
            f"cannot turn {type(instance).__qualname__} into {subclass.__qualname__}, "
            "which does not derive from it"
        )
    instance.__class__ = subclass
    assert isinstance(instance, subclass)
    return instance


def wrap(owner: Any, name: str) -> Callable[[Wrapper], Wrapper]:
    """Replace `owner.name` with a function that gets the original as its first argument.

        @wrap(EngineArgs, "add_cli_args")
        def with_our_options(original, parser):
            return extended(original(parser))

    The wrapper sees the arguments as the original would: after `original` comes `self` for a method
    of a class, `cls` for a class method, and neither for a static method or a live object's method.
    Wrapping the same function twice with the same wrapper changes nothing.

    Args:
        owner: a class, or a live object, of which only this instance is changed.
        name: the attribute to replace.

    Raises:
        AttributeError: `owner` has no such attribute.
    """

    def decorate(wrapper: Wrapper) -> Wrapper:
        original = inspect.getattr_static(owner, name)
        by = f"{wrapper.__module__}.{wrapper.__qualname__}"
        kind = type(original) if isinstance(original, staticmethod | classmethod) else None
        is_class = isinstance(owner, type)
        function = original.__func__ if kind else original if is_class else getattr(owner, name)
        if by in getattr(function, _WRAPPED_BY, ()):
            return wrapper

        # Only what does not await by itself is wrapped here: for a coroutine function, the wrapper
        # returns the coroutine, so that `await` works as before.
        @functools.wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(function, *args, **kwargs)

        setattr(replacement, _WRAPPED_BY, (*getattr(function, _WRAPPED_BY, ()), by))
        setattr(owner, name, kind(replacement) if kind and is_class else replacement)
        return wrapper

    return decorate


def add_method(owner: type, name: str, function: Callable[..., object]) -> None:
    """Give a class a method that it does not have. Adding the same function twice changes nothing.

    Raises:
        AttributeError: the class has another attribute of this name.
    """
    if getattr(owner, name, function) is not function:
        raise AttributeError(f"{owner.__qualname__} already has {name}")
    setattr(owner, name, function)
