"""The engine: rules → plan → place.

*Rules* turn names into specs. A *plan* is specs checked against shapes and a mesh. *Placing* moves arrays.
"""

from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames, canonical
from t5x_pjit_recipes.layout.feeding import DataLayout, LocalChunker, LocalChunkInfo, global_batch
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.meshes import abstract_mesh, describe_mesh, make_mesh
from t5x_pjit_recipes.layout.placement import gather, place
from t5x_pjit_recipes.layout.plan import Plan
from t5x_pjit_recipes.layout.programs import Program
from t5x_pjit_recipes.layout.slot_report import describe_slots
from t5x_pjit_recipes.layout.slots import slot_specs

__all__ = [
    'AxisMetadata',
    'AxisNames',
    'DataLayout',
    'LocalChunkInfo',
    'LocalChunker',
    'LogicalRules',
    'Plan',
    'Program',
    'abstract_mesh',
    'canonical',
    'describe_mesh',
    'describe_slots',
    'gather',
    'global_batch',
    'make_mesh',
    'place',
    'slot_specs',
]
