"""Training passes as CUDA graphs: captured once, then replayed as a whole.

A step of a small network takes a GPU a few milliseconds, and Python several times as long to launch its hundreds of
kernels one by one. A graph launches the forward pass with one call and the backward pass with another. The kernels are
the same, and so are the numbers, dropout included.

A graph is bound to addresses: it reads the weights from where they were at capture, and always writes its results to
the same place. It is therefore used only where the result cannot differ (`GraphCache`); otherwise the pass is computed
as usual. All graphs of a device share their memory, because simulated sites train one after another. When memory
runs out, all graphs of the device are dropped (`retry_without_graphs`).

`PANORGAN_CUDA_GRAPHS=off` in the environment disables them: graphs hold on to the memory of a training pass.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

Compute = Callable[..., tuple[torch.Tensor, ...]]
Result = TypeVar("Result")

_MAX_GRAPHS = 8
"""Upper limit for the graphs of one network."""
_IDLE_PASSES = 200
"""A graph that was not used for this many passes may be replaced by a new one."""


def graph_cache_for(network: nn.Module, device: torch.device) -> GraphCache | None:
    """A graph cache for a network that is trained on a device; None where graphs do not help.

    A network with running statistics gets none: capturing runs the pass, which would update the statistics.
    """
    switched_off = os.environ.get("PANORGAN_CUDA_GRAPHS", "").lower() in ("off", "0", "no", "false")
    if device.type != "cuda" or switched_off or any(True for _ in network.buffers()):
        return None
    return GraphCache(network)


class PendingBackward:
    """A forward pass whose backward pass has not run yet. It ends with that pass, or when its results are released."""

    def __init__(self) -> None:
        self.done = False


class SharedMemory:
    """The memory that the graphs of a device share. Only one pass at a time may use it."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None
        """The capture stream of all graphs: memory can be reused between graphs only on the same stream."""
        self.users: weakref.WeakSet[GraphCache] = weakref.WeakSet()
        self.entry = threading.Lock()
        """Held by the thread that decides or captures; other threads compute without graphs meanwhile."""
        self._pending: weakref.ref[PendingBackward] | None = None

    def busy(self) -> bool:
        """Whether a forward pass is waiting for its backward pass."""
        pending = None if self._pending is None else self._pending()
        return pending is not None and not pending.done

    def start(self) -> PendingBackward:
        """Register a forward pass."""
        pending = PendingBackward()
        self._pending = weakref.ref(pending)
        return pending

    def give_up(self) -> bool:
        """Drop all graphs and their memory for good; returns whether there were any."""
        held = [graphs for graphs in self.users if graphs.give_up()]
        self.pool = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return bool(held)


_MEMORY: dict[torch.device, SharedMemory] = {}


def _memory_of(device: torch.device) -> SharedMemory:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _MEMORY.setdefault(device, SharedMemory())


def retry_without_graphs(device: torch.device, call: Callable[[], Result]) -> Result:
    """Return `call()`; if memory runs out while graphs hold some, drop them and call once more."""
    try:
        return call()
    except torch.OutOfMemoryError:
        pass
    # Outside the except block, nothing keeps the failed attempt's tensors alive.
    if _memory_of(device).give_up():
        _warn("The memory of this GPU does not suffice for CUDA graphs besides everything else")
    return call()


def _warn(why: str) -> None:
    without = "Training continues without CUDA graphs, slightly slower"
    how = "Set PANORGAN_CUDA_GRAPHS=off in the environment to disable them from the start"
    warnings.warn(f"{why}. {without}. {how}.", RuntimeWarning, stacklevel=3)


class GraphCache:
    """The graphs of one network's passes. `cache(key, compute, image)` returns `compute(image)`.

    `compute` takes and returns tensors, and reads the network's weights; `key` names what it computes. A pass is
    replayed if it was seen before with the same key, sizes, types and weight addresses, if there are no gradients to
    accumulate into, and if no other pass is pending. A copy of a network has no graphs.

    `backward()` leaves gradients in `parameter.grad` as usual. They are valid until the next pass, and are the only way
    to the gradients: `torch.autograd.grad` with respect to weights finds none.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = weakref.ref(network)
        # The modules' own dictionaries: parameters are read in every step, and walking all modules is slow.
        self._slots = [(module._parameters, name) for module in network.modules() for name in module._parameters]
        self._leaves = [module for module in network.modules() if not any(True for _ in module.children())]
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, GraphedPass] = {}
        self._passes = 0
        self._given_up = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, key: Hashable, compute: Compute, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the pass where the result is the same, else compute it."""
        memory = _memory_of(inputs[0].device)
        if self._given_up or not memory.entry.acquire(blocking=False):
            return self._compute(compute, inputs)
        try:
            return self._replay(key, compute, inputs, memory) or self._compute(compute, inputs)
        finally:
            memory.entry.release()

    def _replay(
        self, key: Hashable, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> tuple[torch.Tensor, ...] | None:
        """None if the pass must be computed."""
        parameters = [p for where, name in self._slots if (p := where[name]) is not None]
        trainable = next((parameter for parameter in parameters if parameter.requires_grad), None)
        if memory.busy() or trainable is None or any(parameter.grad is not None for parameter in parameters):
            return None
        signature = (key, self._signature(inputs, parameters))
        recorded = self._recorded.get(signature) or self._record(signature, compute, inputs, memory)
        if recorded is None:
            return None
        self._passes += 1
        recorded.last_used = self._passes
        outputs: tuple[torch.Tensor, ...] = _ReplayGraph.apply(recorded, memory, parameters, trainable, *inputs)
        return outputs

    def _compute(self, compute: Compute, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return retry_without_graphs(inputs[0].device, lambda: compute(*inputs))

    def give_up(self) -> bool:
        """Drop all graphs and capture no more; returns whether there were any."""
        held, self._given_up = bool(self._recorded), True
        self._recorded.clear()
        return held

    def _signature(self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Hashable:
        """Everything that a captured pass depends on."""
        device = inputs[0].device.type
        return (
            tuple((tuple(i.shape), i.stride(), i.dtype, i.device, i.requires_grad) for i in inputs),
            tuple(map(torch.Tensor.data_ptr, parameters)),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple([module.training for module in self._leaves]),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )

    def _record(
        self, signature: Hashable, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> GraphedPass | None:
        """None for a pass that is new, that there is no room for, or that cannot be captured."""
        if signature not in self._seen:  # it may never come again
            self._seen.add(signature)
            return None
        if len(self._recorded) >= _MAX_GRAPHS:
            oldest = min(self._recorded, key=lambda known: self._recorded[known].last_used)
            if self._passes - self._recorded[oldest].last_used < _IDLE_PASSES:
                return None
            del self._recorded[oldest]
        network = self._network()
        assert network is not None
        memory.users.add(self)
        failed = ""
        try:
            recorded = self._recorded[signature] = GraphedPass(network, compute, inputs, memory)
        except RuntimeError as error:  # includes running out of memory
            failed = str(error).splitlines()[0]
        if failed:  # outside the except block, where the error no longer keeps captured tensors alive
            memory.give_up()
            _warn(f"This GPU could not capture a training pass ({failed})")
            return None
        return recorded


class _Holder(nn.Module):
    """Holds the network, whose weights `functional_call` swaps, and calls any function of it."""

    def __init__(self, network: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.network, self.compute = network, compute

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.compute(*inputs)


class GraphedPass:
    """A captured pass: its graphs, and the tensors that they read and write."""

    def __init__(
        self, network: nn.Module, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> None:
        self.last_used = 0
        self.inputs = [given.detach().clone().requires_grad_(given.requires_grad) for given in inputs]
        # The same weights as new leaves: autograd ties the network's own parameters to another stream.
        weights = {f"network.{n}": p.detach().requires_grad_(p.requires_grad) for n, p in network.named_parameters()}
        asked = [*self.inputs, *weights.values()]
        wanted = [tensor for tensor in asked if tensor.requires_grad]
        holder, device = _Holder(network, compute), inputs[0].device

        def forward() -> tuple[torch.Tensor, ...]:
            outputs: tuple[torch.Tensor, ...] = functional_call(holder, weights, tuple(self.inputs))
            # Autocast caches its copies of weights for later passes, but these lie in the graph's memory.
            torch.clear_autocast_cache()
            return outputs

        def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            last = [output for output in outputs if output.requires_grad]
            with torch.autocast(device.type, enabled=False):  # a training step calls backward outside of autocast
                found = torch.autograd.grad(last, wanted, gradients, allow_unused=True)
            return unshared_gradients(wanted, found)

        memory.stream = memory.stream or torch.cuda.Stream(device)
        memory.pool = memory.pool or torch.cuda.graph_pool_handle()
        stream, before = memory.stream, torch.cuda.current_stream(device)
        stream.wait_stream(before)
        # A capture that fails to begin or end leaves the thread on the capture stream.
        with torch.random.fork_rng([device]), torch.enable_grad(), torch.cuda.stream(before):
            with torch.cuda.stream(stream):  # libraries allocate their workspaces on first use
                outputs = forward()
                ones = [torch.ones_like(output) for output in outputs if output.requires_grad]
                backward(outputs, ones)
                del outputs
            before.wait_stream(stream)
            self.given = [torch.empty_like(gradient) for gradient in ones]
            del ones
            self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Errors of this thread only: another thread prepares the next batches meanwhile.
            how: dict[str, Any] = {"pool": memory.pool, "stream": stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self.forward, **how):
                outputs = forward()
            with torch.cuda.graph(self.backward, **how):
                found = backward(outputs, self.given)
        self.differentiable = [output.requires_grad for output in outputs]
        self.outputs = [output.detach() for output in outputs]
        in_order = iter(found)
        every = [next(in_order) if tensor.requires_grad else None for tensor in asked]
        self.of_inputs, self.of_parameters = every[: len(inputs)], every[len(inputs) :]
        """Gradients, where the graph writes them."""


def unshared_gradients(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients in the memory layout of their tensors, as fused optimisers require, and none shared.

    Two tensors that are added to each other receive the same gradient tensor; clipping in place would scale it twice.
    """
    places: set[int] = set()
    own: list[torch.Tensor | None] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and (gradient.stride() != tensor.stride() or gradient.data_ptr() in places):
            gradient = torch.empty_like(tensor).copy_(gradient)
        if gradient is not None:
            places.add(gradient.data_ptr())
        own.append(gradient)
    return own


class _ReplayGraph(torch.autograd.Function):
    """A captured pass as one autograd operation on its inputs.

    It sets the gradients of all parameters itself. Autograd would do so one by one, which for the hundreds of small
    tensors of a transformer takes longer than the pass. `trainable` is one of them, so that autograd calls `backward`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorded: GraphedPass,
        memory: SharedMemory,
        parameters: Sequence[torch.Tensor],
        trainable: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        for fixed, given in zip(recorded.inputs, inputs, strict=True):
            fixed.detach().copy_(given)
        recorded.forward.replay()
        ctx.recorded, ctx.parameters, ctx.pending = recorded, parameters, memory.start()
        ctx.set_materialize_grads(False)
        outputs = tuple(output.clone() for output in recorded.outputs)  # the next pass overwrites the originals
        plain = [output for output, known in zip(outputs, recorded.differentiable, strict=True) if not known]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recorded, pending = ctx.recorded, ctx.pending
        if pending.done:
            raise RuntimeError("A replayed pass allows one backward pass: it overwrites the tensors that it needs.")
        pending.done = True
        known = [g for g, differentiable in zip(gradients, recorded.differentiable, strict=True) if differentiable]
        for fixed, given in zip(recorded.given, known, strict=True):
            if given is None:
                fixed.zero_()
            else:
                fixed.copy_(given)
        recorded.backward.replay()
        for parameter, gradient in zip(ctx.parameters, recorded.of_parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:  # another term of the loss reads the weights too, and ran first
                parameter.grad += gradient
        return (None, None, None, None, *recorded.of_inputs)
