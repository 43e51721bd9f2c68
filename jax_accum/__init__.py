"""Gradient accumulation for JAX, normalised by what was really supervised.

A public name is imported when it is first asked for, so that `import jax_accum` and the help of the
command line do not wait for JAX.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from jax_accum import checkpoint, doctor, losses, memory, testing, writers
    from jax_accum._counts import Counts, counts
    from jax_accum._group import Dropped, Group
    from jax_accum._group_grad import GroupInfo, accumulated_value_and_grad
    from jax_accum._groups import Groups, groups
    from jax_accum._guard import GuardState, check, guard
    from jax_accum._ids import Audit, AuditError, audit_ids
    from jax_accum._keys import example_keys
    from jax_accum._layout import data_replicas
    from jax_accum._ledger import Ledger, Totals
    from jax_accum._loss_scale import DynamicLossScale, LossScaleState, loss_scale
    from jax_accum._multi_steps import MultiSteps
    from jax_accum._multi_steps_state import MultiStepsState
    from jax_accum._pack import pack_documents
    from jax_accum._padding import next_token_targets
    from jax_accum._plan import BatchPlan
    from jax_accum._prefetch import prefetch
    from jax_accum._record import RunRecord
    from jax_accum._record_diff import Difference
    from jax_accum._split import microbatch_rows
    from jax_accum._train_step import make_train_step
    from jax_accum._weighted import Weighted

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "AuditError",
    "BatchPlan",
    "Counts",
    "Difference",
    "Dropped",
    "DynamicLossScale",
    "Group",
    "GroupInfo",
    "Groups",
    "GuardState",
    "Ledger",
    "LossScaleState",
    "MultiSteps",
    "MultiStepsState",
    "RunRecord",
    "Totals",
    "Weighted",
    "__version__",
    "accumulated_value_and_grad",
    "audit_ids",
    "check",
    "checkpoint",
    "counts",
    "data_replicas",
    "doctor",
    "example_keys",
    "groups",
    "guard",
    "loss_scale",
    "losses",
    "make_train_step",
    "memory",
    "microbatch_rows",
    "next_token_targets",
    "pack_documents",
    "prefetch",
    "testing",
    "writers",
]

_MODULES = ("checkpoint", "doctor", "losses", "memory", "testing", "writers")
# What type checkers read above, for __getattr__: the names of each module.
_NAMES = {
    "_counts": "Counts counts",
    "_group": "Dropped Group",
    "_group_grad": "GroupInfo accumulated_value_and_grad",
    "_groups": "Groups groups",
    "_guard": "GuardState check guard",
    "_ids": "Audit AuditError audit_ids",
    "_keys": "example_keys",
    "_layout": "data_replicas",
    "_ledger": "Ledger Totals",
    "_loss_scale": "DynamicLossScale LossScaleState loss_scale",
    "_multi_steps": "MultiSteps",
    "_multi_steps_state": "MultiStepsState",
    "_pack": "pack_documents",
    "_padding": "next_token_targets",
    "_plan": "BatchPlan",
    "_prefetch": "prefetch",
    "_record": "RunRecord",
    "_record_diff": "Difference",
    "_split": "microbatch_rows",
    "_train_step": "make_train_step",
    "_weighted": "Weighted",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not typing.TYPE_CHECKING:  # to a type checker, a __getattr__ would mean that any name exists

    def __getattr__(name: str) -> object:
        """Imports what has the name; afterwards it is an attribute like any other."""
        if name in _MODULES:
            return importlib.import_module(f"jax_accum.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'jax_accum' has no attribute {name!r}")
        found = globals()[name] = getattr(
            importlib.import_module(f"jax_accum.{_HOMES[name]}"), name
        )
        return found


def __dir__() -> list[str]:
    return list(__all__)
