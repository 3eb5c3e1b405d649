"""Loops of the user's own: batches that a script pulls, and steps that it makes by itself."""

from __future__ import annotations

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import nn

import wide as package
from tests.jobs import make
from tests.processes import python, result_of, started, until, wide
from tests.test_ends import has_steps
from tests.test_joining import elsewhere, places
from tests.test_serve import invited
from wide.errors import Left, UsageError
from wide.job.definition import OwnLoop
from wide.job.schedule import Schedule
from wide.job.script import has_local
from wide.node.turns import Over, Turns
from wide.strategy.description import Stage
from wide.strategy.local import Local
from wide.strategy.policy import Share

# ── without processes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_loop_and_its_session_take_turns():
    turns, heard = Turns(), []

    def session():
        for number in range(3):
            heard.append(turns.ask(number))
        turns.end(Over("done"))

    thread = threading.Thread(target=session)
    thread.start()
    for number in range(3):
        assert turns.take() == number
        assert len(heard) == number, "the session waits"
        turns.give(10 * number)
    for _ in range(2):
        with pytest.raises(Over, match="done"):
            turns.take()
    thread.join()
    assert heard == [0, 10, 20]


def test_a_session_whose_loop_is_gone_leaves():
    turns, raised = Turns(), []

    def session():
        for _ in range(2):
            try:
                turns.ask("batch")
            except Left as left:
                raised.append(str(left))

    thread = threading.Thread(target=session)
    thread.start()
    turns.take()
    turns.leave("its loop failed")
    thread.join()
    assert raised == ["its loop failed"] * 2


def test_a_lease_of_a_loops_own_steps_is_one_step_of_the_pool_whatever_the_nodes_speed():
    local = Local(Stage(Schedule(10_000, 1, 20, seed=0), 0, None, are_steps_lent=True))
    for speed in (None, 1.0, 1e6):
        cut = local.cut(Share(0.5, batches_per_s=speed), lambda: 0.0, 0.0)
        assert (cut.block.size, cut.group) == (20, 1)


def test_a_loss_says_that_a_loop_computes():
    assert make(loss=package.member).own_loop == OwnLoop(0)
    assert make().own_loop is None


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        ("with wide.local(model, opt):", True),
        ("from wide import local, log", True),
        ("job = wide.Job()", False),
        ("widest.locals()", False),
    ],
)
def test_scripts_that_train_by_themselves_are_known_by_what_they_say(tmp_path, text, is_there):
    (tmp_path / "script.py").write_text(text)
    assert has_local(tmp_path / "script.py") is is_there


def a_pair():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_one_more(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return optimizer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m, o: package.local(m, o, every=0), "at least 1, got 0"),
        (lambda m, o: package.local(m, o, every=2.5), "at least 1, got 2.5"),
        (lambda m, o: package.local([m, nn.Linear(2, 2)], o), "two models are called linear: give them names"),
        (lambda m, o: package.local({"a.b": m}, o), "a text without dots"),
        (lambda m, o: package.local([], o), "the list of models is empty"),
        (lambda m, o: package.local(3, o), "takes a model, a list of models, or a dict, got int"),
        (lambda m, o: package.local({"m": 3}, o), "m is a int, not a torch.nn.Module"),
        (lambda m, o: package.local(m, []), "the list of optimizers is empty"),
        (lambda m, o: package.local(m, m), "takes torch optimizers"),
        (lambda m, o: package.local(nn.Linear(2, 1), o), "trains none of the parameters"),
        (lambda m, o: package.local(nn.Sequential(), o), "trains none of the parameters"),
        (lambda m, o: package.local(m, with_one_more(o)), "trains parameters that are in none of the models given"),
        (lambda m, o: package.member(3), "got int"),
        (lambda m, o: package.member(m, make()), "with loss=wide.member"),
        (lambda m, o: package.member(m).__enter__(), "start it with `wide run FILE`, or give it an invite"),
        (lambda m, o: package.local(m, o).__enter__(), "start it with `wide run FILE`, or give it an invite"),
        (lambda m, o: package.run(make(loss=package.member), nodes=1), "`wide run FILE` does that"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(monkeypatch, wrong, words):
    monkeypatch.delenv("WIDE_INVITE", raising=False)
    with pytest.raises(UsageError, match=".") as raised:
        wrong(*a_pair())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# ── the pull loop ────────────────────────────────────────────────────────────────────────────────────────────────────

PULL = """
import os, sys, time
import torch, wide
from torch.nn import functional as F
from tests.jobs import make, mlp, normed, points

def loss(model, batch):
    {log}
    return F.cross_entropy(model(batch[0]), batch[1])

FIELDS = dict(model={model}, dataset=lambda: 1 / 0 if os.environ.get("NO_DATA") else points(), {fields})
job = make(**FIELDS, loss=wide.member)
plain = make(**FIELDS, loss=loss)

if __name__ == "__main__":
    model = {model}()
    with wide.member(model{given}) as pool:
        for number, batch in enumerate(pool):
            {body}
"""


LOG = "wide.log(seen=wide.here().step)"


def script(tmp_path, body="pool.backward(loss(model, batch))", fields="steps=30", given=", job", model="mlp", log=LOG):
    path = tmp_path / "pull.py"
    path.write_text(PULL.format(body=body, fields=fields, given=given, model=model, log=log or "pass"))
    return path


def rows(tmp_path, query):
    return sqlite3.connect(tmp_path / "here" / "run.db").execute(query).fetchall()


@pytest.fixture(scope="module")
def pulled_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return result_of("run", f"{script(folder)}:plain", "--nodes", 0, cwd=folder)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("given", [", job", ""])
def test_pulled_batches_give_the_bits_of_the_same_jobs_loss(tmp_path, pulled_alone, nodes, given):
    """Dropout included; with data of its own, or streamed."""
    result = result_of("run", script(tmp_path, given=given), "--nodes", nodes, "--out", "here", cwd=tmp_path)
    assert result["weights_sha256"] == pulled_alone["weights_sha256"]
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    assert db.execute("SELECT step, value FROM logged WHERE metric = 'seen'").fetchall() == [(i, i) for i in range(30)]


def test_a_step_that_was_left_in_does_nothing(tmp_path):
    """Not even after the last batch, to the script's own model."""
    said = set()
    for step in ("", "; optimizer.step()"):
        path = script(tmp_path, f"pool.backward(loss(model, batch)){step}")
        made = "model = mlp()\n    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)"
        written = f"    open({str(tmp_path / 'mine')!r}, 'w').write(str(model[0].weight.sum().item()))"
        path.write_text(path.read_text().replace("model = mlp()", made) + written)
        code, _, err = wide("run", path, "--nodes", 1, cwd=tmp_path)
        assert code == 0, err
        said.add((tmp_path / "mine").read_text())
    assert len(said) == 1


def test_what_a_loop_draws_between_batches_changes_nothing(tmp_path, pulled_alone):
    """Nor does an optimizer's step that was left in: there is no gradient for it."""
    other = "[torch.dropout(torch.ones(99), 0.5, True) for _ in range(50)]"
    optimizer = "torch.optim.AdamW(model.parameters(), 0.1)"
    body = f"pool.backward(loss(model, batch)); {other}; {optimizer}.step(); model.zero_grad()"
    result = result_of("run", script(tmp_path, body), "--nodes", 2, cwd=tmp_path)
    assert result["weights_sha256"] == pulled_alone["weights_sha256"]


@pytest.mark.parametrize("more", ["", "; loss(model, batch)"])
def test_buffers_that_a_loop_changes_are_the_pools(tmp_path, more):
    """Not those of a forward pass that only looks, between two batches."""
    pull = script(tmp_path, f"pool.backward(loss(model, batch)){more}", model="normed", log="")
    alone = result_of("run", f"{pull}:plain", "--nodes", 0, cwd=tmp_path)
    assert result_of("run", pull, "--nodes", 2, cwd=tmp_path)["weights_sha256"] == alone["weights_sha256"]


def test_totals_and_metrics_are_handed_in_as_a_loss_returns_them(tmp_path):
    body = "pool.backward((wide.total(len(batch[0]) * loss(model, batch), len(batch[0])), {'acc': 0.5}))"
    result = result_of("run", script(tmp_path, body), "--nodes", 1, "--out", "here", cwd=tmp_path)
    assert result["steps"] == 30
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    assert db.execute("SELECT DISTINCT value FROM logged WHERE metric = 'acc'").fetchall() == [(0.5,)]


def test_a_loop_that_is_killed_costs_nothing_but_its_lease(tmp_path, pulled_alone):
    slow = script(tmp_path, "time.sleep(0.02); pool.backward(loss(model, batch))")
    with started("run", slow, "--nodes", 3, "--out", "here", "--json", cwd=tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        (coordinator,) = [p for p in psutil.Process(process.pid).children(recursive=True) if len(p.children()) == 3]
        coordinator.children()[1].kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["weights_sha256"] == pulled_alone["weights_sha256"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "a batch of the pool was left without pool.backward(loss)"),
        ("one = loss(model, batch); pool.backward(one); pool.backward(one)", "once for each is enough"),
        ("pool.backward(loss(model, batch).detach())", "does not depend on any trainable parameter"),
        ("l = loss(model, batch); l.backward(retain_graph=True); pool.backward(l)", "before the pool's own"),
        (
            "pool.backward(loss(model, batch)); sum(p.sum() for p in model.parameters()).backward()",
            "there are gradients that would be lost",
        ),
        ("1 / 0", "its loop failed: ZeroDivisionError: division by zero (pull.py:19"),
        ("break", "its loop was left"),
        ("pool.backward(loss(model, batch)); model.eval()", "switched the model between train() and eval()"),
        (
            "pool.backward(loss(model, batch)); model[0].weight.data.add_(1.0)",
            "leave that to the pool, which makes the steps",
        ),
        ("sys.exit(3)", "its loop failed: SystemExit: 3"),
        ("pool.backward(loss(model, batch) * float('nan'))", "the loss is nan"),
    ],
)
def test_a_loop_that_goes_wrong_says_so_and_others_have_its_lease(tmp_path, pulled_alone, body, words):
    """The first node's loop goes wrong at its third batch; the second one's does not."""
    good = "pool.backward(loss(model, batch)); time.sleep(0.01)"
    bad = f"if number == 2 and pool.node == 1: {body}\n            else: {good}"
    if body == "break":
        bad = f"if number == 2 and pool.node == 1: break\n            {good}"
    code, out, err = wide("run", script(tmp_path, bad), "--nodes", 2, "--json", cwd=tmp_path)
    assert code == 0, err
    assert words in err
    assert "Traceback" not in err
    assert json.loads(out)["weights_sha256"] == pulled_alone["weights_sha256"]


def test_the_loss_of_another_model_trains_nothing_and_says_so(tmp_path):
    code, _, err = wide("run", script(tmp_path, "pool.backward(loss(mlp(), batch))"), "--nodes", 1, cwd=tmp_path)
    assert code == 1
    assert "reached none of the model's parameters" in err


def test_a_pool_whose_loops_all_fail_ends_and_can_go_on(tmp_path, pulled_alone):
    bad = script(tmp_path, "pool.backward(loss(model, batch)) if number < 40 else 1 / 0")
    code, _, err = wide("run", bad, "--nodes", 1, "--out", "here", cwd=tmp_path)
    assert code == 1
    assert "all nodes are gone" in err
    assert "Traceback" not in err
    result = result_of("run", script(tmp_path), "--nodes", 1, "--resume", "here", cwd=tmp_path)
    assert result["weights_sha256"] == pulled_alone["weights_sha256"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", 0), "has a loop instead: give it a node"),
        (("--strategy", "local"), "a loop with wide.member computes gradients"),
        (("--strategy", "auto"), "a loop with wide.member computes gradients"),
    ],
)
def test_what_such_a_job_cannot_do_is_refused(tmp_path, options, words):
    code, _, err = wide("run", script(tmp_path), *options, cwd=tmp_path)
    assert code == 2
    assert words in err


def test_a_phase_cannot_have_the_loop(tmp_path):
    path = tmp_path / "phase.py"
    path.write_text(
        "import torch, wide\nfrom tests.jobs import mlp, points\n"
        "phase = wide.Phase(wide.member, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "job = wide.Job(model=mlp, dataset=points, steps=3, phases=[phase])\n"
    )
    code, _, err = wide("run", path, "--nodes", 1, cwd=tmp_path)
    assert code == 2
    assert "wide.member as a phase's loss" in err


def test_loops_that_are_all_left_early_are_no_end_of_a_run(tmp_path, pulled_alone):
    early = script(tmp_path, "if number == 5: break\n            pool.backward(loss(model, batch))")
    code, _, err = wide("run", early, "--nodes", 2, "--out", "here", cwd=tmp_path)
    assert code == 1
    assert "each node's loop was left before the run was over" in err
    result = result_of("run", script(tmp_path), "--nodes", 1, "--resume", "here", cwd=tmp_path)
    assert result["weights_sha256"] == pulled_alone["weights_sha256"]


def test_a_script_without_the_loop_is_told(tmp_path):
    (tmp_path / "none.py").write_text(
        "import wide\nfrom tests.jobs import make\njob = make(loss=wide.member)\nif __name__ == '__main__': print('hello')\n"
    )
    code, _, err = wide("run", "none.py", "--nodes", 1, cwd=tmp_path)
    assert code == 1
    assert "never came to `with wide.member" in err


def test_async_takes_gradients_of_a_loop_too(tmp_path):
    result = result_of("run", script(tmp_path), "--nodes", 2, "--strategy", "async", cwd=tmp_path)
    assert result["batches"] == 110
    assert result["loss_last"] < result["loss_first"]


def test_a_script_by_hand_joins_a_pool_that_is_served(tmp_path, pulled_alone):
    """With an invite in its environment; and `wide join` runs the same script. Both compute once both are there."""
    go = tmp_path / "go"
    wait = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    slow = script(tmp_path, f"{wait}\n            pool.backward(loss(model, batch))")
    with (
        started("serve", slow, "--port", 0, "--out", "here", "--json", cwd=tmp_path) as serving,
        ThreadPoolExecutor() as aside,
    ):
        _, invite = invited(serving)
        with started("join", invite, "--job", slow, cwd=elsewhere(tmp_path), **places(tmp_path)):
            by_hand = aside.submit(python, slow, cwd=tmp_path, WIDE_INVITE=invite, **places(tmp_path, "other"))
            assert until(lambda: rows(tmp_path, "SELECT count(*) FROM nodes") == [(2,)])
            go.touch()
            out, err = serving.communicate(timeout=60)
            done = by_hand.result()
    assert (done.returncode, serving.returncode) == (0, 0), done.stderr + err
    assert "this node gave" in done.stderr
    assert json.loads(out)["weights_sha256"] == pulled_alone["weights_sha256"]


def test_a_loop_is_no_use_to_a_pool_that_has_a_loss(tmp_path):
    path = script(tmp_path)
    with started("serve", f"{path}:plain", "--port", 0, "--out", "here", cwd=tmp_path) as serving:
        _, invite = invited(serving)
        done = python(path, cwd=tmp_path, WIDE_INVITE=invite, **places(tmp_path))
        serving.terminate()
    assert done.returncode == 1
    assert "this pool's job has a loss of its own: lend this machine with `wide join`" in done.stderr


# ── any loop at all ──────────────────────────────────────────────────────────────────────────────────────────────────

FREE = """
import os, sys, time
import torch, wide
from torch import nn

def main():
    torch.manual_seed(0)
    target = torch.randn(8, 1)
    first, last = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.02), torch.optim.SGD(last.parameters(), lr=0.02)]
    with wide.local({{"first": first, "last": last}}, optimizers, every={every}) as pool:
        for number in range({steps}):
            x = torch.randn(16, 8)
            loss = nn.functional.mse_loss(last(first(x)), x @ target)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            wide.log(loss=loss, twice=2 * loss.detach())
            {body}
    print("out", pool.node, flush=True)

{call}
"""


@pytest.mark.parametrize(("code", "ends_well"), [("0", True), ("None", True), ("3", False)])
def test_a_script_may_end_python_as_it_likes(tmp_path, code, ends_well):
    path = free(tmp_path, call=f"main()\nsys.exit({code})")
    exit_code, _, err = wide("run", path, "--nodes", 1, cwd=tmp_path)
    assert (exit_code == 0) is ends_well
    assert ("ended with sys.exit(3)" in err) is not ends_well


def free(tmp_path, body="pass", every=10, steps=60, call='if __name__ == "__main__":\n    main()'):
    path = tmp_path / "free.py"
    path.write_text(FREE.format(body=body, every=every, steps=steps, call=call))
    return path


@pytest.mark.parametrize("call", ['if __name__ == "__main__":\n    main()', "main()"])
def test_what_loops_have_learned_is_averaged(tmp_path, call):
    result = result_of("run", free(tmp_path, call=call), "--nodes", 2, "--out", "here", cwd=tmp_path)
    assert (result["strategy"], result["batches"]) == ("local", 120)
    assert result["loss_last"] < result["loss_first"] / 2
    assert {node["batches"] for node in result["nodes"]} == {60}
    weights = package.load(tmp_path / "here").weights
    assert set(weights) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    assert db.execute("SELECT count(*), sum(last_batch - first_batch + 1) FROM ledger").fetchone() == (12, 120)
    assert db.execute("SELECT count(*) FROM logged WHERE metric = 'twice'").fetchone() > (0,)


def test_one_loop_alone_ends_where_it_would_have_ended_without_a_pool(tmp_path):
    """Its mean is itself; the outer optimizer is told to be plain by rounds of one step."""
    result_of("run", free(tmp_path, every=1, steps=40), "--nodes", 1, "--out", "here", cwd=tmp_path)
    weights = package.load(tmp_path / "here").weights
    torch.manual_seed(0)
    target = torch.randn(8, 1)
    first, last = nn.Linear(8, 8), nn.Linear(8, 1)
    from wide.job.seeding import mix, seed_everything

    seed_everything(mix(0, 1))
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.02)
    for _ in range(40):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(last(first(x)), x @ target).backward()
        optimizer.step()
    torch.testing.assert_close(weights["last.weight"], last.weight.data)
    torch.testing.assert_close(weights["first.weight"], first.weight.data)


ODD = {
    "another optimizer": (
        "if number == 15: optimizers[1] = torch.optim.SGD(last.parameters(), lr=0.02)",
        "another SGD makes steps of the models given",
    ),
    "another parameter": (
        "if number == 15: last.weight = nn.Parameter(torch.zeros(1, 8)); optimizers[1].param_groups[0]['params'][0] = last.weight",
        "last.weight was made, replaced, frozen or unfrozen",
    ),
    "a part that is frozen": (
        "first.requires_grad_(number < 15)",
        "first.weight was made, replaced, frozen or unfrozen",
    ),
    "a frozen one that moves": ("last.fixed.data.add_(1)", "last.fixed is frozen, and changed within wide.local"),
    "a loss that is no number": ("if number == 15: wide.log(loss=float('nan'))", "wide.log(loss=nan)"),
    "a loop in a loop": (
        "if number == 15: wide.local(first, optimizers[0]).__enter__()",
        "wide.local within another one",
    ),
}


def test_where_the_last_optimizer_makes_no_step_nothing_was_trained_and_that_is_said(tmp_path):
    path = free(tmp_path)
    path.write_text(
        path.read_text().replace("                optimizer.step()", "                optimizers[0].step()")
    )
    code, _, err = wide("run", path, "--nodes", 1, cwd=tmp_path)
    assert code != 0
    assert "the last optimizer given, made no step" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("body", "words"), ODD.values(), ids=ODD.keys())
def test_what_other_nodes_would_not_see_is_refused(tmp_path, body, words):
    path = free(tmp_path, body)
    path.write_text(
        path.read_text().replace(
            "    optimizers =", "    last.fixed = nn.Parameter(torch.ones(2), False)\n    optimizers ="
        )
    )
    code, _, err = wide("run", path, "--nodes", 1, cwd=tmp_path)
    assert code == 1
    assert words in err
    assert "Traceback" not in err


def test_large_buffers_are_averaged_too(tmp_path):
    path = free(tmp_path, "last.code.fill_(number)")
    path.write_text(
        path.read_text().replace(
            "    optimizers =", "    last.register_buffer('code', torch.zeros(8192))\n    optimizers ="
        )
    )
    result_of("run", path, "--nodes", 2, "--out", "here", cwd=tmp_path)
    assert package.load(tmp_path / "here").weights["last.code"].unique().tolist() == [58.0]


def test_a_part_of_a_round_is_handed_in_at_the_end(tmp_path):
    result = result_of("run", free(tmp_path, every=50, steps=70), "--nodes", 1, cwd=tmp_path)
    assert result["batches"] == 70


def test_a_loop_that_dies_takes_its_last_steps_along_and_the_others_go_on(tmp_path):
    body = "time.sleep(0.01)\n            if number == 25 and pool.node == 1: os.kill(os.getpid(), 9)"
    code, out, err = wide("run", free(tmp_path, body), "--nodes", 3, "--json", cwd=tmp_path)
    assert code == 0, err
    result = json.loads(out)
    assert sorted(node["batches"] for node in result["nodes"]) == [20, 60, 60]
    assert "not exact" in err


def test_a_loop_that_raises_says_so(tmp_path):
    body = "assert number < 25 or pool.node != 1, 'too far'"
    code, out, err = wide("run", free(tmp_path, body), "--nodes", 2, "--json", cwd=tmp_path)
    assert code == 0, err
    assert "its loop failed: AssertionError: too far (free.py:" in err
    assert "Traceback" not in err
    assert json.loads(out)["batches"] == 80


def test_a_pool_that_ends_before_the_loop_lets_it_go_on(tmp_path):
    """The node's process ends with its pool; a script that came by itself does not."""
    path = free(tmp_path, "time.sleep(0.01)", steps=80)
    with started("serve", path, "--port", 0, "--out", "here", "--steps", 3, "--json", cwd=tmp_path) as serving:
        _, invite = invited(serving)
        done = python(path, cwd=tmp_path, WIDE_INVITE=invite, **places(tmp_path))
        out, err = serving.communicate(timeout=60)
    assert serving.returncode == 0, err
    assert json.loads(out)["steps"] == 3
    assert (done.returncode, done.stdout) == (0, "out 1\n"), done.stderr
    assert "this loop goes on by itself" in done.stderr


def test_loops_that_meet_at_other_times_do_not_fit(tmp_path):
    path = free(tmp_path)
    with started("serve", path, "--port", 0, "--out", "here", cwd=tmp_path) as serving:
        _, invite = invited(serving)
        other = free(elsewhere(tmp_path), every=20)
        done = python(other, cwd=tmp_path, WIDE_INVITE=invite, **places(tmp_path))
        serving.terminate()
    assert done.returncode == 1
    assert "this loop meets the others every 20 steps, the pool's every 10" in done.stderr


def test_a_run_of_loops_goes_on_from_its_checkpoint(tmp_path):
    result_of("run", free(tmp_path), "--nodes", 2, "--out", "here", "--steps", 4, cwd=tmp_path)
    result = result_of("run", free(tmp_path), "--nodes", 2, "--resume", "here", "--steps", 8, cwd=tmp_path)
    assert result["steps"] == 8
