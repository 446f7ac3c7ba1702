"""Gluon kernels on a CPU, as far as their logic goes: loops, barriers, stages, masks. Layouts are for the compiler.

`on_cpu` loads gluon_forward over stand-ins that are as unkind as the hardware may be. A box that the copy
engine is asked for is NaN from then on, and arrives later, from another thread. A product reads its operands when it is
waited for, not when it is started: a tile that is overwritten too early is read wrong. Parts of `warp_specialize` are
threads; where all that is left waits for barriers, and no copy is under way, that is an error.
"""

import contextlib
import inspect
import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch

from flashlab.attention import gluon_forward


class Block(torch.Tensor):
    """A tensor of a kernel: `type.layout` is asked for, and means nothing here."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def block(x) -> Block:
    return torch.as_tensor(x).as_subclass(Block)


class Barrier:
    """An mbarrier: a phase is complete when `count` have arrived and all expected bytes have come."""

    def __init__(self, machine):
        self.machine, self.changed = machine, machine.changed
        self.count = 0

    def init(self, count):
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def change(self, arrived=0, expected=0):
        with self.changed:
            assert self.count, "the barrier was not initialised"
            self.missing -= arrived
            self.bytes += expected
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.phase += 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity):
        if not self.machine.wait(lambda: self.phase % 2 != parity):
            raise TimeoutError(f"nobody completes phase {self.phase} of a barrier")


class Shared:
    """Shared memory: NaN until something is written."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i):
        assert 0 <= i < self.data.shape[0], "no such place in shared memory"
        return Shared(self.data[i])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def store(self, x):
        self.data.copy_(x)


class Barriers(list):
    index = list.__getitem__  # type: ignore[assignment]


class Descriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        self.base = base.as_strided(shape, strides, base.storage_offset())
        self.dtype, self.layout = base.dtype, layout
        nbytes = base.element_size() * torch.Size(block_shape).numel()
        self.block_type = SimpleNamespace(shape=list(block_shape), nbytes=nbytes)

    def window(self, coord):
        """The part of the box at `coord` that is inside: of the tensor, and of the box."""
        of_tensor, of_box = [], []
        for start, size, length in zip(coord, self.block_type.shape, self.base.shape, strict=True):
            low, high = max(start, 0), max(min(start + size, length), max(start, 0))
            of_tensor.append(slice(low, high))
            of_box.append(slice(low - start, high - start))
        return tuple(of_tensor), tuple(of_box)


class Pointer:
    def __init__(self, base, offset=0):
        self.base, self.offset = base, offset

    def __add__(self, offset):
        return Pointer(self.base, self.offset + offset)


class Product:
    def __init__(self, a, b, acc, use_acc):
        self.operands, self.acc, self.result = (a, b), acc if use_acc else torch.zeros_like(acc), None

    def compute(self):
        a, b = ((x.data if isinstance(x, Shared) else x).float() for x in self.operands)
        self.result = block(self.acc + a @ b)


class Machine:
    """One program at a time; the parts of it share everything but what `own` keeps."""

    def __init__(self):
        self.own = threading.local()
        self.random = random.Random(0)
        self.engine = ThreadPoolExecutor(4)
        self.failed = []
        self.changed, self.moving, self.waits = threading.Condition(), 1, []

    def move(self, count):
        """So many more, or fewer, threads that do not wait and copies that are under way."""
        with self.changed:
            self.moving += count
            self.changed.notify_all()

    def wait(self, done):
        """Whether that comes true before all that is left waits."""
        with self.changed:
            self.waits.append(done)
            self.move(-1)
            self.changed.wait_for(lambda: done() or not (self.moving or any(other() for other in self.waits)))
            self.waits.remove(done)
            self.moving += 1
            return done()

    def queue(self, name):
        if not hasattr(self.own, name):
            setattr(self.own, name, [])
        return getattr(self.own, name)

    # -- language ------------------------------------------------------------------------------------------------------
    def allocate(self, dtype, shape, layout):
        if dtype == torch.int64:
            made = Barriers(Barrier(self) for _ in range(shape[0]))
            return made[0] if len(shape) == 1 else made
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def store(self, pointer, x, mask):
        pointer.base.view(-1)[pointer.offset[mask]] = x[mask]

    def warp_specialize(self, parts, warps, registers):
        def run(function, arguments):
            try:
                function(*arguments)
            except BaseException as error:
                self.failed.append(error)
            self.move(-1)

        self.move(len(parts) - 1)  # this thread waits for them
        threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.move(1)
        if self.failed:
            raise self.failed[0]

    # -- the copy engine -----------------------------------------------------------------------------------------------
    def load(self, desc, coord, barrier, smem, pred=True):
        if not pred:
            return
        assert smem.shape == desc.block_type.shape
        smem.data.fill_(float("nan"))
        delay = threading.Event().wait
        pause = self.random.choice([0, 0, 1e-4, 1e-3])

        def arrive():
            delay(pause)
            of_tensor, of_box = desc.window(coord)
            box = torch.zeros_like(smem.data)
            box[of_box] = desc.base[of_tensor]
            smem.data.copy_(box)
            barrier.change(expected=-desc.block_type.nbytes)

        self.move(1)
        self.engine.submit(arrive).add_done_callback(lambda _: self.move(-1))

    def send(self, desc, coord, smem):
        self.queue("sent").append((desc, coord, smem))

    def store_wait(self, pending):
        while len(self.queue("sent")) > pending:
            desc, coord, smem = self.queue("sent").pop(0)
            of_tensor, of_box = desc.window(coord)
            desc.base[of_tensor] = smem.data[of_box]

    # -- products ------------------------------------------------------------------------------------------------------
    def product(self, a, b, acc, use_acc=True, is_async=False):
        assert not isinstance(acc, Product), "a product's sum was used before it was waited for"
        made = Product(a, b, acc, use_acc)
        self.queue("products").append(made)
        return made if is_async else self.product_wait(0, (made,))

    def product_wait(self, pending, deps):
        while len(self.queue("products")) > pending:
            self.queue("products").pop(0).compute()
        results = [x.result if isinstance(x, Product) else x for x in deps]
        assert all(x is not None for x in results), "the wait does not cover this product"
        return results[0] if len(results) == 1 else tuple(results)


def scalar_or_tensor(on_tensors, on_numbers):
    return lambda *xs: on_tensors(*map(torch.as_tensor, xs)) if any(map(torch.is_tensor, xs)) else on_numbers(*xs)


def stand_ins(machine: Machine) -> dict[str, SimpleNamespace]:
    """The modules of Gluon, by name."""
    state: dict[str, int] = {}

    class Kernel:
        def __init__(self, fn):
            self.fn = fn

        def __call__(self, *args, **kwargs):
            return self.fn(*args, **kwargs)

        def __getitem__(self, grid):
            def launch(num_warps, LSE_ptr, **arguments):
                for program in range(grid[0]):
                    state.update(program=program, programs=grid[0], warps=num_warps)
                    self.fn(LSE_ptr=Pointer(LSE_ptr), **arguments)

            return launch

    def jit(fn=None, **options):
        return Kernel(fn) if fn else Kernel

    nothing = lambda *args, **kwargs: None  # noqa: E731
    language = SimpleNamespace(
        constexpr=lambda x: x, to_tensor=torch.as_tensor, int64=torch.int64, float32=torch.float32,
        program_id=lambda axis: state["program"], num_programs=lambda axis: state["programs"],
        num_warps=lambda: state["warps"], static_range=range, cdiv=lambda a, b: -(-a // b),
        minimum=scalar_or_tensor(torch.minimum, min), maximum=scalar_or_tensor(torch.maximum, max),
        where=lambda mask, a, b: torch.where(mask, a, b), exp2=torch.exp2, log2=torch.log2,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        arange=lambda a, b, layout: block(torch.arange(a, b)), convert_layout=lambda x, layout: x,
        full=lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype)),
        zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
        SliceLayout=nothing, DotOperandLayout=nothing, NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing,
        allocate_shared_memory=machine.allocate, store=machine.store, barrier=nothing,
        warp_specialize=machine.warp_specialize,
    )  # fmt: skip
    barrier = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda barrier, count: barrier.init(count),
        arrive=lambda barrier, count: barrier.change(arrived=count),
        expect=lambda barrier, nbytes, pred: barrier.change(arrived=1, expected=nbytes) if pred else None,
        wait=lambda barrier, phase, pred=True: barrier.wait(phase) if pred else None,
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=machine.load,
        async_copy_shared_to_global=machine.send,
        store_wait=machine.store_wait,
    )
    hopper = SimpleNamespace(
        fence_async_shared=nothing, mbarrier=barrier, tma=tma, warpgroup_mma=machine.product,
        warpgroup_mma_wait=machine.product_wait,
    )  # fmt: skip
    gluon = SimpleNamespace(jit=jit, language=language)
    return {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
    }


@contextlib.contextmanager
def on_cpu(old="", new=""):
    """A second copy of gluon_forward, which runs on this CPU; its text may be changed in one place."""
    text = inspect.getsource(gluon_forward)
    assert not old or text.count(old) == 1, f"{text.count(old)} places, not one: {old}"
    machine = Machine()
    copy = types.ModuleType("gluon_forward_on_cpu")
    with mock.patch.dict(sys.modules, stand_ins(machine)):
        exec(compile(text.replace(old, new), f"{copy.__name__}.py", "exec"), vars(copy))
    copy.why_not = lambda device: None
    copy.multiprocessors = lambda device: 3
    with machine.engine:
        yield copy
