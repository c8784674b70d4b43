"""A CUDA device without a GPU, to prove the order of what runs on it. For a CPU build of PyTorch 2.13, with the compiled simulated_cuda_guard.cpp
preloaded (LD_PRELOAD). It patches torch: for a process that does nothing else, and imports this before the project.

Simulated: tensors that say cuda:0 over memory of the CPU. An operation runs at once, with the CPU's results; beside that it is a numbered kernel of
its thread's current stream. Streams and host threads have clocks: which kernels are known to be done before their next one. A kernel that uses what
another stream has used is a race unless that use is in its stream's clock, whether or not anything went wrong this time. Likewise for memory that
Python lets go of (the caching allocator may reuse it at once on the stream where it was made), and for copies to the host that nobody waits for. A copy
from the host, whose memory is not pinned, has its data when the call returns, as CUDA's has, but writes it when its stream comes to it, and the host does
not wait. What a thread knows passes through queues, locks and pipes, and with the start and end of threads. Mixed devices and NumPy views of device
memory raise, as with CUDA.

Graphs: see `Graph`. What CUDA does not record raises in the thread that records: to wait, to copy from or to the host, shapes that depend on values,
another stream. It is reported where another thread meanwhile draws random numbers or plays a graph (until PyTorch 2.11 both failed), and where it may not
wait, since the mode is "global".

Not simulated: real kernels and their rounding, CUDA's random numbers (they are the CPU's), cuDNN's packed weights, time. `inference_mode` is
`no_grad` here, under which a dispatch mode sees what composite operators are made of. What the host does with its own memory is not seen, except for
what `give_away` and `take_back` declare.

`reports` counts what is wrong, (kind, where, what); `counts` what it costs, (phase, what).
"""

import contextlib
import functools
import multiprocessing.connection
import os
import queue
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from types import SimpleNamespace

import torch
import torch._dynamo  # noqa: F401 optimizers import it later, when it would trip over the patches
from torch.utils._python_dispatch import TorchDispatchMode

LOCK = threading.RLock()  # reentrant: memory may be let go of at any time
reports, counts = Counter(), Counter()


def report(kind: str, what: str) -> None:
    frames = [frame for frame in traceback.extract_stack() if os.path.basename(frame.filename).startswith("appo_")]
    reports[kind, " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[:-4:-1]), what] += 1


# --- streams and host threads


class Clock(dict):
    """stream -> number of its last kernel that is known to be done. Also what an event is."""

    def learn(self, other: dict) -> None:
        for stream, number in other.items():
            self[stream] = max(number, self.get(stream, 0))

    def knows(self, kernel: tuple) -> bool:
        stream, number = kernel
        return self.get(stream, 0) >= number


class Stream:
    all = []

    def __init__(self, device=None, priority: int = 0):
        self.clock = Clock()  # what is done before its next kernel starts
        self.all.append(self)

    def last(self) -> tuple:
        return self, self.clock.get(self, 0)

    def launch(self) -> tuple:
        self.clock.learn(here.clock)
        self.clock[self] = self.clock.get(self, 0) + 1
        counts[here.phase, "launches"] += 1
        return self.last()

    def record_event(self) -> Clock:
        with LOCK:
            self.clock.learn(here.clock)
            return Clock(self.clock)

    def wait_event(self, event: Clock) -> None:
        never_recorded("a wait for another stream")
        with LOCK:
            self.clock.learn(event)


class Here(threading.local):
    """The host thread that asks."""

    default = Stream()

    def __init__(self):
        self.stream, self.clock, self.phase = self.default, Clock(), ""
        self.graph = None  # that records


here = Here()


def never_recorded(what: str) -> None:
    if here.graph:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def host_waits_for(clock: Clock) -> None:
    never_recorded("the host waits")
    here.clock.learn(clock)
    counts[here.phase, "synchronisations"] += 1


class Event:
    def record(self, stream: Stream) -> None:
        self.clock = stream.record_event()

    def synchronize(self) -> None:
        with LOCK:
            host_waits_for(self.clock)


def synchronize(device=None) -> None:
    with LOCK:
        if Graph.recording:  # whichever thread records
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing: the host waits for the device")
        for stream in Stream.all:
            here.clock.learn(stream.clock)


@contextlib.contextmanager
def use_stream(stream: Stream):
    if stream is not here.stream:
        never_recorded("another stream")
    before, here.stream = here.stream, stream
    try:
        yield
    finally:
        here.stream = before


class Thread(threading.Thread):
    """Begins with what its starter knows; who joins it learns what it knew."""

    def start(self):
        self.clock = Clock(here.clock)
        super().start()

    def run(self):
        here.clock = self.clock
        with Device():
            super().run()

    def join(self, timeout=None):
        super().join(timeout)
        here.clock.learn(self.clock)


class SimpleQueue(queue.SimpleQueue):
    """Passes on what the thread knew that put."""

    def put(self, item):
        super().put((item, Clock(here.clock)))

    def get(self, *args, **kwargs):
        item, clock = super().get(*args, **kwargs)
        here.clock.learn(clock)
        return item


class Lock:
    """Who takes it learns what the one knew who let go of it. Counts what the taker has asked of the device and does not know to be done."""

    def __init__(self):
        self.lock, self.clock = threading.Lock(), Clock()

    def __enter__(self):
        self.lock.acquire()
        with LOCK:
            here.clock.learn(self.clock)
            stream, number = here.stream.last()
            counts[here.phase, "under way at the lock"] += number - here.clock.get(stream, 0)

    def __exit__(self, *_):
        with LOCK:
            self.clock.learn(here.clock)
        self.lock.release()


class Connection:
    """An end of a pipe whose `other` end is in this process, too. Who receives learns what the sender knew. `sending` is called before each message."""

    def __init__(self, connection, inbox: deque, outbox: deque):
        self.connection, self.inbox, self.outbox = connection, inbox, outbox
        self.sending = lambda message: None

    def send(self, message) -> None:
        self.sending(message)
        self.outbox.append(Clock(here.clock))
        self.connection.send(message)

    def recv(self):
        message = self.connection.recv()
        here.clock.learn(self.inbox.popleft())
        return message

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def duplicate(self):
        """As another process has it, which closes its own."""
        connection = multiprocessing.connection.Connection(os.dup(self.fileno()))
        return Connection(connection, self.inbox, self.outbox)


def pipe(duplex: bool = True) -> tuple[Connection, Connection]:
    there, back = deque(), deque()
    one, two = multiprocessing.Pipe(duplex)
    one, two = Connection(one, back, there), Connection(two, there, back)
    one.other, two.other = two, one
    return one, two


# --- memory


class Block:
    """Memory of a tensor and its views, made on a stream, which may reuse it as soon as Python lets go of it. Its parts are looked after separately:
    there is one, or after `divide` one for each slot of a rollout buffer."""

    strides = None  # of time and slot, after `divide`

    def __init__(self):
        self.stream = here.stream
        self.wrote = [self.stream.last()]  # by part: the last kernel that wrote; of new memory, the last that may still use it
        self.read = [Clock()]  # and the ones that have read since

    def use(self, kernel: tuple, name: str, write: bool, part: int) -> None:
        stream, number = kernel
        if not stream.clock.knows(self.wrote[part]):
            report("race", f"{name} {'writes' if write else 'reads'} what another stream writes")
        if write and not all(map(stream.clock.knows, self.read[part].items())):
            report("race", f"{name} writes what another stream reads")
        if write:
            self.wrote[part], self.read[part] = kernel, Clock()
        else:
            self.read[part][stream] = number

    def __del__(self):
        with LOCK:
            uses = [*self.wrote, *(use for clock in self.read for use in clock.items())]
            if not all(self.stream.clock.knows(use) or here.clock.knows(use) for use in uses):
                report("freed", "memory is let go of that another stream may still use")


def divide(field: torch.Tensor, axis: int = 1) -> None:
    """A field of the rollouts [time, slot, ...], or with axis 0 [slot, ...], from now on looked after slot by slot."""
    block, slots = field.block, field.shape[axis]
    block.strides = field.stride()[:2] if axis else (field.numel(), field.stride(0))
    block.wrote, block.read = block.wrote * slots, [Clock(block.read[0]) for _ in range(slots)]


given_away = set()  # ranges of host memory, (start, end)


def span(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes


def overlap(ranges, other: tuple[int, int]) -> list[tuple[int, int]]:
    return [one for one in ranges if one[0] < other[1] and other[0] < one[1]]


def give_away(memory: torch.Tensor) -> None:
    """From now on this memory belongs to another process."""
    with LOCK:
        given_away.add(span(memory))


def take_back(memory: torch.Tensor) -> None:
    with LOCK:
        given_away.remove(span(memory))


# --- operations


def mapped(function, x):
    """As torch.utils._pytree.tree_map, for what arguments and results are made of."""
    if isinstance(x, (list, tuple)):
        return type(x)([mapped(function, part) for part in x])
    return {name: mapped(function, part) for name, part in x.items()} if isinstance(x, dict) else function(x)


def leaves(x) -> list:
    found = []
    mapped(found.append, x)
    return found


def dispatch(_, func, types, args=(), kwargs=None):
    name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
    device, tensors = kwargs.get("device"), [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    inputs, others = [x for x in tensors if isinstance(x, CudaTensor)], [x for x in tensors if not isinstance(x, CudaTensor)]
    if not inputs and (device is None or device.type == "cpu"):
        return func(*args, **kwargs)
    copies = name in ("_to_copy", "copy_")
    if inputs and not copies and any(x.dim() for x in others):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
    to_host = copies and (device or args[0].device).type == "cpu"
    masks = name == "index" and any(i.dtype == torch.bool for i in args[1] if i is not None)
    waits = masks or name in ("_local_scalar_dense", "equal", "nonzero", "masked_select")  # the host needs the result
    if to_host or waits or copies and others:
        never_recorded(name)
    with LOCK:
        written = written_tensors(func, args, kwargs)
        if here.graph:
            here.graph.keep(written)
        elif Graph.recording and torch.Tag.nondeterministic_seeded in func.tags:
            report("graph", f"{name} draws random numbers while another thread records")
        again = functools.partial(func, *mapped(to_raw, args), **mapped(to_raw, kwargs))
        out = again()
        result = book(name, None if to_host else out, inputs, written, args, to_host or waits, again)
        if to_host or copies and others:
            crossed(None if to_host else others[0], kwargs.get("non_blocking") or args[2:] == (True,))
        elif waits:
            host_waits_for(here.stream.clock)
    return out if to_host else result


class Device(TorchDispatchMode):
    """Context in which a thread can make tensors on the device."""

    __torch_dispatch__ = dispatch


class CudaTensor(torch.Tensor):
    """`raw` is the tensor on the CPU that it stands for."""

    __torch_function__, __torch_dispatch__ = torch._C._disabled_torch_function_impl, classmethod(dispatch)

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: Block):
        layout = dict(strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, **layout, device="cuda:0")
        tensor.raw, tensor.block = raw, block
        return tensor

    def __deepcopy__(self, memo: dict):
        memo[id(self)] = new = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True
        return new

    def __reduce_ex__(self, protocol: int):
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self):
        return self.cpu().tolist()


def to_raw(x):
    if here.graph and isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor):
        return x.clone()  # a number of the host's is recorded as it is now
    return x.raw if isinstance(x, CudaTensor) else torch.device("cpu") if isinstance(x, torch.device) else x


def written_tensors(func, args: tuple, kwargs: dict) -> list[CudaTensor]:
    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in written_arguments(func)]
    return [x for x in leaves(written) if isinstance(x, CudaTensor)]


@functools.cache
def written_arguments(func) -> list[tuple[int, str]]:
    return [(i, x.name) for i, x in enumerate(func._schema.arguments) if x.alias_info is not None and x.alias_info.is_write]


def book(name: str, out, inputs: list[CudaTensor], written: list[CudaTensor], args: tuple = (), always: bool = False, again=None):
    """Books an operation as a kernel, or as a part of a recording, unless all that it does is to make views or room. Returns its raw results as tensors
    of the device. `again` does it once more."""
    same = {id(x.raw): x for x in inputs}
    blocks = {x.raw.untyped_storage()._cdata: x.block for x in inputs}
    made, fresh = {}, []

    def wrap(x):
        if not isinstance(x, torch.Tensor) or id(x) in same:
            return same.get(id(x), x)
        storage = x.untyped_storage()._cdata
        if storage not in blocks:
            blocks[storage] = made[storage] = Block()
            if here.graph:
                here.graph.own[made[storage]] = x
            if x.numel() and "empty" not in name:
                fresh.append(blocks[storage])
        return CudaTensor(x, blocks[storage])

    raws, out = leaves(out), mapped(wrap, out)
    if not (written or fresh or always):
        return out
    if here.graph:
        news = [isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in made for x in raws]
        here.graph.note(name, inputs, written, args, fresh, again, [x if new else None for x, new in zip(raws, news)])
        return out
    kernel = here.stream.launch()
    if name == "_foreach_copy_" and any(len({x.dtype for x in list_}) > 1 for list_ in args[:2]):  # CUDA has one kernel only where each list has one type
        counts[here.phase, "launches"] += len(written) - 1
    use(kernel, name, inputs, written, args, fresh)
    return out


def use(kernel: tuple, name: str, inputs: list, written: list, args: tuple, fresh: list) -> None:
    writes = {(x.block, part) for x in written for part in parts(x, name, args)}
    reads = {(x.block, part) for x in inputs for part in parts(x, name, args)} - writes
    for uses, write in ((reads, False), (writes, True)):
        for block, part in uses:
            block.use(kernel, name, write, part)
    for block in fresh:
        block.use(kernel, name, True, 0)


def parts(x: CudaTensor, name: str, args: tuple):
    """The parts of its block that an operation uses: where there are several, the slots, where its last index points to, or those of a view."""
    slots = len(x.block.wrote)
    if slots == 1:
        return [0]
    row, column = x.block.strides
    first = x.raw.storage_offset()
    if name in ("index", "index_put_", "index_select") and args[0] is x:
        axis, index = args[1:3] if name == "index_select" else (len(args[1]) - 1, args[1][-1])
        return {(first + i * x.raw.stride(axis)) % row // column for i in index.raw.tolist()}
    last = first + sum((n - 1) * stride for n, stride in zip(x.raw.shape, x.raw.stride()))
    return range(first % row // column, last % row // column + 1) if first // row == last // row else range(slots)


def crossed(source: torch.Tensor | None, non_blocking: bool) -> None:
    """The kernel booked last copies `source` from the host, or (None) something to the host."""
    if source is not None and overlap(given_away, span(source)):
        report("mailbox", "memory is read that belongs to another process")
    if not non_blocking:
        host_waits_for(here.stream.clock)
    elif source is None:
        report("unfinished", "a copy to the host that nobody waits for")
    else:  # CUDA takes the data at once, into a buffer of its own; it may wait for room there
        counts[here.phase, "pageable copies"] += 1


class Rnn(torch.autograd.Function):
    """nn.GRU, nn.LSTM or nn.GRUCell: one kernel forward and one backward, as they are to cuDNN's callers."""

    @staticmethod
    def forward(ctx, rnn, *inputs):
        needed, raws = ctx.needs_input_grad[1:], [x.raw for x in inputs]
        ctx.done = done = SimpleNamespace()

        def again():
            done.raws = [x.detach().requires_grad_(y) for x, y in zip(raws, needed)]
            with torch.set_grad_enabled(any(needed)):
                done.outs = rnn(*done.raws)
            return tuple(x.detach() for x in done.outs)

        ctx.save_for_backward(*inputs)
        with LOCK:
            return book("rnn", again(), inputs, [], again=again)

    @staticmethod
    def backward(ctx, *grads):
        done, given = ctx.done, [x.raw for x in grads]

        def again():
            raws = iter(torch.autograd.grad(done.outs, [x for x in done.raws if x.requires_grad], given))
            return tuple(next(raws) if x.requires_grad else None for x in done.raws)

        with LOCK:
            return None, *book("rnn_backward", again(), [*ctx.saved_tensors, *grads], [], again=again)


def on_device(rnn, states: int):
    """torch.gru, with one tensor of state, or torch.lstm, with two, for tensors of the device too."""

    def call(x, state, weights, *flags):
        if not isinstance(x, CudaTensor):
            return rnn(x, state, weights, *flags)

        def on_raw(x, *tensors):
            return rnn(x, tensors[:states] if states > 1 else tensors[0], tensors[states:], *flags)

        return Rnn.apply(on_raw, x, *(state if states > 1 else [state]), *weights)

    return call


def cell_on_device(cell):
    """torch.gru_cell, for tensors of the device too."""

    def call(*inputs):
        if not isinstance(inputs[0], CudaTensor):
            return cell(*inputs)
        return Rnn.apply(lambda *raws: (cell(*raws),), *inputs)[0]

    return call


# --- graphs


class Noted:
    """A tensor as a recording knows it: it does not keep its memory from being let go of."""

    def __init__(self, x: CudaTensor):
        self.raw, self.of = x.raw, weakref.ref(x.block)

    @property
    def block(self) -> Block:
        block = self.of()
        if block is None:
            report("freed", "a graph uses memory that was let go of")
        return block or Block()


def spoil(raw: torch.Tensor) -> None:
    raw.fill_(torch.nan if raw.is_floating_point() else 1 if raw.dtype == torch.bool else torch.iinfo(raw.dtype).max)


class Graph:
    """What a thread asks of the device while it records has no effect: memory that was there before is put back, what was made meanwhile has no values
    yet. Played, it is one kernel of the current stream, which does all this again, in the same memory. Random numbers are drawn anew, but numbers of the
    host's are as they were. A graph keeps the memory that was made while it recorded, and no other. When it plays, what other graphs of its pool have made
    is lost. (CUDA's allocator would let some of it be.)"""

    recording = None  # the one that some thread records

    def __init__(self):
        self.notes, self.own, self.before, self.pool = [], {}, {}, set()

    def keep(self, written: list[CudaTensor]) -> None:
        """Before an operation is recorded."""
        for x in written:
            storage = x.raw.untyped_storage()
            if x.block not in self.own and storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()

    def note(self, name: str, inputs: list, written: list, args: tuple, fresh: list, again, outs: list) -> None:
        known = {}

        def noted(x):
            return known.setdefault(id(x), Noted(x)) if isinstance(x, CudaTensor) else x

        self.notes.append((name, mapped(noted, inputs), mapped(noted, written), mapped(noted, args), fresh, again, outs))

    def replay(self) -> None:
        never_recorded("a graph plays")
        with LOCK, torch.no_grad():
            if Graph.recording:
                report("graph", "a graph plays while another thread records")
            kernel = here.stream.launch()
            for block, raw in [memory for graph in self.pool if graph is not self for memory in graph.own.items()]:
                block.use(kernel, "a graph of the same pool", True, 0)
                spoil(raw)
            for name, inputs, written, args, fresh, again, outs in self.notes:
                use(kernel, name, inputs, written, args, fresh)
                for out, now in zip(outs, leaves(again())):
                    if out is not None:
                        out.copy_(now)


class Recording:
    """torch.cuda.graph"""

    def __init__(self, graph: Graph, pool=None, stream=None, capture_error_mode: str = "global"):
        self.graph, self.pool, self.stream = graph, set() if pool is None else pool, stream
        if capture_error_mode == "global" and threading.active_count() > 1:
            report("graph", "other threads can neither wait nor make room while this one records")

    def __enter__(self):
        synchronize()
        with LOCK:
            if self.stream in (None, Here.default):
                raise RuntimeError("CUDA graphs must be captured on a non-default stream")
            self.stream_before, here.stream = here.stream, self.stream
            here.graph = Graph.recording = self.graph
            self.random = torch.get_rng_state()
        time.sleep(0.03)  # so that other threads do something meanwhile

    def __exit__(self, *_):
        with LOCK:
            here.stream, here.graph, Graph.recording = self.stream_before, None, None
            torch.set_rng_state(self.random)
            for storage, content in self.graph.before.values():
                storage.copy_(content)
            for raw in self.graph.own.values():
                spoil(raw)
            self.graph.before = {}
            self.graph.pool = self.pool
            self.pool.add(self.graph)


# --- patches

torch.inference_mode = torch.no_grad
torch.cuda.is_available, torch.cuda.device_count, torch.cuda._lazy_init = lambda: True, lambda: 1, lambda: None
torch.cuda.set_device = lambda number: None
torch.cuda.is_bf16_supported, torch.backends.cudnn.enabled = lambda **_: True, False
torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Event, Stream, use_stream, lambda device=None: here.stream
torch.cuda.synchronize = synchronize
torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = Graph, Recording, weakref.WeakSet
torch.cuda.is_current_stream_capturing = lambda: here.graph is not None
torch._VF.gru, torch._VF.lstm = on_device(torch._VF.gru, 1), on_device(torch._VF.lstm, 2)
torch._VF.gru_cell = cell_on_device(torch._VF.gru_cell)
torch.utils._foreach_utils._foreach_supported_types.append(CudaTensor)  # as CUDA's own: one kernel for many parameters
torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new parameters: what an old one is cannot be changed
torch.autograd.set_multithreading_enabled(False)  # backward runs in its caller's thread; this is for the main thread


def install(module, process) -> None:
    """In a module of the project: threads, queues, locks and pipes that pass on what is done. `process` comes in the place of an actor's."""
    module.queue = SimpleNamespace(**vars(queue) | dict(SimpleQueue=SimpleQueue))
    module.threading = SimpleNamespace(**vars(threading) | dict(Thread=Thread, Lock=Lock))
    module.mp = SimpleNamespace(Pipe=pipe, get_context=lambda method: SimpleNamespace(Process=process))


def count(cls, name: str) -> None:
    """Counts a method's calls, and under its name what they cost, without the calls in them of other counted methods."""
    method = getattr(cls, name)

    def counted(*args, **kwargs):
        before, here.phase = here.phase, name
        counts[name, "calls"] += 1
        try:
            return method(*args, **kwargs)
        finally:
            here.phase = before

    setattr(cls, name, counted)
