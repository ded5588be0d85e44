"""Plain objects that look like devices, for what decides by coordinates alone."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class FakeTpu:
    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = 'tpu'


@dataclasses.dataclass(frozen=True)
class FakeGpu:
    id: int
    process_index: int
    device_kind: str = 'A100'
    platform: str = 'gpu'


def tpus(x, y, z, cores=1, kind='TPU v4', host=(2, 2, 1)):
    """A slice in which the core counts fastest, then x, y and z; hosts own boxes of chips."""
    hosts = (x // host[0], y // host[1])
    return [
        FakeTpu(
            id=core + cores * (i + x * (j + y * k)),
            process_index=i // host[0] + hosts[0] * (j // host[1] + hosts[1] * (k // host[2])),
            coords=(i, j, k),
            core_on_chip=core,
            device_kind=kind,
        )
        for k, j, i, core in itertools.product(range(z), range(y), range(x), range(cores))
    ]


def gpus(hosts, per_host):
    return [FakeGpu(id=h * per_host + i, process_index=h) for h in range(hosts) for i in range(per_host)]


def ids(mesh):
    return [[d.id for d in row] for row in mesh.devices]
