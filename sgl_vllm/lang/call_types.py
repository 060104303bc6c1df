"""How type checkers see the calls of a program: with its own parameters, or options among them.

Owns types alone: nothing here does anything in a run. A ParamSpec takes no further keywords
(PEP 612), so SGLang's way to pass options needs an overload per option, and its calls are not
checked any further. `ProgramWithOptions` keeps options and arguments apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Any: arguments of the user's function
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, overload

from typing_extensions import ParamSpec, TypeVar

from sgl_vllm.lang.backends.base import Backend

P = ParamSpec("P", default=...)
"""The parameters of a program without `s`."""

T_co = TypeVar("T_co", covariant=True, default=Any)
Texts: TypeAlias = str | Sequence[str] | None


class Takes(Generic[P]):
    """What is called with the parameters `P`."""


class Call(Protocol[P, T_co]):
    """`run` and `run_async`: the program's arguments, which are checked unless there are options
    of `run` among them."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, *args: Any, temperature: float, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, max_new_tokens: int, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, stop: Texts, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, stop_token_ids: Sequence[int] | None, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, stop_regex: Texts, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, top_p: float, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, top_k: int, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, min_p: float, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, frequency_penalty: float, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, presence_penalty: float, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, ignore_eos: bool, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, return_logprob: bool, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, logprob_start_len: int, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, top_logprobs_num: int, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, return_text_in_logprobs: bool, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, stream: bool, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, backend: Backend | None, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, use_thread: bool, **_more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, timeout_s: float | None, **_more: Any) -> T_co: ...


if TYPE_CHECKING:

    class called_with_options(Generic[T_co]):
        """Makes a method of a program a `Call`."""

        def __init__(self, method: Callable[..., T_co]) -> None: ...
        def __get__(self, program: Takes[P], owner: object) -> Call[P, T_co]: ...

else:

    def called_with_options(method):
        return method
