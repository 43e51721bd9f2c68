"""Gradient accumulation for JAX, normalised by what was really supervised."""

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
