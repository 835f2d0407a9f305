"""What a test may leave on, to the harm of those after it."""

import gc
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager


def running():
    """How much of each kind is on. It imports nothing: what is not imported cannot be on."""
    found = Counter()
    # Of others, some start threads that stay: tqdm, and PyTorch's compiler with its workers.
    found["threads"] = sum(
        not _home(thread).startswith(("tqdm", "torch", "concurrent.futures"))
        for thread in threading.enumerate()
    )
    if "torch" in sys.modules:
        import torch
        from torch.nn.modules import module
        from torch.optim import optimizer

        found["function modes"] = torch._C._len_torch_function_stack()
        found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
        found["global hooks"] = sum(
            len(hooks)
            for place in (module, optimizer)
            for name, hooks in vars(place).items()
            if name.startswith("_global_") and name.endswith("_hooks")
        )
    if "torch._dynamo.eval_frame" in sys.modules:
        stance = sys.modules["torch._dynamo.eval_frame"]._stance.stance
        found["compiler stance"] = int(stance != "default")
    if "levelhead.torch" in sys.modules:
        from levelhead.torch import _ops
        from levelhead.torch.watching import _eager_trace

        found["listeners"] = len(_ops.listeners)
        found["notes on tensors"] = len(_eager_trace._notes)
    return found


def _home(thread):
    """The module whose code a thread runs."""
    target = getattr(thread, "_target", None)
    return type(thread).__module__ if target is None else target.__module__


@contextmanager
def no_leaks(patience=1.0):
    """Fails if more is on at the end than at the start; patience: seconds to wait for that."""
    before = running()
    yield
    end = time.monotonic() + patience
    while (left := running() - before) and time.monotonic() < end:
        gc.collect()  # a tensor with a note may be part of a cycle
        time.sleep(0.01)  # and a thread about to end
    assert not left, f"left behind: {dict(left)}"
