"""Methods of `torch.UntypedStorage` that a build of torch for the CPU compiles without their branch for CUDA."""

from __future__ import annotations

from typing import Any

import torch

from .. import _device


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def install() -> None:
    storage_class = torch.UntypedStorage
    new, resize, copy = storage_class.__new__, storage_class.resize_, storage_class.copy_

    def make(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        device = torch.device(device) if device is not None else None
        if device is None or device.type != "cuda":
            return new(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        contents = args[0] if args else 0
        if isinstance(contents, int):
            return torch.empty(contents, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(contents), dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _device.resize_storage(_bytes_of(self), size)
        return self

    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        if self.device.type != "cuda" and source.device.type != "cuda":
            return copy(self, source, non_blocking)
        _bytes_of(self).copy_(_bytes_of(source))
        return self

    def share(self: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "simulated device: processes cannot share memory of a device (CUDA IPC). Send the tensor as .cpu()."
        )

    storage_class.__new__ = staticmethod(make)  # type: ignore[method-assign]
    storage_class.resize_ = resize_  # type: ignore[method-assign]
    storage_class.copy_ = copy_  # type: ignore[method-assign]
    storage_class._share_cuda_ = share  # type: ignore[method-assign]
