"""A safetensors file into GPU memory: by PyTorch and safetensors, by fastsafetensors (both from a local file), and by the bridge. Called by main.py:
loaders.py FOLDER DEVICE MIB MDS KEY POLICY [WHEEL]; DEVICE is `host` for this machine's own memory in place of a GPU. JSON on standard output; 77 where PyTorch
or a GPU is missing. What is missing beside is said in place of its figure."""

import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20


def skip(why):
    print(why, file=sys.stderr)
    sys.exit(77)


def module(name):
    try:
        return importlib.import_module(name)
    except ImportError as e:
        return str(e)


def digest(tensors):
    return {k: hashlib.sha256(v.cpu().numpy().tobytes()).hexdigest() for k, v in sorted(tensors.items())}


def main():
    folder, device, mib, mds, key, policy, wheel = (sys.argv[1:] + [""])[:7]
    torch = module("torch")
    if isinstance(torch, str):
        skip(f"PyTorch is not installed ({torch})")
    on_gpu = device != "host"
    if on_gpu and not torch.cuda.is_available():
        skip("PyTorch finds no GPU")
    save = module("safetensors.torch")
    if isinstance(save, str):
        skip(f"safetensors is not installed ({save})")
    place, count = f"cuda:{device}" if on_gpu else "cpu", 16
    settle = torch.cuda.synchronize if on_gpu else lambda: None
    each = max(1, int(mib) // count) * MIB // 4
    whole = {f"t{i}": torch.randn(each, generator=torch.Generator().manual_seed(i)) for i in range(count)}
    n, want, figures = count * each * 4, digest(whole), {}

    def measure(what, load):
        settle()
        begun = time.monotonic()
        tensors, end = load()
        settle()
        took = time.monotonic() - begun
        if digest(tensors) != want:
            sys.exit(f"{what}: what arrived differs")
        figures[what] = n / took
        end()

    with tempfile.TemporaryDirectory(dir=folder) as d:
        path = str(Path(d) / "model.safetensors")
        save.save_file(whole, path)
        measure("safetensors.torch.load_file, a local file", lambda: (save.load_file(path, device=place), lambda: None))
        fast = module("fastsafetensors")
        if isinstance(fast, str):
            figures["fastsafetensors, a local file"] = f"not run: {fast}"
        else:
            measure("fastsafetensors, a local file", lambda: by_fast(fast, path, place, want))
    bridge = ours(wheel)
    what = "strake_gds.load_safetensors, storage servers in memory"
    if isinstance(bridge, str):
        figures[what] = f"not run: {bridge}"
    else:
        b = bridge.Bridge(mds, key=key, memory=place if on_gpu else "host", policy=policy)
        b.stripe_folder("/")
        on_device = {k: v.to(place) for k, v in whole.items()}
        settle()
        begun = time.monotonic()
        b.save_safetensors(on_device, "/model.safetensors")
        figures["strake_gds.save_safetensors with fsync and rename"] = n / (time.monotonic() - begun)
        del on_device

        def load():
            tensors, _ = b.load_safetensors(["/model.safetensors"])
            return {k: torch.from_dlpack(v) for k, v in tensors.items()}, lambda: None

        measure(what, load)
        b.close()
    print(json.dumps({"bytes": n, "figures": figures}))


def by_fast(fast, path, place, names):
    loader = fast.SafeTensorsFileLoader(fast.SingleGroup(), place, nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    return {k: buffers.get_tensor(k) for k in names}, lambda: (buffers.close(), loader.close())


def ours(wheel):
    """The module, from the wheel that was packed where it is not installed."""
    found = module("strake_gds")
    if isinstance(found, str) and wheel:
        target = tempfile.mkdtemp()
        r = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, wheel], capture_output=True, text=True)
        if r.returncode != 0:
            return r.stderr.strip()[-300:]
        sys.path.insert(0, target)
        importlib.invalidate_caches()
        found = module("strake_gds")
    return found


main()
