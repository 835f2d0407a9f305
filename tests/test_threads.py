"""The pool: many callers at once, forked children, and how many threads there are."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import EVERYTHING, inputs, same_bits

import levelhead as lh

CALLS = [
    (inputs(2, heads=4, length=64, size=200, d=32), {"causal": True}),
    (inputs(1, heads=8, kv_heads=2, length=1, size=1500, d=64), {}),
    (inputs(16, heads=2, length=20, size=20, d=16), {"window": 5}),
    (inputs(heads=1, length=3, size=3, d=8), {}),
    (inputs(1, heads=2, length=40, size=300, d=24, dtype=np.float64), {"sinks": [0.0, 1.0]}),
]


def results(threads=None):
    return [
        lh.attention(*arrays, threads=threads, **EVERYTHING, **options) for arrays, options in CALLS
    ]


def same(a, b):
    return all(
        same_bits(x, y)
        for m, n in zip(a, b, strict=True)
        for x, y in zip(m[:3], n[:3], strict=True)
    ) and all(m.health == n.health for m, n in zip(a, b, strict=True))


def test_many_python_threads_at_once():
    expected = results(threads=1)
    start, failures = threading.Barrier(8), []

    def work(index):
        start.wait()
        for turn in range(10):
            if not same(results(threads=[None, 1, 2, 4][(index + turn) % 4]), expected):
                failures.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers) and failures == []


def test_many_python_threads_backward():
    q, k, v = inputs(2, heads=4, length=64, size=100, d=32)
    r = lh.attention(q, k, v, return_lse=True)
    call = (r.output, q, k, v, r.output, r.lse)
    expected = lh.attention_backward(*call, threads=1)
    failures = []

    def work():
        for _ in range(10):
            got = lh.attention_backward(*call, threads=2)
            if not all(same_bits(a, b) for a, b in zip(got[:3], expected[:3], strict=True)):
                failures.append(1)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers) and failures == []


def test_the_interpreter_runs_on_while_the_engine_works():
    q, k, v = inputs(1, heads=4, length=1024, size=1024, d=64)
    done = threading.Event()

    def work():
        lh.attention(q, k, v, threads=1)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while not done.is_set():
        turns += 1
    worker.join()
    assert turns > 1000, "the GIL was held"


# ---------------------------------------------------------------- fork


def forking(test):
    """Python (from 3.12 on) and JAX warn of any fork beside threads: the very case under test."""
    for mark in (
        pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
        pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    ):
        test = mark(test)
    return test


def child_status(work):
    """Exit code of a forked child that runs work(); a child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    watch = threading.Timer(30, os.kill, (pid, 9))
    watch.start()
    _, status = os.waitpid(pid, 0)
    watch.cancel()
    return os.waitstatus_to_exitcode(status)


@forking
def test_a_forked_child_after_the_parent_used_the_pool():
    expected = results(threads=4)
    assert child_status(lambda: same(results(threads=4), expected)) == 0
    assert same(results(threads=4), expected), "the parent's pool must work on"


@forking
def test_a_grandchild():
    expected = results(threads=2)

    def work():
        return same(results(threads=2), expected) and (
            child_status(lambda: same(results(threads=3), expected)) == 0
        )

    assert child_status(work) == 0


@forking
def test_a_fork_while_other_threads_are_calling():
    expected, stop = results(threads=2), threading.Event()

    def busy():
        while not stop.is_set():
            results(threads=2)

    workers = [threading.Thread(target=busy) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(5):
            assert child_status(lambda: same(results(threads=2), expected)) == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def _in_worker(seed):
    q, k, v = inputs(2, heads=4, length=64, size=64, seed=seed)
    return lh.attention(q, k, v)


@forking
def test_multiprocessing_with_fork():
    expected = [_in_worker(seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        got = pool.map_async(_in_worker, range(4)).get(timeout=60)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


# ---------------------------------------------------------------- beside PyTorch

BESIDE_PYTORCH = """
import os
import torch
import numpy as np
import levelhead as lh

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
x = torch.randn(600, 600)
x @ x  # OpenMP's threads are there now
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 100, 32), dtype=np.float32)
expected, before = lh.attention(q, k, v, threads=1), threads()

for count in (2, 2):
    assert np.array_equal(lh.attention(q, k, v, threads=count), expected)
assert threads() == before > 1, "two threads are OpenMP's"
x @ x

if (pid := os.fork()) == 0:
    os._exit(0 if np.array_equal(lh.attention(q, k, v, threads=2), expected) else 1)
assert os.waitpid(pid, 0)[1] == 0, "a child has none of OpenMP's threads"

assert np.array_equal(lh.attention(q, k, v, threads=before + 2), expected)
assert threads() > before, "more than OpenMP has are the engine's own"
torch.set_num_threads(1)
assert np.array_equal(lh.attention(q, k, v, threads=2), expected)
"""


FIRST_IN_A_CHILD = """
import os
import torch

torch.set_num_threads(2)
x = torch.randn(600, 600)
x @ x
if (pid := os.fork()) == 0:
    import levelhead as lh
    q = torch.ones(2, 4, 100, 32)
    os._exit(0 if bool((lh.attention(q, q, q, threads=2) == 1).all()) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("code", [BESIDE_PYTORCH, FIRST_IN_A_CHILD], ids=["here", "in a child"])
def test_beside_pytorch_its_threads_do_the_work(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------- how many


def threads_with(**environment):
    code = "import levelhead; print(levelhead.cpu_info()['threads'])"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env | environment, check=True, capture_output=True
    )
    return int(run.stdout)


def test_threads_follow_affinity_and_environment():
    most = threads_with()
    assert 1 <= most <= os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        assert most <= len(os.sched_getaffinity(0))
    assert threads_with(OMP_NUM_THREADS="1") == 1
    assert threads_with(OMP_NUM_THREADS="100000") == most
    for nonsense in ("0", "-2", "many", ""):
        assert threads_with(OMP_NUM_THREADS=nonsense) == most


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_one_core_is_one_thread():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "import levelhead; print(levelhead.cpu_info()['threads'])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert int(run.stdout) == 1


# ---------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
import os, signal, threading, time
{imports}
import numpy as np, levelhead as lh

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 40_000, 64), np.float32)
lse = np.zeros((4, 40_000), np.float32)
sent = 0.0

def press():
    global sent
    time.sleep(0.3)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(call):
    presser = threading.Thread(target=press)
    presser.start()
    try:
        call()
    except KeyboardInterrupt:
        print(f"{{time.monotonic() - sent:.3f}}")
    presser.join()

for threads in (1, 2):
    interrupted(lambda: lh.attention(q, k, v, threads=threads))
    interrupted(lambda: lh.attention(q, k, v, threads=threads, return_health=True))
    interrupted(lambda: lh.attention_backward(q, q, k, v, q, lse, threads=threads))
few = [x[:, :100] for x in (q, k, v)]
assert (lh.attention(*few) == lh.attention(*few, threads=1)).all()
"""


@pytest.mark.parametrize("imports", ["", "import torch"], ids=["our threads", "PyTorch's"])
def test_an_interrupt_ends_a_long_call_within_a_second(imports):
    """Each of these calls takes many seconds. The pool works afterwards as before."""
    code = INTERRUPTED.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    delays = [float(line) for line in done.stdout.split()]
    assert len(delays) == 6 and max(delays) < 1, delays


def test_an_interrupted_call_leaves_no_memory_behind():
    """Twenty calls that are interrupted hold no more than three of them."""
    q, k, v = inputs(heads=2, length=20_000, size=20_000, d=64)

    def interrupt_once():
        timer = threading.Timer(0.15, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            lh.attention_backward(q, q, k, v, q, q[..., 0].copy())
        timer.join()

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(3):
            interrupt_once()
        before = resident()
        for _ in range(17):
            interrupt_once()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert resident() - before < 30e6


def test_a_signal_handler_may_compute_attention_itself():
    """In the middle of a call, on the same thread, with more scratch memory than that needs."""
    small = inputs(heads=2, length=16_000, size=16_000, d=16)
    large = inputs(heads=1, length=100, size=500, d=512)
    expected, inner = lh.attention(*small), lh.attention(*large)
    done = []

    def handler(*_):
        done.append(lh.attention(*large))
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # only now: handlers do not pile up

    usual = signal.signal(signal.SIGALRM, handler)
    try:
        for threads in (1, 2):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            results = [lh.attention(*small, threads=threads) for _ in range(2)]
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert all(same_bits(result, expected) for result in results)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert len(done) > 1 and all(same_bits(result, inner) for result in done)
