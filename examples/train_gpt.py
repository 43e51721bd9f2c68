"""Train a small GPT on real text: groups, guard, schedule, checkpoints, ledger, record, audit.

    python examples/train_gpt.py --folder run                      one device, or all there are
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        python examples/train_gpt.py --folder run                  eight simulated devices
    python examples/train_gpt.py --folder run --processes 2 --process 0 --coordinator HOST:1234
                                                                   one of two processes

The same command goes on where a run was stopped, by SIGTERM or by a kill: nothing is lost but what
was trained since the last save, and that is trained again. It needs jax-accum[crosscheck] (Flax
for the model, rich for the bar) and jax-accum[checkpoint].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jax_accum as ja
from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import Example, ordered_examples
from jax_accum.crosscheck.gpt import GPT, GPTSizes

WINDOW = 64


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's help topics.")
    parser.add_argument("--folder", type=Path, required=True, help="log, record, checkpoints")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--examples", type=int, default=2000, help="windows of text in an epoch")
    parser.add_argument("--microbatch-size", type=int, default=4, help="m, examples of a replica")
    parser.add_argument("--microbatches", type=int, default=4, help="A, of each replica")
    parser.add_argument("--last", choices=["keep", "drop", "error"], default="keep")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, metavar="ATTEMPTS")
    parser.add_argument("--save-every", type=int, default=50, metavar="ATTEMPTS")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    return parser.parse_args(given)


def in_order(examples: Sequence[Example], seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """The examples of an epoch, in an order that seed and epoch alone decide."""
    for i in np.random.default_rng([seed, epoch]).permutation(len(examples)):
        yield {"tokens": examples[i].tokens, "id": examples[i].id}


def digest(tree: Any) -> str:
    """SHA-256 of all arrays: equal for bitwise equal ones."""
    leaves = jax.device_get(jax.tree.leaves(tree))
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()


def audit(folder: Path, epoch: int, examples: Sequence[Example], dropped: Sequence[str]) -> None:
    """Raises unless this epoch processed each example once, over all processes."""
    processed = []
    for path in sorted(folder.glob("ids-*.jsonl")):
        lines = [json.loads(line)["metrics"] for line in path.read_text("utf-8").splitlines()]
        processed.append([line["ids"] for line in lines if line["epoch"] == epoch])
    expected = {example.id for example in examples} - set(dropped)
    ja.audit_ids(*processed, expected=expected, strict=True)


def main(given: Sequence[str] | None = None) -> int:
    """Trains; the exit status is 0 at the end, 143 after SIGTERM."""
    args = arguments(given)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    is_first = jax.process_index() == 0
    args.folder.mkdir(parents=True, exist_ok=True)

    # What is trained: m, A and D, the examples, the model, the optimizer.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    plan = ja.BatchPlan.from_mesh(
        mesh, microbatch_size=args.microbatch_size, microbatches=args.microbatches
    )
    examples = ordered_examples(default_documents(), args.seed)[: args.examples]
    size = plan.examples_per_update
    of_epoch = len(examples) // size if args.last == "drop" else -(-len(examples) // size)
    model = GPT(GPTSizes(layers=args.layers, width=args.width, max_length=WINDOW))

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> ja.Weighted:
        logits_BxTxV = model.apply({"params": params}, batch["tokens"])
        return ja.losses.next_token_cross_entropy(logits_BxTxV, batch["tokens"], mask=batch["mask"])

    # The schedule advances with updates, whatever A is.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup_steps=10, decay_steps=max(of_epoch * args.epochs, 11)
    )
    tx = ja.guard(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))
    train_step = ja.make_train_step(loss_fn, tx, None, mesh=mesh)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, jnp.zeros((1, WINDOW), jnp.int32))["params"]
        return params, tx.init(params)

    everywhere = NamedSharding(mesh, PartitionSpec())
    params, opt_state = jax.jit(init, out_shardings=everywhere)(jax.random.key(args.seed))

    # What is known of it: from the newest sound checkpoint, or from the beginning.
    record = ja.RunRecord(
        plan=plan,
        normalisation={"loss": "supervised tokens"},
        optimizer=f"clip 1.0, adamw, warmup 10, cosine, peak {args.learning_rate}",
        data=f"{len(examples)} windows of the help topics of Python, {args.epochs} epochs",
        last=args.last,
        mesh=mesh,
        seed=args.seed,
    )
    ledger = ja.Ledger()
    checkpoints = ja.checkpoint.Checkpoints(args.folder / "checkpoints")
    epoch, position, attempts = 0, 0, 0
    if restored := checkpoints.restore((params, opt_state), plan):
        params, opt_state = restored.state
        facts = restored.facts
        epoch, position, attempts = facts["epoch"], facts["position"], restored.number
        ledger.restore(facts["ledger"])
        record = ja.RunRecord.from_dict(facts["record"])
        if restored.plan_before is not None:  # at a group's boundary another partition will do
            record.change_plan(plan, ledger.examples, mesh=mesh)
    after = {"examples": ledger.examples}
    if is_first:
        ledger.writers.append(ja.writers.JsonLines(args.folder / "log.jsonl", after=after))
    ids_file = args.folder / f"ids-{jax.process_index()}.jsonl"
    ids_log = ja.writers.JsonLines(ids_file, after=after)

    def save() -> None:
        facts = {
            "epoch": epoch,
            "position": position,
            "ledger": ledger.state(),
            "record": record.as_dict(),
        }
        checkpoints.save(attempts, (params, opt_state), plan, facts=facts)

    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    if jax.process_count() == 1:  # several would stop at different groups: they go on from a save
        signal.signal(signal.SIGTERM, stop)

    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates  loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        disable=args.quiet or not is_first,
    )
    print(f"{plan.describe()}\ntraining from example {ledger.examples} on", flush=True)
    goal = of_epoch * args.epochs
    with bar:
        task = bar.add_task("", total=goal, completed=attempts, epoch=0, loss=0.0, rate=0.0)
        tokens = ledger.totals.tokens
        while epoch < args.epochs:
            stream = ja.groups(
                in_order(examples, args.seed, epoch),
                plan,
                args.last,
                batched=False,
                ids="id",
                lengths=[WINDOW],
                weight=ja.next_token_targets,
                skip=position,
            )
            for group in ja.prefetch(stream, mesh=mesh):
                params, opt_state, metrics = train_step(
                    params, opt_state, group.batch, examples=group.examples
                )
                ledger.attempt(group, metrics)
                record.attempt(group)
                ids = {str(d): list(names) for d, names in group.replica_ids.items()}
                ids_log.log({"epoch": epoch, "ids": ids}, {"examples": ledger.examples})
                position = group.position
                attempts += 1
                if attempts % args.log_every == 0 or attempts == goal:
                    began = bar.tasks[task].elapsed or 1e-9
                    logged = ledger.log(learning_rate=float(schedule(ledger.totals.updates)))
                    rate = (ledger.totals.tokens - tokens) / began
                    loss = logged.get("loss", 0.0)
                    bar.update(task, completed=attempts, epoch=epoch, loss=loss, rate=rate)
                    ja.check(opt_state)
                if stopping or attempts % args.save_every == 0:
                    save()
                if stopping:
                    print(f"stopped after example {ledger.examples}: the same command goes on")
                    return 143
            ledger.drop(stream.dropped)
            record.drop(stream.dropped)
            sync_global_devices(f"epoch {epoch} is processed")
            if is_first:
                audit(args.folder, epoch, examples, stream.dropped.ids)
            epoch, position = epoch + 1, 0
    ledger.check(opt_state)
    record.finish(ledger)
    record.accepted = [f"parameters and optimizer state, sha256 {digest((params, opt_state))}"]
    if is_first:
        record.save(args.folder / "record.json")
        print(f"{ledger.totals}\nrecord: {args.folder / 'record.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
