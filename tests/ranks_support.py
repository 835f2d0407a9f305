"""Several processes with torch.distributed, which run functions of the tests."""

import multiprocessing
import os
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

# Importing PyTorch takes longer than most tests: one process does it, and all others begin there.
_IMPORTED = ["torch", "torch.distributed", "torch.nn.parallel", "levelhead.torch"]


class Team:
    """Processes that stay for several tests."""

    def __init__(self, size, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, folder), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __call__(self, function, *given, patience=120):
        """What `function(rank, *given)` returns on each rank; a failure of one fails here."""
        for end in self._ends:
            end.send((function, given))
        found = []
        for rank, end in enumerate(self._ends):
            assert end.poll(patience), f"rank {rank} hangs"
            failed, value = end.recv()
            found.append((failed, value))
        for rank, (failed, value) in enumerate(found):
            assert not failed, f"rank {rank}:\n{value}"
        return [value for _, value in found]

    def end(self):
        for process in self._processes:
            process.kill()
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join()
            end.close()


@contextmanager
def team(size):
    with tempfile.TemporaryDirectory() as folder:
        started = Team(size, folder)
        try:
            yield started
        finally:
            started.end()


def _serve(end, rank, size, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = Path(folder) / "store"  # a file: no port to be taken by others
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, given = end.recv()
        except EOFError:
            return
        try:
            result = False, function(rank, *given)
        except BaseException:
            result = True, traceback.format_exc()
        end.send(result)
