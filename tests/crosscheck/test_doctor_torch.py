"""The doctor on PyTorch steps: every fault of the gallery, every correct recipe, real processes."""

import pytest

torch = pytest.importorskip("torch")

from jax_accum.doctor import Recipe, diagnose, memory_growth, preflight  # noqa: E402
from tests.faults import gallery, matrix  # noqa: E402
from tests.faults import problem as p  # noqa: E402
from tests.faults import torch_problem as t  # noqa: E402

FAULTS = gallery.names("PyTorch", faulty=True)
RIGHT = gallery.names("PyTorch", faulty=False)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_gallery_is_named(name):
    matrix.check("PyTorch", name, fewest=2)


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_recipe_of_the_gallery_gets_a_clean_bill(name):
    matrix.check("PyTorch", name, fewest=1)


def test_most_faults_exist_in_both_frameworks_under_one_name():
    def names(framework):
        return {gallery.load(n).FAULT for n in gallery.names(framework, faulty=True)}

    only_in_jax = names("JAX") - names("PyTorch")
    assert only_in_jax == {
        "Adam count per microbatch",  # torch.optim counts its own steps
        "first microbatch only",
        "partial group carried into the next",  # a loop over batches ends where they end
    }
    assert names("PyTorch") <= names("JAX")


def test_the_reference_loop_gets_a_clean_bill():
    from torch_ref import losses, train

    def loss_fn(model, batch):
        return losses.Weighted(t.sum_loss(model, batch), t.tokens_in(batch))

    @t.step
    def update(loop, batches):
        train.update(loop.model, loop.optimizer, loss_fn, batches, on_nonfinite="skip")

    examine = ["ragged", "ignored", "empty", "nonfinite"]
    found = diagnose(update, p.make_case(5, init=t.begin(), examine=examine))
    assert found.right, found
    assert "the probe “nonfinite”" not in " ".join(found.not_examined)


def diagnose_in_process(rank):
    """Each process asks the same questions in the same order, so that collectives meet."""
    from torch_ref import losses, replicas

    def loss_fn(model, batch):
        return losses.Weighted(t.sum_loss(model, batch), t.tokens_in(batch))

    def init(params):
        loop = t.begin()(params)
        loop.replica = replicas.Replica(loop.model, loss_fn, weights_fn=t.tokens_in)
        return loop

    @t.step
    def right(loop, batches):
        mine = [
            {name: x[rank * p.M : (rank + 1) * p.M] for name, x in batch.items()}
            for batch in batches
        ]
        loop.replica.update(loop.optimizer, mine)

    @t.step
    def own_denominator(loop, batches):
        ddp = torch.nn.parallel.DistributedDataParallel(loop.model)
        mine = [
            {name: x[rank * p.M : (rank + 1) * p.M] for name, x in batch.items()}
            for batch in batches
        ]
        loop.optimizer.zero_grad()
        for batch in mine:
            logits = ddp(batch["x"]).flatten(0, 1)
            labels = batch["labels"].flatten()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (loss / t.group_tokens(mine)).backward()
        loop.optimizer.step()

    case = p.make_case(6, replicas=2, microbatches=3, init=init)
    found = diagnose(right, case)
    wrong = diagnose(own_denominator, case.replace(init=t.begin(), examine=()))
    return found.status, wrong.fault


def test_data_parallel_in_two_real_processes_is_right_or_named():
    from torch_ref.launch import spawn

    expected = ("right", "replica's own denominator")
    assert spawn(diagnose_in_process, 2, timeout=240) == [expected, expected]


def test_a_loss_kept_with_its_graph_is_found_as_what_grows():
    kept = []

    @t.step
    def update(loop, batches):
        loop.optimizer.zero_grad()
        loss = sum(t.sum_loss(loop.model, b) for b in batches) / t.group_tokens(batches)
        loss.backward()
        kept.append(loss)
        loop.optimizer.step()

    growth = memory_growth(update, p.make_case(7, init=t.begin()))
    assert growth.grows
    assert any("that keeps its graph" in kind for kind, _, _ in growth.kinds)


def test_a_jax_and_a_pytorch_side_pass_a_preflight_together_and_a_wrong_one_does_not():
    jax_side = gallery.load("right_in_jax.hand_written")
    torch_side = gallery.load("right_in_torch.hand_written")
    case = p.make_case(8)
    sides = {
        "JAX": (jax_side.update, jax_side.case(8).init),
        "PyTorch": (torch_side.update, t.begin()),
    }
    report = preflight(sides, case)
    assert report.passed, report
    assert report.lines[-1].name == "the same update"
    wrong = gallery.load("in_torch.mean_of_means")
    report = preflight(sides | {"PyTorch": (wrong.update, t.begin())}, case)
    assert report.lines[-1].passed is False


def test_torch_adamw_with_its_moments_in_view_is_told_from_a_divided_gradient():
    import functools

    adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0)

    @t.step
    def update(loop, batches):
        loop.optimizer.zero_grad()
        for batch in batches:
            (t.sum_loss(loop.model, batch) / t.group_tokens(batches) / len(batches)).backward()
        loop.optimizer.step()

    def moments(loop):
        state = loop.optimizer.state
        return {"mu": {n: state[w]["exp_avg"].numpy() for n, w in loop.model.named_parameters()}}

    case = p.make_case(
        9,
        init=t.begin(adamw),
        recipe=Recipe("adamw", learning_rate=0.05),
        observe=moments,
        examine=(),
    )
    assert diagnose(update, case).fault == "divided twice"
    hidden = diagnose(update, case.replace(observe=lambda loop: {}))
    assert "divided twice" in hidden.not_told_apart


def scaled_loop(clip_scaled):
    """GradScaler, and clipping after its scale is undone, or before."""

    def init(params):
        loop = t.begin()(params)
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return loop

    @t.step
    def update(loop, batches):
        tokens, scaler = t.group_tokens(batches), loop.scaler
        if not tokens:
            return
        loop.optimizer.zero_grad()
        for batch in batches:
            scaler.scale(t.sum_loss(loop.model, batch) / tokens).backward()
        if not clip_scaled:
            scaler.unscale_(loop.optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.2)
        scaler.step(loop.optimizer)
        scaler.update()

    recipe = Recipe("sgd", learning_rate=p.RATE, clip_norm=0.2)
    return update, p.make_case(10, init=init, recipe=recipe)


def test_a_loop_with_torchs_own_scaler_is_right_and_clipping_scaled_gradients_is_not():
    assert diagnose(*scaled_loop(clip_scaled=False)).right
    found = diagnose(*scaled_loop(clip_scaled=True))
    assert (found.status, found.fault) == ("unknown", None)
