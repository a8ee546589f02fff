"""What makes a whole training step fast on a GPU, in milliseconds: CUDA graphs, own kernels, torch.compile, layout.

    python benchmarks/accelerators.py [--ways eager plain …] [--only fedavg flkd_both …] [--json FILE] [-- more]

The steps are those of `step_cost.py`, as a site's worker does them; what stands behind `--` is handed to it. Every way
has a process of its own:

    graphs            as shipped: CUDA graphs and own kernels
    graphs-plain      CUDA graphs, no kernels of our own
    no-norm           as shipped, with PyTorch's own operations in place of one kernel: instance normalisation,
    no-unified        … the loss over unified labels,
    no-heads          … the heads side by side,
    no-soft-bce       … or the distillation of soft labels
    float-up          as shipped, with transposed convolutions in float32
    eager             own kernels, no graphs
    plain             neither: PyTorch as it is
    compile           torch.compile of the network, no graphs and no kernels of our own
    reduce-overhead   the same with its own CUDA graphs
    channels-last     plain, with the network's weights in channels-last order
    compile-last      compile, in channels-last order

A U-Net is compiled as a whole; of networks with parts of single organs every block by itself, because which parts are
computed changes from call to call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch
from torch import nn

KERNELS = ("norm", "unified", "heads", "soft-bce")
WITH_GRAPHS = ("graphs", "graphs-plain", *(f"no-{kernel}" for kernel in KERNELS), "float-up")
WAYS = (*WITH_GRAPHS, "eager", "plain", "compile", "reduce-overhead", "channels-last", "compile-last")
METHODS = ("fedavg", "flkd_both", "ufps", "ufps_susam", "multidecoder", "fediod")
_WAY = "PANORGAN_BENCHMARK_WAY"


def main() -> None:
    """Start one process for every way, print a table, and write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--only", nargs="+", default=METHODS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="for step_cost.py, behind --")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for way in arguments.ways:
        found[way] = _milliseconds(way, [*arguments.more, "--json", "--only", *arguments.only])
        print(f"{way:16}", *(f"{label} {value:.2f}" for label, value in found[way].items()), sep="  ", flush=True)
        if arguments.json:  # after every way: a machine may be taken away
            arguments.json.write_text(json.dumps({"milliseconds": found, "torch": torch.__version__}, indent=1) + "\n")


def _milliseconds(way: str, words: list[str]) -> dict[str, float]:
    """A step of each method that could be measured; nothing where the way failed."""
    graphs = "on" if way in WITH_GRAPHS else "off"
    environment = {**os.environ, _WAY: way, "PANORGAN_CUDA_GRAPHS": graphs}
    done = subprocess.run([sys.executable, __file__, *words], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return {}
    steps: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["step_seconds"]
    return {label: round(seconds * 1000, 2) for label, seconds in steps.items()}


def measure(way: str) -> None:
    """`step_cost.py` in this process, with networks that are computed in this way."""
    sys.path.insert(0, str(Path(__file__).parent))  # also under PYTHONSAFEPATH
    import step_cost  # type: ignore[import-not-found]  # beside this file
    from panorgan.federation.site import SiteWorker

    if way.startswith("no-"):
        leave_out([way.removeprefix("no-")])
    elif way not in ("graphs", "eager", "float-up"):
        leave_out(KERNELS)
    placed: Callable[..., nn.Module] = SiteWorker._place_on_device

    def accelerated(worker: SiteWorker, network: nn.Module) -> nn.Module:
        network = placed(worker, network)
        if way.endswith("-last"):
            three = worker.setup.network.dimensions == 3
            network = network.to(memory_format=torch.channels_last_3d if three else torch.channels_last)
        if way == "float-up":
            upsample_in_float32(network)
        if way.startswith("compile") or way == "reduce-overhead":
            compile_blocks(network, "reduce-overhead" if way == "reduce-overhead" else None)
        return network

    SiteWorker._place_on_device = accelerated  # type: ignore[assignment, method-assign]
    step_cost.main()


def compile_blocks(network: nn.Module, mode: str | None) -> None:
    """Let torch.compile compute a U-Net, or the blocks of another network."""
    from panorgan.networks import UNet

    if isinstance(network, UNet):
        network.compile(mode=mode)
        return
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                block.compile(mode=mode)
        elif name.rpartition(".")[2] == "bottleneck":
            module.compile(mode=mode)


def upsample_in_float32(network: nn.Module) -> None:
    """cuDNN has slow kernels for the gradient of some transposed convolutions in bfloat16."""
    for module in network.modules():
        if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
            module.forward = partial(_in_float32, type(module).forward, module)  # type: ignore[method-assign]


def _in_float32(forward: Callable[..., torch.Tensor], module: nn.Module, image: torch.Tensor) -> torch.Tensor:
    with torch.autocast(image.device.type, enabled=False):
        return forward(module, image.float()).to(image.dtype)


def leave_out(kernels: Collection[str]) -> None:
    """PyTorch's own operations in place of these kernels."""
    from panorgan.losses import distillation, unified_loss
    from panorgan.networks import head_stack, instance_norm

    if "soft-bce" in kernels:
        distillation.soft_bce_kernel = None  # type: ignore[assignment]
    if "heads" in kernels:
        head_stack.head_kernel = None  # type: ignore[assignment]
    if "unified" in kernels:
        unified_loss.unified_kernel = None  # type: ignore[assignment]
    if "norm" in kernels:
        instance_norm._SMALLEST = sys.maxsize


if __name__ == "__main__":
    if _WAY in os.environ:
        measure(os.environ[_WAY])
    else:
        main()
