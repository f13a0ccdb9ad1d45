"""Arguments of the driver's calls, as ctypes takes them; every call returns a CUresult, an int."""

from __future__ import annotations

import ctypes
from typing import Any

_size, _u64, _uint, _pointer = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p

# Structures are plain addresses: c_char_p would end them at the first zero.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAddressReserve": (ctypes.POINTER(_u64), _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemCreate": (ctypes.POINTER(_u64), _size, _pointer, _u64),
    "cuMemRelease": (_u64,),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemUnmap": (_u64, _size),
    "cuMemSetAccess": (_u64, _size, _pointer, _size),
    "cuMemGetAccess": (ctypes.POINTER(_u64), _pointer, _u64),
    "cuMemRetainAllocationHandle": (ctypes.POINTER(_u64), _u64),
    "cuMemExportToShareableHandle": (_pointer, _u64, _uint, _u64),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_u64), _pointer, _uint),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _size, _pointer),
    "cuEventCreate": (ctypes.POINTER(_pointer), _uint),
    "cuEventDestroy": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventSynchronize": (_pointer,),
    "cuCtxSynchronize": (),
    "cuStreamIsCapturing": (_pointer, ctypes.POINTER(_uint)),
    "cuCtxSetCurrent": (_pointer,),
    "cuCtxGetCurrent": (ctypes.POINTER(_pointer),),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_uint),),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
