"""The check after every test sees what it is there for."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from leak_support import no_leaks, running
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import levelhead.torch
from levelhead.torch import _ops


def test_modes_and_what_listening_does():
    before = running()
    with TorchFunctionMode():
        assert running() - before == {"function modes": 1}
    with TorchDispatchMode():
        assert running() - before == {"dispatch modes": 1}
    with levelhead.torch.listen(lambda call: None):
        x = torch.randn(2, 3, 5, 4)
        scores = x @ x.mT
        kinds = {"function modes", "compiler stance", "notes on tensors"}
        assert set(running() - before) == kinds
    assert set(running() - before) == {"notes on tensors"}
    del scores
    assert running() == before


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_optimizer_step_post_hook]
)
def test_global_hooks(register):
    before = running()
    hook = register(lambda *_: None)
    assert running() - before == {"global hooks": 1}
    hook.remove()
    assert running() == before


def test_listeners_and_threads():
    before, end = running(), threading.Event()
    _ops.listeners[-1] = print
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert running() - before == {"listeners": 1, "threads": 1}
    del _ops.listeners[-1]
    end.set()
    thread.join()
    assert running() == before


def test_what_stays_on_fails():
    mode = TorchFunctionMode()
    with pytest.raises(AssertionError, match=r"left behind.*function modes"), no_leaks(0.05):
        mode.__enter__()
    with no_leaks():  # the one after it does not
        pass
    mode.__exit__(None, None, None)


def test_what_ends_soon_is_waited_for():
    with no_leaks():
        threading.Timer(0.05, lambda: None).start()


def test_tests_of_the_engine_import_no_torch():
    """Through the check itself: it looks at nothing that is not there."""
    code = "import sys; from leak_support import running; running(); print('torch' in sys.modules)"
    here = Path(__file__).parent
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
