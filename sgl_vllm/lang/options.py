"""The options of a run: as keywords, as type checkers see them, and as one value.

A ParamSpec takes no further keywords (PEP 612), so SGLang's way to pass options among a program's
arguments needs an overload per option, and its calls are not checked any further.
`ProgramWithOptions` keeps options and arguments apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Any: arguments of the user's function
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeAlias, overload

from typing_extensions import ParamSpec, TypeVar

from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling, SamplingDefaults, sampling_of

P = ParamSpec("P", default=...)
"""The parameters of a program without `s`."""

T_co = TypeVar("T_co", covariant=True, default=Any)
Texts: TypeAlias = str | Sequence[str] | None


class RunOptions(SamplingDefaults, total=False):
    """The keywords of `run`, `run_async` and `with_options`; see `run`."""

    stream: bool
    backend: Backend | BackendHandle | None
    use_thread: bool
    timeout_s: float | None


class BatchOptions(SamplingDefaults, total=False):
    """The keywords of `run_batch` and `run_batch_async`; see `run_batch`."""

    backend: Backend | BackendHandle | None
    num_threads: int | Literal["auto"]
    progress_bar: bool
    return_errors: bool
    timeout_s: float | None


@dataclass(frozen=True)
class Options:
    """The options of a run or of a batch as one value, with their defaults."""

    sampling: Sampling = DEFAULT_SAMPLING
    backend: Backend | BackendHandle | None = None
    timeout_s: float | None = None
    stream: bool = False
    use_thread: bool = True
    num_threads: int | Literal["auto"] = "auto"
    progress_bar: bool = False
    return_errors: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Those given by keyword, over the default sampling options."""
        names = SamplingDefaults.__annotations__
        sampling = sampling_of({name: given[name] for name in given if name in names})
        others = {name: given[name] for name in given if name not in names}
        return cls(sampling.over(DEFAULT_SAMPLING), **others)


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
