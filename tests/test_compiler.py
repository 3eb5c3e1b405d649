"""torch's compiler is imported by who wants it, and by nobody else."""

from __future__ import annotations

from tests.processes import python

SCRIPT = """
import sys, torch
from wide.job.compiler import put_off
put_off()
p = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([p], lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
def step():
    p.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
step()
assert "torch._dynamo.config" not in sys.modules
import importlib.util
assert importlib.util.find_spec("torch._dynamo") is not None
assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
assert "torch._dynamo.config" in sys.modules and sys.modules["torch._dynamo"] is torch._dynamo
step()
import torch._dynamo.config
put_off()
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
"""


DISABLED = """
import torch
from wide.job.compiler import put_off
put_off()
@torch.compiler.disable(recursive=False)
def outside(x): return x + (3 if not torch.compiler.is_compiling() else 2)
@torch._dynamo.disable()
def other(x): return x
assert torch.compile(lambda x: outside(other(x)), backend="eager")(torch.ones(1)).item() == 4.0
"""


def test_what_is_kept_from_the_compiler_stays_so():
    done = python("-c", DISABLED)
    assert done.returncode == 0, done.stderr


def test_an_optimizer_does_without_and_whoever_compiles_gets_it():
    done = python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
