"""Pages as another process would get them from CUDA."""

from __future__ import annotations

import os

from vattn import drivers
from vattn.drivers import cuda


def export(address: int) -> None:
    """Exports the page at an address as a file descriptor, as a library does that gets a tensor; closes it.

    Raises:
        DriverError: the page cannot be exported.
    """
    from cuda.bindings import driver as bindings

    device = drivers.find("cuda")
    assert isinstance(device, cuda.CudaDevice)
    with device._current():
        handle = cuda.call(bindings.cuMemRetainAllocationHandle, address)
        try:
            kind = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            os.close(int(cuda.call(bindings.cuMemExportToShareableHandle, handle, kind, 0)))
        finally:
            cuda.call(bindings.cuMemRelease, handle)
