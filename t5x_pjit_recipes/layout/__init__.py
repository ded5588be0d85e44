"""The engine: rules → plan → place.

*Rules* turn names into specs. A *plan* is specs checked against shapes and a mesh. *Placing* moves arrays.
"""

from t5x_pjit_recipes.layout.axes import AxisMetadata, AxisNames, canonical
from t5x_pjit_recipes.layout.differences import diff
from t5x_pjit_recipes.layout.explain import Derivation, explain
from t5x_pjit_recipes.layout.feeding import DataLayout, LocalChunker, LocalChunkInfo, global_batch
from t5x_pjit_recipes.layout.linting import Finding, lint
from t5x_pjit_recipes.layout.logical_rules import LogicalRules
from t5x_pjit_recipes.layout.meshes import abstract_mesh, describe_mesh, make_mesh
from t5x_pjit_recipes.layout.placement import check_placement, describe_placement, gather, place, place_parts
from t5x_pjit_recipes.layout.plan import Plan
from t5x_pjit_recipes.layout.programs import Program
from t5x_pjit_recipes.layout.regex_rules import RegexRules
from t5x_pjit_recipes.layout.slot_report import describe_slots
from t5x_pjit_recipes.layout.slots import slot_specs
from t5x_pjit_recipes.layout.suggest import Suggestion, suggest

__all__ = [
    'AxisMetadata',
    'AxisNames',
    'DataLayout',
    'Derivation',
    'Finding',
    'LocalChunkInfo',
    'LocalChunker',
    'LogicalRules',
    'Plan',
    'Program',
    'RegexRules',
    'Suggestion',
    'abstract_mesh',
    'canonical',
    'check_placement',
    'describe_mesh',
    'describe_placement',
    'diff',
    'explain',
    'describe_slots',
    'gather',
    'global_batch',
    'lint',
    'make_mesh',
    'place',
    'place_parts',
    'slot_specs',
    'suggest',
]
