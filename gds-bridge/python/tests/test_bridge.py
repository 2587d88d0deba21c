"""The module against a cluster: STRAKE_MDS and STRAKE_KEY say which. MEMORY is "host" or "cuda:0" (by a stand-in of the driver)."""

import ctypes
import gc
import os
import tempfile
import unittest

import strake_gds

try:
    import numpy as np
except ImportError:
    np = None
try:
    import torch
except ImportError:
    torch = None

MEMORY = os.environ["MEMORY"]
HOST = MEMORY == "host"


def connect(**more):
    # Little is pinned, so that it works under an 8 MiB limit of locked memory.
    return strake_gds.Bridge(os.environ["STRAKE_MDS"], key=os.environ["STRAKE_KEY"], memory=MEMORY, fabric="tcp",
                             pinned_limit=2 << 20, workers=2, slots=2, slot_bytes=256 << 10, **more)


def pattern(n, seed=1):
    return bytes((i * 2654435761 + seed >> 13) & 255 for i in range(n))


class Foreign:
    """Somebody else's tensor on a GPU."""

    def __init__(self, tensor, **changes):
        self.keep = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, **changes}


class Capsules:
    """Somebody else's tensor that speaks DLPack alone."""

    def __init__(self, tensor):
        self.keep = tensor

    def __dlpack__(self, **more):
        return self.keep.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.keep.__dlpack_device__()


class Test(unittest.TestCase):
    def setUp(self):
        self.b = connect()
        tiers = {t["tier"]: t for t in self.b.tiers()["tiers"]}
        self.tier = "bounce-tcp" if tiers["bounce-tcp"]["available"] else "pageable"
        self.name = f"/{MEMORY}-{self._testMethodName}"

    def tearDown(self):
        self.b.close()
        gc.collect()

    def tensor(self, data, shape=None, dtype="U8"):
        t = self.b.alloc(shape or [len(data)], dtype)
        t.frombytes(data)
        return t

    def is_all(self, report, n):
        # Without a policy, whatever is fastest here.
        if report["policy"] != "prefer":
            self.assertEqual(report["by_tier"][self.tier], n)
        self.assertEqual(sum(report["by_tier"].values()), n)
        self.assertEqual(report["asked"], n)

    def test_capsules_of_dlpack(self):
        data = pattern(10_000)
        full, empty = self.tensor(data), self.tensor(bytes(10_000))
        self.is_all(self.b.save_from(Capsules(full), self.name), 10_000)
        self.is_all(self.b.load_into(Capsules(empty), self.name), 10_000)
        self.assertEqual(empty.tobytes(), data)

    @unittest.skipIf(HOST, "needs a driver that can be told to fail")
    def test_a_tier_that_fails_in_the_middle(self):
        try:
            order = ctypes.CDLL("libcuda.so.1").strake_standin_set
        except AttributeError:
            self.skipTest("the driver is not the stand-in")
        order.argtypes = [ctypes.c_int, ctypes.c_long]
        data = pattern(3_000_000)
        self.b.save_from(self.tensor(data), self.name)
        order(13, 50_000)  # pinned memory is the faster one until it fails
        try:
            with connect() as b:
                t = b.alloc([len(data)])
                order(13, 0)
                order(12, 3)
                r = b.load_into(t, self.name)
                order(12, -1)
                self.assertEqual(t.tobytes(), data)
        finally:
            order(12, -1)
            order(13, 0)
        self.is_all(r, len(data))
        self.assertEqual(r["by_tier"]["bounce-tcp"] + r["by_tier"]["pageable"], len(data))
        self.assertTrue(r["by_tier"]["bounce-tcp"] and r["by_tier"]["pageable"], r)
        self.assertEqual([(s["from"], s["to"]) for s in r["switches"]], [("bounce-tcp", "pageable")])
        self.assertEqual(sum(r["by_transport"].values()), len(data))

    def test_copies_on_this_node(self):
        self.b.save_from(self.tensor(pattern(10_000)), self.name)
        with tempfile.TemporaryDirectory() as folder, connect(local=folder, accept_oss_checksum=True) as b:
            tier = next(t for t in b.tiers()["tiers"] if t["tier"] == "local-gds")
            self.assertNotEqual(tier["reason"], "no-folder")
            to = b.alloc([10_000])
            with self.assertRaises(OSError) as e:
                b.load_into(to, self.name, policy="require:local-gds")
            # Where there is no cuFile, or no direct I/O, that is the reason.
            self.assertIn("is not sealed" if tier["available"] else tier["why"], str(e.exception))
            self.assertEqual(sum(b.load_into(to, self.name)["by_tier"].values()), 10_000)
            self.assertEqual(to.tobytes(), pattern(10_000))
            del to

    def test_there_and_back(self):
        data = pattern(1_500_007)
        t = self.tensor(data)
        r = self.b.save_from(t, self.name, policy=f"require:{self.tier}")
        self.is_all(r, len(data))
        self.assertEqual((r["direction"], r["checksum"]), ("save", "at-client"))
        to = self.b.alloc([len(data) - 7])
        self.is_all(self.b.load_into(to, self.name, 7), len(data) - 7)
        self.assertEqual(to.tobytes(), data[7:])
        # Many ranges in one call; the report has them in their order.
        a, b = self.b.alloc([10]), self.b.alloc([1000])
        r = self.b.load([(self.name, 5000, b), (self.name, 3, a)])
        self.assertEqual(r["ranges"], [1000, 10])
        self.assertEqual((a.tobytes(), b.tobytes()), (data[3:13], data[5000:6000]))
        # Two, one behind the other, in place of the old file.
        self.is_all(self.b.save_from([a, b], self.name), 1010)
        to = self.b.alloc([1010])
        self.b.load_into(to, self.name)
        self.assertEqual(to.tobytes(), data[3:13] + data[5000:6000])

    def test_in_the_order_of_a_stream(self):
        data = pattern(1000)
        self.b.save_from(self.tensor(data), self.name, stream=0)
        t = self.b.alloc([995])
        self.is_all(self.b.load([(self.name, 5, t)], stream=0), 995)
        self.assertEqual(t.tobytes(), data[5:])
        t.frombytes(bytes(995))
        call = self.b.start_load([(self.name, 5, t)])
        self.assertIn(call.done, [False, True])
        self.is_all(call.finish(), 995)
        self.assertTrue(call.done)
        self.assertEqual(t.tobytes(), data[5:])
        with self.assertRaisesRegex(ValueError, "finished"):
            call.finish()
        with self.assertRaises(FileNotFoundError):
            self.b.start_load([("/none", 0, t)])
        call = self.b.start_load([(self.name, 500, t)])
        with self.assertRaisesRegex(OSError, "the file ends"):
            call.finish()
        # Let go without a word: it is waited for, and its memory stays until then.
        self.b.start_load([(self.name, 5, t)])

    def test_verify_on_gpu(self):
        data = pattern(700_001)
        self.b.save_from(self.tensor(data), self.name)
        to = self.b.alloc([len(data)])
        r = self.b.load_into(to, self.name)
        self.assertEqual((r["checksum"], r["checksums"], r["not_on_gpu"]), ("at-client", "host", "it was not requested"))
        with connect(verify_on_gpu=True) as b:
            t = b.alloc([len(data)])
            for r in [b.load_into(t, self.name), b.save_from(t, self.name + "2")]:
                self.is_all(r, len(data))
                if HOST:
                    self.assertEqual((r["checksum"], r["checksums"]), ("at-client", "host"))
                    self.assertIn("there is no GPU", r["not_on_gpu"])
                else:
                    self.assertEqual((r["checksum"], r["checksums"], r["not_on_gpu"]), ("on-gpu", "gpu", None))
            self.assertEqual(t.tobytes(), data)

    def test_addresses_and_peek(self):
        data = pattern(100_000)
        t = self.tensor(data)
        self.assertEqual(self.b.memory, MEMORY)
        self.is_all(self.b.save_from((t.ptr + 10, 1000), self.name), 1000)
        self.assertEqual(self.b.peek(self.name), (1000, b""))
        self.assertEqual(self.b.peek(self.name, 990, 1 << 40), (1000, data[1000:1010]))
        self.assertEqual(self.b.peek(self.name, 1001, 5), (1000, b""))
        self.is_all(self.b.load([(self.name, 5, (t.ptr, 4))]), 4)
        self.assertEqual(t.tobytes(), data[15:19] + data[4:])
        with self.assertRaises(FileNotFoundError):
            self.b.peek(self.name + "none")
        for bad in [(t.ptr,), (t.ptr, -1), ("x", 1)]:
            with self.assertRaises((TypeError, ValueError, OverflowError)):
                self.b.load_into(bad, self.name)
        if not HOST:
            with self.assertRaises(OSError):
                self.b.load_into((4096, 10), self.name)

    def test_errors(self):
        t = self.tensor(b"0123456789")
        with self.assertRaises(FileNotFoundError):
            self.b.load_into(t, self.name)
        self.b.save_from(t, self.name)
        with self.assertRaises(OSError) as e:
            self.b.load_into(t, self.name, 5)
        self.assertIn("the file ends after", str(e.exception))
        self.assertEqual(e.exception.report["asked"], 10)
        with self.assertRaises(OSError) as e:
            self.b.load_into(t, self.name, policy="require:gpu-rdma")
        self.assertIn("gpu-rdma", str(e.exception))
        self.assertEqual(sum(e.exception.report["by_tier"].values()), 0)
        with strake_gds.Bridge(os.environ["STRAKE_MDS"], key=os.environ["STRAKE_KEY"], memory=MEMORY, policy="require:gpu-rdma") as strict:
            with self.assertRaises(OSError) as e:
                strict.load_into(strict.alloc([10]), self.name)
            self.assertIn("gpu-rdma", str(e.exception))
        for bad in ["best", "require:rdma"]:
            with self.assertRaises(OSError):
                self.b.load_into(t, self.name, policy=bad)
        for bad in [None, 5, b"bytes", "text", object()]:
            with self.assertRaises(TypeError):
                self.b.load_into(bad, self.name)
        with self.assertRaises(ValueError):
            self.b.alloc([1], "F33")
        with self.assertRaises(ValueError):
            t.frombytes(b"short")
        with self.assertRaises(OSError):
            strake_gds.Bridge(os.environ["STRAKE_MDS"], key=os.environ["STRAKE_KEY"], memory="gpu")
        with self.assertRaises(FileNotFoundError):
            strake_gds.Bridge(os.environ["STRAKE_MDS"], key="/none", memory=MEMORY)
        self.b.close()
        self.assertEqual(t.tobytes(), b"0123456789")  # a tensor outlives its bridge
        with self.assertRaises(ValueError):
            self.b.alloc([1])

    def test_safetensors(self):
        w, e = pattern(4 * 600 * 100), pattern(2 * 33, 7)
        model = {"w": self.tensor(w, [600, 100], "F32"), "e": self.tensor(e, [33], "BF16")}
        self.is_all(self.b.save_safetensors(model, self.name, {"format": "pt"}), len(w) + len(e))
        self.b.save_safetensors({"z": model["e"]}, self.name + "2")
        h = self.b.header(self.name)
        self.assertEqual(h["metadata"], {"format": "pt"})
        self.assertEqual(h["tensors"]["w"], {"dtype": "F32", "shape": [600, 100], "bytes": len(w)})
        loaded, r = self.b.load_safetensors([self.name, self.name + "2"], policy=f"require:{self.tier}")
        self.is_all(r, len(w) + 2 * len(e))
        self.assertEqual(sorted(loaded), ["e", "w", "z"])
        self.assertEqual((loaded["w"].dtype, loaded["w"].shape), ("F32", (600, 100)))
        self.assertEqual((loaded["w"].tobytes(), loaded["z"].tobytes()), (w, e))
        with self.assertRaises(ValueError):
            self.b.load_safetensors([self.name, self.name])
        to = self.b.alloc([33], "BF16")
        self.is_all(self.b.load_safetensors_into({"e": to}, self.name), len(e))
        self.assertEqual(to.tobytes(), e)
        with self.assertRaises(KeyError):
            self.b.load_safetensors_into({"f": to}, self.name)
        with self.assertRaises(OSError) as err:
            self.b.load_safetensors_into({"w": to}, self.name)
        self.assertIn("tensor 'w' has 240000 bytes", str(err.exception))
        self.b.save_from(to, self.name)
        with self.assertRaises(OSError) as err:
            self.b.load_safetensors(self.name)
        self.assertIn("not a safetensors file", str(err.exception))

    @unittest.skipUnless(HOST and np, "needs host memory and numpy")
    def test_numpy(self):
        a = np.arange(300_000, dtype=np.float32).reshape(3, 100_000)
        self.is_all(self.b.save_safetensors({"a": a}, self.name), a.nbytes)
        out = np.zeros_like(a)
        self.b.load_safetensors_into({"a": out}, self.name)
        self.assertTrue((a == out).all())
        # Ours as numpy's, without a copy, alive without the bridge.
        t = self.b.load_safetensors(self.name)[0]["a"]
        x = np.from_dlpack(t)
        address = t.ptr
        self.assertEqual((x.__array_interface__["data"][0], x.dtype, x.shape), (address, np.float32, (3, 100_000)))
        del t
        self.b.close()
        gc.collect()
        self.assertTrue((x == a).all())
        with self.assertRaises(BufferError):
            np.from_dlpack(connect().alloc([2], "F4"))

    @unittest.skipUnless(HOST and np, "needs host memory and numpy")
    def test_numpy_that_cannot_be(self):
        self.b.save_from(np.zeros(8, np.uint8), self.name)
        with self.assertRaises(BufferError):
            self.b.load_into(np.zeros((4, 4), np.uint8)[:, :2], self.name)
        fixed = np.zeros(8, np.uint8)
        fixed.flags.writeable = False
        with self.assertRaises(BufferError):
            self.b.load_into(fixed, self.name)
        self.b.save_from(np.zeros((0, 3)), self.name)
        self.assertEqual(self.b.load_into(np.zeros(0), self.name)["asked"], 0)

    @unittest.skipUnless(HOST and torch, "needs host memory and PyTorch")
    def test_pytorch(self):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 7).to(torch.bfloat16))
        model = net.state_dict()  # with a counter that has no dimension
        model["mask"] = torch.arange(17) % 3 == 0
        model["none"] = torch.empty(0, 5, dtype=torch.float16)
        model["c"] = torch.randn(9, dtype=torch.complex64).real.contiguous()
        n = sum(t.nbytes for t in model.values())
        self.is_all(self.b.save_safetensors(model, self.name, {"format": "pt"}), n)
        loaded, r = self.b.load_safetensors(self.name, policy=f"require:{self.tier}")
        self.is_all(r, n)
        tensors = {k: torch.from_dlpack(t) for k, t in loaded.items()}
        self.assertEqual(sorted(tensors), sorted(model))
        for k, t in model.items():
            self.assertEqual((tensors[k].dtype, tensors[k].shape, tensors[k].device), (t.dtype, t.shape, t.device))
            self.assertTrue(torch.equal(tensors[k], t), k)
        # The same memory, whoever lets go first.
        self.assertEqual(tensors["0.weight"].data_ptr(), loaded["0.weight"].ptr)
        del loaded
        gc.collect()
        # Into a model that is there, in place.
        other = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 7).to(torch.bfloat16))
        self.b.load_safetensors_into(other.state_dict(), self.name)
        for k, t in net.state_dict().items():
            self.assertTrue(torch.equal(other.state_dict()[k], t), k)
        # What the safetensors library reads is the same.
        try:
            import safetensors.torch
        except ImportError:
            pass
        else:
            size, _ = self.b.peek(self.name)
            raw = self.b.alloc([size])
            self.b.load_into(raw, self.name)
            theirs = safetensors.torch.load(raw.tobytes())
            self.assertTrue(all(torch.equal(theirs[k], t) for k, t in model.items()) and len(theirs) == len(model))
        self.b.close()
        self.assertTrue(torch.equal(tensors["0.weight"], model["0.weight"]))

    @unittest.skipUnless(HOST and torch, "needs host memory and PyTorch")
    def test_pytorch_that_cannot_be(self):
        with self.assertRaises(BufferError):
            self.b.save_from(torch.zeros(8, 8).t()[1:], self.name)
        with self.assertRaisesRegex(BufferError, "detach"):
            self.b.save_safetensors({"w": torch.nn.Linear(3, 3).weight}, self.name)
        with self.assertRaises(FileNotFoundError):
            self.b.peek(self.name)

    @unittest.skipIf(HOST, "needs a GPU, or what stands in for it")
    def test_array_interface(self):
        data = pattern(600)
        t = self.tensor(data, [10, 15], "F32")
        i = t.__cuda_array_interface__
        self.assertEqual((i["shape"], i["typestr"], i["data"], i["strides"]), ((10, 15), "<f4", (t.ptr, False), None))
        self.assertEqual(t.__dlpack_device__(), (2, 0))
        self.is_all(self.b.save_safetensors({"f": Foreign(t)}, self.name), 600)
        self.assertEqual(self.b.header(self.name)["tensors"]["f"]["shape"], [10, 15])
        to = self.b.alloc([600])
        self.b.load_safetensors_into({"f": Foreign(to)}, self.name)
        self.assertEqual(to.tobytes(), data)
        self.b.load_safetensors_into({"f": Foreign(t, strides=(60, 4))}, self.name)
        for changes, error in [({"strides": (4, 40)}, BufferError), ({"data": (t.ptr, True)}, BufferError),
                               ({"data": (4096, False)}, OSError), ({"typestr": "x"}, TypeError)]:
            with self.assertRaises(error):
                self.b.load_safetensors_into({"f": Foreign(t, **changes)}, self.name)
        with self.assertRaises(AttributeError):
            self.b.alloc([2], "BF16").__cuda_array_interface__
        if np:
            with self.assertRaises(TypeError):
                self.b.load_into(np.zeros(4, np.uint8), self.name)

    @unittest.skipUnless(HOST, "about host memory")
    def test_host_memory_is_no_gpu(self):
        t = self.b.alloc([4])
        self.assertFalse(hasattr(t, "__cuda_array_interface__"))
        self.assertEqual(t.__dlpack_device__(), (1, 0))
        with self.assertRaises(TypeError):
            self.b.load_into(type("X", (), {"__cuda_array_interface__": {
                "data": (4096, False), "shape": (1,), "typestr": "|u1"}})(), self.name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
