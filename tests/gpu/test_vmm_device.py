"""The real driver keeps the contract of vmm.h; and what its documentation leaves open."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.vmm_contract import Provider, VmmContract


class TestDevice(VmmContract):
    """With the fixture `vmm` of conftest.py."""


def test_one_unmap_over_several_mappings(vmm: Provider, record_property: Callable[[str, object], None]) -> None:
    """Documented as one whole mapping; NVIDIA's samples unmap several at once. Either way nothing is half done.

    Where it works, `unmap_ranges` may be set.
    """
    with vmm.reservation(3) as base, vmm.memory() as one, vmm.memory() as two, vmm.memory() as three:
        for i, handle in enumerate((one, two, three)):
            assert vmm.cuMemMap(base + i * vmm.page, vmm.page, 0, handle, 0) == 0
        result = vmm.cuMemUnmap(base, 3 * vmm.page)
        record_property("cuMemUnmap over three mappings", result)
        mapped = [vmm.is_mapped(base + i * vmm.page) for i in range(3)]
        assert mapped == [result != 0] * 3
        for i in range(3):
            if mapped[i]:
                assert vmm.cuMemUnmap(base + i * vmm.page, vmm.page) == 0
