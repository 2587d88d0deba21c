"""A copier for fastsafetensors (made for 0.5.0): its loaders then get their tensors by a load of the bridge. See docs/gds.md.

    from fastsafetensors.parallel_loader import PipelineParallel
    from strake_gds.fastsafetensors import Loader

    loader = Loader(bridge, device="cuda:0", policy="at-least:bounce-tcp")
    for name, tensor in PipelineParallel(None, loader, files).iterate_weights():
        ...
    print(loader.reports[-1]["by_tier"])

`files` are paths in the file system; nothing has to be mounted. Programs that make fastsafetensors' own loaders, and open
the files on a mount, get the same by `take_over`.
"""

import os
import threading

from fastsafetensors.common import SafeTensorsMetadata
from fastsafetensors.copier import CopierInterface, register_copier_constructor
from fastsafetensors.copier.base import validated_byte_ranges
from fastsafetensors.copier.nogds import load_library_func
from fastsafetensors.frameworks import get_framework_op
from fastsafetensors.loader import BaseSafeTensorsFileLoader
from fastsafetensors.st_types import DeviceType, DType

__all__ = ["NAME", "Copier", "Loader", "take_over"]

#: What the copier is called among fastsafetensors'.
NAME = "strakefs"

#: A longer header is no header, here as in the format's own library.
_LONGEST_HEADER = 100_000_000


def _inside(path, mount):
    """The path from the root of the file system of a path on its mount; without a mount it is one already. `ValueError`: it
    is elsewhere."""
    if mount is None:
        return path
    inside = os.path.relpath(os.path.abspath(path), os.path.abspath(mount))
    if inside == os.pardir or inside.startswith(os.pardir + os.sep):
        raise ValueError(f"{path} is not under the mount {mount}")
    return "/" + inside


class _Calls:
    """What the copiers of one loader were asked for. It waits until the first of them is waited for, so that all files go
    into one call."""

    def __init__(self, bridge, policy, told):
        self.bridge, self.policy, self.told = bridge, policy, told
        self.waiting = []
        self.lock = threading.Lock()

    def add(self, copier):
        with self.lock:
            self.waiting.append(copier)

    def run(self):
        with self.lock:
            copiers, self.waiting = self.waiting, []
            items = [item for c in copiers for item in c.items]
            if not items:
                return
            try:
                report = self.bridge.load(items, policy=self.policy)
            except BaseException as e:
                # Of all of them: which bytes are missing is in its report, but no tensor is to be made of any.
                for c in copiers:
                    c.error = e
                report = getattr(e, "report", None)
        if report is not None:
            self.told(report)


class Copier(CopierInterface):
    """One file for one `copy_files_to_device`. Sub-file chunks (`max_batch_bytes`, `device_memory_budget`) are refused, as
    fastsafetensors does for a copier that has none; a filter of tensors leaves the others' bytes unread."""

    def __init__(self, metadata, device, framework, calls, mount):
        self.metadata, self.device, self.framework = metadata, device, framework
        self.calls = calls
        self.path = _inside(metadata.src, mount)
        self.ranges = None
        self.items = []
        self.error = None

    def set_byte_ranges(self, byte_ranges):
        self.ranges = validated_byte_ranges(self.metadata, byte_ranges)

    def submit_io(self, use_buf_register, max_copy_block_size):
        start, end = self.metadata.header_length, self.metadata.size_bytes
        # A place of its own even where nothing is in it.
        buffer = self.framework.alloc_tensor_memory(max(end - start, 1), self.device)
        base = buffer.get_base_address() - start
        ranges = [(start, end)] if self.ranges is None else self.ranges
        self.items = [(self.path, a, (base + a, b - a)) for a, b in ranges if a < b]
        self.calls.add(self)
        return buffer

    def finish_io(self):
        # Begun or not: when this returns nothing writes to the buffer any more.
        self.calls.run()
        if self.error is not None:
            raise self.error

    def wait_io(self, gbuf, dtype=DType.AUTO, noalign=False, owner=None):
        self.finish_io()
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype=dtype, owner=owner)


def _fits(bridge, device):
    memory = bridge.memory
    if device.type == DeviceType.CPU:
        fits = memory == "host"
    else:
        fits = memory.startswith("cuda:") and device.index in (None, int(memory[5:]))
    if not fits:
        raise ValueError(f"the loader is for {device.as_str()}, and the bridge for {memory}")


def _constructor(device, bridge, policy="prefer", mount=None, told=None, framework=None, **_):
    _fits(bridge, device)
    load_library_func(framework)
    calls = _Calls(bridge, policy, told or (lambda report: None))
    return lambda metadata, device, framework: Copier(metadata, device, framework, calls, mount)


register_copier_constructor(NAME, Copier)(_constructor)


def take_over(bridge, mount, *, policy="prefer", told=None, names=("gds", "nogds")):
    """From here on, fastsafetensors' own loaders load by the bridge: those of programs that cannot be told another one. Their
    files are opened on `mount` for the headers; a file elsewhere is a `ValueError`. `names`: the copiers that are replaced.
    `told` is called with the report of each load, a failed one too."""

    def construct(device, **more):
        kept = {**more, "bridge": bridge, "policy": policy, "mount": mount, "told": told}
        return _constructor(device, **kept)

    for name in names:
        register_copier_constructor(name, Copier)(construct)


class Loader(BaseSafeTensorsFileLoader):
    """A loader of fastsafetensors over a bridge, for the same device. Headers come by the bridge's client as well. With
    `mount`, paths are those on the mount. `reports` has the report of each load, a failed one too. Everything else is
    fastsafetensors'."""

    def __init__(self, bridge, device="cpu", pg=None, *, policy="prefer", mount=None, framework="pytorch", **more):
        self.bridge, self.mount, self.reports = bridge, mount, []
        op = get_framework_op(framework)
        # Before anything of fastsafetensors' asks about the device.
        load_library_func(op)
        device = op.get_device(device, op.get_process_group(pg))
        kept = {"bridge": bridge, "policy": policy, "mount": mount, "told": self.reports.append}
        super().__init__(pg, device, NAME, framework=framework, **{**more, **kept})

    def add_filenames(self, filenames):
        for rank, paths in filenames.items():
            for path in paths:
                metadata = self._header(path)
                self.meta[path] = (metadata, rank)
                self.frames.update(metadata.tensors)

    def _header(self, path):
        inside = _inside(path, self.mount)
        size, head = self.bridge.peek(inside, 0, 8)
        n = int.from_bytes(head, "little")
        if len(head) < 8 or n > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is not a safetensors file: a header of {n} bytes in a file of {size}")
        _, text = self.bridge.peek(inside, 8, n)
        return SafeTensorsMetadata(text.decode(), n + 8, size, self.framework, path)
