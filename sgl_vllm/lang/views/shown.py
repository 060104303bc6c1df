"""What notebooks and rich show as a picture: states, and the branches of a fork."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sgl_vllm.lang.views.html import fragment_of

if TYPE_CHECKING:
    from sgl_vllm.lang.views.picture import Picture


class Shown(ABC):
    """Has a picture."""

    @abstractmethod
    def _picture(self) -> Picture: ...

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fragment_of(self._picture())

    def __rich__(self) -> object:
        """What rich prints."""
        from sgl_vllm.lang.views.terminal import TerminalView  # rich, which few programs use

        return TerminalView(self._picture())
