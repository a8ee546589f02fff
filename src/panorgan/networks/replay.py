"""A training pass as a CUDA graph: recorded once, then replayed whole.

A step of a small network takes a GPU a few milliseconds, and Python several times as long to ask for its hundreds of
kernels one by one. A graph asks once for the way forward and once for the way back. The kernels are the same and so
are the numbers, dropout included.

A graph is bound to addresses: it reads the weights where they lay when it was recorded, and leaves its results where it
always does. So it is used only while nothing can tell the difference (`Replays`), and else the pass is computed as
ever. All graphs of a device share their memory, because simulated sites train one after the other on it. Where memory
runs out, all graphs of the device are given up (`with_room`).

`PANORGAN_CUDA_GRAPHS=off` in the environment switches them off: they keep the memory of a training pass for themselves.
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

_MOST = 8
"""Graphs of one network: so many kinds of passes it may have."""
_FORGOTTEN = 200
"""A graph that so many other passes have not asked for makes way for a new one."""


def replays_of(network: nn.Module, device: torch.device) -> Replays | None:
    """Graphs for a network that is to be trained on a device; None where they are of no use.

    A network that keeps statistics has none: to record a pass it has to be run, and that would count.
    """
    switched_off = os.environ.get("PANORGAN_CUDA_GRAPHS", "").lower() in ("off", "0", "no", "false")
    if device.type != "cuda" or switched_off or any(True for _ in network.buffers()):
        return None
    return Replays(network)


class Flight:
    """A pass between its way forward and its way back. It ends when it has come back, or when nobody waits for it."""

    def __init__(self) -> None:
        self.landed = False


class SharedMemory:
    """What the graphs of a device compute in. One pass at a time may be under way in it."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None
        """On which all of them are recorded: memory is handed from one graph to another only on the same stream."""
        self.users: weakref.WeakSet[Replays] = weakref.WeakSet()
        self.entry = threading.Lock()
        """Held by the thread that makes up its mind, or records; others compute as ever meanwhile."""
        self._flight: weakref.ref[Flight] | None = None

    def busy(self) -> bool:
        """Whether a pass has gone forward whose way back may still come."""
        flight = None if self._flight is None else self._flight()
        return flight is not None and not flight.landed

    def start(self) -> Flight:
        """A pass goes forward."""
        flight = Flight()
        self._flight = weakref.ref(flight)
        return flight

    def give_up(self) -> bool:
        """Drop all graphs for good, and their memory; whether there were any."""
        held = [replays for replays in self.users if replays.give_up()]
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


def with_room(device: torch.device, call: Callable[[], Result]) -> Result:
    """`call()`; where memory runs out because graphs hold it, once more without them."""
    try:
        return call()
    except torch.OutOfMemoryError:
        pass
    # Out here nothing holds on to what the failed attempt had made.
    if _memory_of(device).give_up():
        _warn("The memory of this GPU does not suffice for CUDA graphs and all else")
    return call()


def _warn(why: str) -> None:
    without = "Training goes on without CUDA graphs, a little slower"
    how = "PANORGAN_CUDA_GRAPHS=off in the environment keeps them from being tried"
    warnings.warn(f"{why}. {without}. {how}.", RuntimeWarning, stacklevel=3)


class Replays:
    """The graphs of one network's passes. `replays(key, compute, image)` is `compute(image)`.

    `compute` takes and returns tensors, and reads the network's weights; `key` names what it computes. A pass is
    replayed if it was seen before with the same key, sizes, types and weights in the same places; if no gradients are
    there to be added to; and if no other pass is under way. A copy of a network has no graphs.

    `backward()` leaves gradients in `parameter.grad` as ever. They are lent until the next pass, and nothing else leads
    to them: `torch.autograd.grad` with respect to weights finds none.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = weakref.ref(network)
        # Where parameters are registered: they are asked for in every step, and searching all modules takes long.
        self._slots = [(module._parameters, name) for module in network.modules() for name in module._parameters]
        self._leaves = [module for module in network.modules() if not any(True for _ in module.children())]
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, Recorded] = {}
        self._passes = 0
        self._given_up = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, key: Hashable, compute: Compute, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pass, replayed where that is the same."""
        memory = _memory_of(inputs[0].device)
        if self._given_up or not memory.entry.acquire(blocking=False):
            return self._plainly(compute, inputs)
        try:
            return self._replayed(key, compute, inputs, memory) or self._plainly(compute, inputs)
        finally:
            memory.entry.release()

    def _replayed(
        self, key: Hashable, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> tuple[torch.Tensor, ...] | None:
        """None where the pass has to be computed."""
        parameters = [p for where, name in self._slots if (p := where[name]) is not None]
        trainable = next((parameter for parameter in parameters if parameter.requires_grad), None)
        if memory.busy() or trainable is None or any(parameter.grad is not None for parameter in parameters):
            return None
        signature = (key, self._state_of(inputs, parameters))
        recorded = self._recorded.get(signature) or self._newly_recorded(signature, compute, inputs, memory)
        if recorded is None:
            return None
        self._passes += 1
        recorded.last_used = self._passes
        outputs: tuple[torch.Tensor, ...] = _Replay.apply(recorded, memory, parameters, trainable, *inputs)
        return outputs

    def _plainly(self, compute: Compute, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return with_room(inputs[0].device, lambda: compute(*inputs))

    def give_up(self) -> bool:
        """Drop all graphs and record no more; whether there were any."""
        held, self._given_up = bool(self._recorded), True
        self._recorded.clear()
        return held

    def _state_of(self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Hashable:
        """All that a recorded pass takes for granted."""
        device = inputs[0].device.type
        return (
            tuple((tuple(i.shape), i.stride(), i.dtype, i.device, i.requires_grad) for i in inputs),
            tuple(map(torch.Tensor.data_ptr, parameters)),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple([module.training for module in self._leaves]),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )

    def _newly_recorded(
        self, signature: Hashable, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> Recorded | None:
        """None for a pass that is not worth it, that there is no room for, or that cannot be recorded."""
        if signature not in self._seen:  # perhaps it comes only once
            self._seen.add(signature)
            return None
        if len(self._recorded) >= _MOST:
            oldest = min(self._recorded, key=lambda known: self._recorded[known].last_used)
            if self._passes - self._recorded[oldest].last_used < _FORGOTTEN:
                return None
            del self._recorded[oldest]
        network = self._network()
        assert network is not None
        memory.users.add(self)
        failed = ""
        try:
            recorded = self._recorded[signature] = Recorded(network, compute, inputs, memory)
        except RuntimeError as error:  # also where memory does not suffice
            failed = str(error).splitlines()[0]
        if failed:  # out here, where the error no longer holds on to what was recorded
            memory.give_up()
            _warn(f"This GPU could not record a training pass ({failed})")
            return None
        return recorded


class _Holder(nn.Module):
    """Holds the network, whose weights `functional_call` then swaps, and calls anything of it."""

    def __init__(self, network: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.network, self.compute = network, compute

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.compute(*inputs)


class Recorded:
    """A pass, its graphs, and the tensors that they read and write."""

    def __init__(
        self, network: nn.Module, compute: Compute, inputs: Sequence[torch.Tensor], memory: SharedMemory
    ) -> None:
        self.last_used = 0
        self.inputs = [given.detach().clone().requires_grad_(given.requires_grad) for given in inputs]
        # The same weights under other names: what autograd knows of the network's own belongs to another stream.
        weights = {f"network.{n}": p.detach().requires_grad_(p.requires_grad) for n, p in network.named_parameters()}
        asked = [*self.inputs, *weights.values()]
        wanted = [tensor for tensor in asked if tensor.requires_grad]
        holder, device = _Holder(network, compute), inputs[0].device

        def forward() -> tuple[torch.Tensor, ...]:
            outputs: tuple[torch.Tensor, ...] = functional_call(holder, weights, tuple(self.inputs))
            # Autocast keeps its copies of weights for whoever comes next, and these lie in the graph's memory.
            torch.clear_autocast_cache()
            return outputs

        def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            last = [output for output in outputs if output.requires_grad]
            with torch.autocast(device.type, enabled=False):  # a step is over with it before it goes back
                found = torch.autograd.grad(last, wanted, gradients, allow_unused=True)
            return as_autograd_leaves_them(wanted, found)

        memory.stream = memory.stream or torch.cuda.Stream(device)
        memory.pool = memory.pool or torch.cuda.graph_pool_handle()
        stream, before = memory.stream, torch.cuda.current_stream(device)
        stream.wait_stream(before)
        # A recording that cannot even begin or end leaves the thread on the stream of recordings.
        with torch.random.fork_rng([device]), torch.enable_grad(), torch.cuda.stream(before):
            with torch.cuda.stream(stream):  # libraries make room for themselves when they are first used
                outputs = forward()
                ones = [torch.ones_like(output) for output in outputs if output.requires_grad]
                backward(outputs, ones)
                del outputs
            before.wait_stream(stream)
            self.given = [torch.empty_like(gradient) for gradient in ones]
            del ones
            self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Of this thread alone: another prepares the next batches meanwhile.
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
        """Gradients, where the graph leaves them."""


def as_autograd_leaves_them(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients that lie in memory as their tensors do, on which fused optimisers insist, and each by itself.

    Two tensors that are added to each other have one and the same gradient; clipped in place it would be so twice.
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


class _Replay(torch.autograd.Function):
    """A recorded pass in the eyes of autograd: one operation of its inputs.

    It gives all parameters their gradients itself. Autograd would do so one by one, and with the hundreds of small
    tensors of a transformer that takes longer than the pass. `trainable`, one of them, just has it called.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        memory: SharedMemory,
        parameters: Sequence[torch.Tensor],
        trainable: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        for fixed, given in zip(recorded.inputs, inputs, strict=True):
            fixed.detach().copy_(given)
        recorded.forward.replay()
        ctx.recorded, ctx.parameters, ctx.flight = recorded, parameters, memory.start()
        ctx.set_materialize_grads(False)
        outputs = tuple(output.clone() for output in recorded.outputs)  # the next pass overwrites its own
        plain = [output for output, known in zip(outputs, recorded.differentiable, strict=True) if not known]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recorded, flight = ctx.recorded, ctx.flight
        if flight.landed:
            raise RuntimeError("A replayed pass goes back once: what it needed is overwritten on the way.")
        flight.landed = True
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
            elif gradient is not None:  # another part of the loss reads the weights too, and came first
                parameter.grad += gradient
        return (None, None, None, None, *recorded.of_inputs)
