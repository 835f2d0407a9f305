"""The peers, each in its own file; one that cannot be imported is named as missing."""

from __future__ import annotations

import importlib

from benchmarks.peers.base import Missing, Peer, Unable, Variant

__all__ = ["Missing", "Peer", "Unable", "Variant", "load_peers"]

PEERS = {
    "PyTorch": ("torch_sdpa", "TorchSdpa"),
    "ONNX Runtime": ("onnx_runtime", "OnnxRuntime"),
    "JAX": ("jax_xla", "JaxXla"),
    "OpenVINO": ("openvino_sdpa", "OpenVino"),
    "NumPy": ("numpy_naive", "NumpyNaive"),
}


def load_peers() -> tuple[list[Peer], list[Missing]]:
    """All that are installed, and the rest by name with the reason."""
    found: list[Peer] = []
    missing: list[Missing] = []
    for name, (module, class_name) in PEERS.items():
        try:
            home = importlib.import_module(f"benchmarks.peers.{module}")
        except ImportError as error:
            missing.append(Missing(name, str(error)))
        else:
            found.append(getattr(home, class_name)())
    return found, missing
