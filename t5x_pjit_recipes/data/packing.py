"""Rows of fixed length out of examples of any length: several examples packed into one, or one padded."""

from collections.abc import Mapping

import grain
import numpy as np

# Rows that are filled side by side. More of them leave less padding; all are packed anew when a state is restored.
PACKING_ROWS = 16
SEGMENT_KINDS = ('segment_ids', 'positions')


def pad_rows(dataset: grain.IterDataset, lengths: Mapping[str, int]) -> grain.IterDataset:
    """Pads every feature (length,) with zeros to its row length."""
    return dataset.map(lambda row: {name: _pad(ids, lengths[name]) for name, ids in row.items()})


def _pad(ids: np.ndarray, length: int) -> np.ndarray:
    # numpy.pad takes ten times as long.
    row = np.zeros(length, ids.dtype)
    row[: len(ids)] = ids
    return row


def pack_rows(dataset: grain.IterDataset, lengths: Mapping[str, int], leaders: Mapping[str, str]) -> grain.IterDataset:
    """Puts as many examples into each row as fit in all of its features.

    Args:
      dataset: examples of features (length,), none longer than its row.
      lengths: feature name to row length.
      leaders: side ('encoder', 'decoder') to the feature that its segments are taken from; the other features of a side
        are as long as its leader in every example.

    Returns:
      Rows of the same features, and for each side `{side}_segment_ids` (1, 2, ... by example, 0 is padding) and
      `{side}_positions` (from 0 in every example).
    """
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset,
        length_struct=dict(lengths),
        num_packing_bins=PACKING_ROWS,
        shuffle_bins=False,
        meta_features=[name for name in lengths if name not in leaders.values()],
    )
    spelled = {f'{leader}_{kind}': f'{side}_{kind}' for side, leader in leaders.items() for kind in SEGMENT_KINDS}
    return packed.map(lambda row: {spelled.get(name, name): ids for name, ids in row.items()})
