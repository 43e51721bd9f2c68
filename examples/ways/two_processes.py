"""Two processes of two devices each, joined by `jax.distributed`; here both on this machine.

Started without arguments, it starts both processes and waits for them. On a cluster, start it
once on each machine: two_processes.py HOST:PORT PROCESS
"""

import functools
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import task
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja

MICROBATCHES, PROCESSES = 4, 2


def main(address, process):
    """What each of the processes runs."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process, initialization_timeout=60)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    same = NamedSharding(mesh, PartitionSpec())

    def placed(batch):
        # A process that reads only its own rows calls jax.make_array_from_process_local_data.
        return {
            name: jax.make_array_from_callback(x.shape, rows, x.__getitem__)
            for name, x in batch.items()
        }

    # The whole group in one call.
    step = ja.make_train_step(task.loss_fn, task.optimizer(), MICROBATCHES, mesh=mesh)
    params = jax.device_put(task.init(), same)
    opt_state = task.optimizer().init(params)
    for batch in task.batches():
        params, opt_state, _ = step(params, opt_state, placed(batch))

    # A call for each microbatch.
    opt = ja.MultiSteps(task.optimizer(), MICROBATCHES)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def call(params, state, batch):
        """One microbatch."""
        grads, tokens = jax.grad(task.mean_loss, has_aux=True)(params, batch)
        return opt.apply(grads, state, params, weight=tokens)

    calls = jax.device_put(task.init(), same)
    state = opt.init(calls)
    for batch in task.batches():
        for microbatch in ja.microbatch_rows(task.ROWS, MICROBATCHES, replicas=4):
            part = {name: x[microbatch.ravel()] for name, x in batch.items()}
            calls, state = call(calls, state, placed(part))

    # Every process holds all parameters; both print them, and they are the same.
    task.report(group=params, calls=calls)
    jax.distributed.shutdown()


def start_both():
    """Starts the processes, waits for them, and leaves none behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Each has a pipe of its own: on a shared one, long lines of two processes mix.
    run = functools.partial(subprocess.run, stdout=subprocess.PIPE, text=True, timeout=100)
    commands = [[sys.executable, __file__, address, str(i)] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        done = list(pool.map(run, commands))
    for process in done:
        print(process.stdout, end="")
    if any(process.returncode for process in done):
        sys.exit("a process failed")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        start_both()
    else:
        main(sys.argv[1], int(sys.argv[2]))
