"""Tiles of a machine: which devices, by their coordinates, make up one model-parallel group.

A device's coordinates are (x, y, z, core) on a TPU and (process, index within the process) elsewhere. A tile, T5X's
*model parallel submesh*, gives a size for each coordinate; all devices of one tile form one row of the mesh.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from t5x_pjit_recipes.errors import MeshError, offenders

Coordinates = tuple[int, ...]
_SIDES = {4: ('x', 'y', 'z', 'core'), 2: ('process', 'local')}

# T5X's tiles: (number of model partitions) -> tile, as its tables have them for these kinds.
_V3_TILES = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}
_V4_TILES = {
    1: [(1, 1, 1, 1)],
    2: [(1, 2, 1, 1)],
    4: [(4, 1, 1, 1), (2, 2, 1, 1)],
    8: [(1, 1, 8, 1), (4, 2, 1, 1)],
    16: [(1, 1, 16, 1), (8, 2, 1, 1), (4, 4, 1, 1), (2, 2, 4, 1)],
}


def get_coords(device: Any) -> Coordinates:
    """Returns (x, y, z, core) of a TPU device, (process, index within the process) of any other."""
    if hasattr(device, 'coords'):
        return (*device.coords, device.core_on_chip)
    return (device.process_index, device.id % jax.local_device_count())


def bounds_from_last_device(last_device: Any) -> Coordinates:
    """Returns the machine's size along each coordinate, given the device at its far corner."""
    if hasattr(last_device, 'coords'):
        return tuple(c + 1 for c in get_coords(last_device))
    return (jax.process_count(), jax.local_device_count())


def coordinates(devices: Sequence[Any]) -> list[Coordinates]:
    """Returns each device's coordinates, those of non-TPU devices ranked within the devices given."""
    if hasattr(devices[0], 'coords'):
        return [get_coords(d) for d in devices]
    processes = sorted({d.process_index for d in devices})
    ids = {p: sorted(d.id for d in devices if d.process_index == p) for p in processes}
    return [(processes.index(d.process_index), ids[d.process_index].index(d.id)) for d in devices]


def bounds(coords: Sequence[Coordinates]) -> Coordinates:
    """Returns one more than the largest coordinate in each direction.

    >>> bounds([(0, 1), (3, 0)])
    (4, 2)
    """
    return tuple(int(b) + 1 for b in np.max(np.array(coords), axis=0))


def default_tile(device_kind: str, num_partitions: int, machine: Coordinates) -> Coordinates:
    """Chooses the tile for `num_partitions` on a TPU: T5X's where T5X has one that fits, else the most compact.

    Args:
      device_kind: as JAX spells it, such as 'TPU v4'.
      num_partitions: devices in a tile.
      machine: devices along x, y, z and core.

    Raises:
      MeshError: if no tile of that many devices divides the machine.

    >>> default_tile('TPU v4', 4, (4, 4, 4, 1)), default_tile('TPU v5 lite', 8, (8, 8, 1, 1))
    ((4, 1, 1, 1), (4, 2, 1, 1))
    """
    known: list[Coordinates] = []
    if device_kind in ('TPU v2', 'TPU v3') and num_partitions in _V3_TILES:
        known = [_V3_TILES[num_partitions]]
    elif device_kind in ('TPU v4', 'TPU v4 lite') and machine[3] == 1:
        known = _V4_TILES.get(num_partitions, [])
    fitting = [tile for tile in known if _fits(tile, machine)]
    return fitting[0] if fitting else _compact_tile(num_partitions, machine)


def _fits(tile: Coordinates, machine: Coordinates) -> bool:
    return all(m % t == 0 for t, m in zip(tile, machine, strict=True))


def _compact_tile(num_partitions: int, machine: Coordinates) -> Coordinates:
    """Fills the cores of a chip first, then takes the tile whose sides differ least."""
    tiles = [tile for tile in _tiles_of(num_partitions, machine) if _fits(tile, machine)]
    if not tiles:
        legal = sorted({math.prod(t) for t in _dividing_tiles(machine)})
        raise MeshError(
            f'Cannot place {num_partitions} model partitions on a machine of {machine} devices: no tile of '
            f'{num_partitions} divides it. Use one of {legal}.'
        )
    return min(tiles, key=lambda t: (-t[3], t[0] + t[1] + t[2], t[2], -t[0]))


def _tiles_of(size: int, machine: Coordinates) -> list[Coordinates]:
    return [tile for tile in _dividing_tiles(machine) if math.prod(tile) == size]


def _dividing_tiles(machine: Coordinates) -> list[Coordinates]:
    sides = [[d for d in range(1, m + 1) if m % d == 0] for m in machine]
    return [tuple(int(s) for s in tile) for tile in np.stack(np.meshgrid(*sides), -1).reshape(-1, len(machine))]


def tile_grid(devices: Sequence[Any], tile: Sequence[int], host: Coordinates, *, by_host: bool = True) -> np.ndarray:
    """Arranges devices in rows, each row the devices of one tile.

    Args:
      devices: all devices of a machine without gaps, in any order.
      tile: devices of a tile along each coordinate.
      host: devices of one host along each coordinate; where possible a tile does not leave a host.
      by_host: whether to regard hosts at all.

    Returns:
      Array of devices, shape `(tiles, devices in a tile)`.

    Raises:
      MeshError: if the tile or the host does not divide the machine, or the machine has gaps.
    """
    coords = coordinates(devices)
    machine = bounds(coords)
    if len(tile) != len(machine):
        return _rows_in_order(devices, coords, tile)
    _check_divides(tile, machine, 'the tile')
    grid = _fill_grid(devices, coords, machine)
    swap = _ring_axes(tile, machine)
    if swap is not None:
        grid, tile = grid.swapaxes(*swap), _swapped(tile, swap)
    if swap is None and by_host:
        _check_divides(host, machine, 'a host')
        return _rows(grid, [_host_factors(*gml) for gml in zip(grid.shape, tile, host, strict=True)], tile)
    return _rows(grid, [(g // m, m) for g, m in zip(grid.shape, tile, strict=True)], tile)


def _rows_in_order(devices: Sequence[Any], coords: Sequence[Coordinates], tile: Sequence[int]) -> np.ndarray:
    """Makes rows of consecutive devices, for tiles that do not have the machine's number of coordinates."""
    size = math.prod(tile)
    if len(devices) % size:
        raise MeshError(
            f'Cannot lay tiles of {tuple(tile)} on {len(devices)} devices: {math.prod(tile)} devices a tile do not '
            f'divide {len(devices)}. Use a tile whose product is one of {divisors(len(devices))}.'
        )
    order = sorted(range(len(devices)), key=lambda i: coords[i])
    return _object_array([devices[i] for i in order]).reshape(-1, size)


def _check_divides(sizes: Sequence[int], machine: Coordinates, what: str) -> None:
    faults = [
        f'{name}: {m} devices, of which {what} takes {s}; use one of {divisors(m)}'
        for name, s, m in zip(_SIDES[len(machine)], sizes, machine, strict=True)
        if s < 1 or m % s
    ]
    if faults:
        raise MeshError(
            f'Cannot divide a machine of {machine} devices by {what} {tuple(sizes)}. '
            f'Change these sides:\n{offenders(faults)}'
        )


def _fill_grid(devices: Sequence[Any], coords: Sequence[Coordinates], machine: Coordinates) -> np.ndarray:
    grid = np.full(machine, None, dtype=object)
    for device, at in zip(devices, coords, strict=True):
        grid[at] = device
    gaps = [str(tuple(int(i) for i in at)) for at in np.argwhere(grid == None)]  # noqa: E711  (elementwise)
    if gaps:
        raise MeshError(
            f'Cannot tile {len(devices)} devices: their coordinates span {machine}, which holds {grid.size}, and these '
            f'are not among them. Give the devices of a whole box:\n{offenders(gaps)}'
        )
    return grid


def _ring_axes(tile: Sequence[int], machine: Coordinates) -> tuple[int, int] | None:
    """Names the two axes to swap where tiles are whole rings, so that rows follow each other along z first."""
    if len(machine) != 4 or tile[3] != machine[3]:
        return None
    (mx, my, mz, _), (gx, gy, gz, _) = tile, machine
    ring_x, ring_y, ring_z = mx == gx > 1, my == gy > 1, mz == gz > 1
    if (ring_x and my == mz == 1) or (mx == 1 and ring_y and ring_z):
        return (1, 2)
    if (ring_y and mx == mz == 1) or (my == 1 and ring_x and ring_z):
        return (0, 2)
    return None


def _swapped(tile: Sequence[int], axes: tuple[int, int]) -> tuple[int, ...]:
    order = list(range(len(tile)))
    order[axes[0]], order[axes[1]] = order[axes[1]], order[axes[0]]
    return tuple(tile[i] for i in order)


def _host_factors(g: int, m: int, h: int) -> tuple[int, int, int, int]:
    """Splits a side of g devices into (tiles across hosts, tiles within a host, hosts in a tile, devices in both)."""
    if m >= h and m % h == 0:
        return (g // m, 1, m // h, h)
    if m < h and h % m == 0:
        return (g // h, h // m, 1, m)
    raise MeshError(
        f'Cannot tile a side of {g} devices by {m}: tiles of {m} and hosts of {h} do not divide each other. '
        f'Use a divisor or a multiple of {h}.'
    )


def _rows(grid: np.ndarray, factors: Sequence[tuple[int, ...]], tile: Sequence[int]) -> np.ndarray:
    """Brings all first factors of the sides before all second ones and so on, then makes one row a tile."""
    width = len(factors[0])
    split = grid.reshape([f for side in factors for f in side])
    order = [side * width + level for level in range(width) for side in range(len(factors))]
    return split.transpose(order).reshape(-1, math.prod(tile))


def divisors(n: int) -> list[int]:
    """Lists the divisors of n in ascending order.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


def _object_array(items: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array
