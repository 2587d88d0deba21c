"""strake_gds.fastsafetensors against a cluster, in host memory: STRAKE_MDS and STRAKE_KEY say which. Needs fastsafetensors, and PyTorch or Paddle for it
(their builds for processors do); without, it is skipped with the reason."""

import gc
import importlib
import os
import tempfile
import unittest

import strake_gds

try:
    import fastsafetensors
    import numpy as np
    missing = None
except ImportError as e:
    missing = str(e)

FRAMEWORK = None
if not missing:
    for name, module in [("pytorch", "torch"), ("paddle", "paddle")]:
        try:
            importlib.import_module(module)
            FRAMEWORK = FRAMEWORK or name
        except ImportError as e:
            missing = str(e)
    if FRAMEWORK:
        missing = None
        from fastsafetensors.parallel_loader import PipelineParallel
        from fastsafetensors.st_types import Device, DeviceType
        from strake_gds.fastsafetensors import Loader, _fits, take_over


@unittest.skipIf(missing, missing)
class Test(unittest.TestCase):
    def setUp(self):
        # Little is pinned, so that it works under an 8 MiB limit of locked memory.
        self.b = strake_gds.Bridge(os.environ["STRAKE_MDS"], key=os.environ["STRAKE_KEY"], memory="host", fabric="tcp",
                                   pinned_limit=2 << 20, workers=2, slots=2, slot_bytes=256 << 10)
        tiers = {t["tier"]: t for t in self.b.tiers()["tiers"]}
        self.tier = "bounce-tcp" if tiers["bounce-tcp"]["available"] else "pageable"
        name = f"/fst-{self._testMethodName}"
        self.model = {
            "w": np.arange(300_000, dtype=np.float32).reshape(300, 1000),
            "e": np.arange(33, dtype=np.int32),
            "z": np.arange(2_000_001, dtype=np.int64).astype(np.uint8),
        }
        self.files = [name + "-1.safetensors", name + "-2.safetensors"]
        self.b.save_safetensors({n: self.model[n] for n in ["w", "e"]}, self.files[0])
        self.b.save_safetensors({"z": self.model["z"]}, self.files[1])
        self.bytes = sum(a.nbytes for a in self.model.values())
        self.live = fastsafetensors.live_allocation_count()

    def tearDown(self):
        self.b.close()
        gc.collect()
        self.assertEqual(fastsafetensors.live_allocation_count(), self.live)

    def is_model(self, tensors):
        self.assertEqual(sorted(tensors), sorted(self.model))
        for name, t in tensors.items():
            a = t.numpy()
            self.assertEqual((a.dtype, a.shape), (self.model[name].dtype, self.model[name].shape))
            self.assertTrue((a == self.model[name]).all(), name)

    def is_report(self, r, n):
        self.assertEqual((r["direction"], r["asked"], r["by_tier"][self.tier]), ("load", n, n))
        self.assertEqual(sum(r["by_tier"].values()), n)

    def test_loader(self):
        loader = Loader(self.b, framework=FRAMEWORK, policy=f"require:{self.tier}")
        loader.add_filenames({0: self.files})
        self.assertEqual(loader.get_shape("w"), [300, 1000])
        buffers = loader.copy_files_to_device()
        # Two files, one call, and every byte by the bridge.
        self.assertEqual(len(loader.reports), 1)
        self.is_report(loader.reports[0], self.bytes)
        tensors = {n: buffers.get_tensor(n) for n in loader.get_keys()}
        # They outlive all that they came by.
        buffers.close()
        loader.close()
        self.b.close()
        del buffers, loader
        gc.collect()
        self.is_model(tensors)

    def test_what_is_filtered_out_is_not_read(self):
        loader = Loader(self.b, framework=FRAMEWORK, policy=f"require:{self.tier}")
        loader.add_filenames({0: self.files})
        loader.set_tensor_filter(lambda n: n == "e")
        buffers = loader.copy_files_to_device()
        self.is_report(loader.reports[0], self.model["e"].nbytes)
        self.assertTrue((buffers.get_tensor("e").numpy() == self.model["e"]).all())
        buffers.close()
        loader.close()

    def test_pipeline(self):
        loader = Loader(self.b, framework=FRAMEWORK)
        pipeline = PipelineParallel(None, loader, self.files, use_tqdm_on_load=False)
        self.is_model(dict(pipeline.iterate_weights()))
        self.assertEqual([r["asked"] for r in loader.reports], [self.bytes - 2_000_001, 2_000_001])
        pipeline.close()

    def test_errors(self):
        loader = Loader(self.b, framework=FRAMEWORK, policy="require:gpu-rdma")
        loader.add_filenames({0: self.files})
        with self.assertRaises(OSError) as e:
            loader.copy_files_to_device()
        self.assertIn("gpu-rdma", str(e.exception))
        self.assertEqual(e.exception.report["asked"], self.bytes)
        self.assertEqual([sum(r["by_tier"].values()) for r in loader.reports], [0])
        with self.assertRaises(FileNotFoundError):
            loader.add_filenames({0: ["/none"]})
        self.b.save_from(np.full(9, 255, np.uint8), self.files[0])
        with self.assertRaises(ValueError):
            loader.add_filenames({0: [self.files[0]]})
        del e
        loader.close()
        for device in [Device(DeviceType.CUDA, 0), Device(DeviceType.GPU, None)]:
            with self.assertRaises(ValueError):
                _fits(self.b, device)

    def test_take_over(self):
        reports = []
        with tempfile.TemporaryDirectory() as mount:
            local = [mount + f for f in self.files]
            for path, inside in zip(local, self.files):
                # In place of a mount: the headers, and zeros where the tensors are. Who sees tensors has them by the bridge.
                size, head = self.b.peek(inside, 0, 8)
                _, text = self.b.peek(inside, 8, int.from_bytes(head, "little"))
                with open(path, "wb") as f:
                    f.write(head + text)
                    f.truncate(size)
            take_over(self.b, mount, policy=f"require:{self.tier}", told=reports.append)
            for nogds in [False, True]:
                loader = fastsafetensors.SafeTensorsFileLoader(None, "cpu", nogds=nogds, framework=FRAMEWORK)
                loader.add_filenames({0: local})
                buffers = loader.copy_files_to_device()
                self.is_model({n: buffers.get_tensor(n) for n in loader.get_keys()})
                self.is_report(reports.pop(), self.bytes)
                self.assertEqual(reports, [])
                buffers.close()
                loader.close()
            with tempfile.TemporaryDirectory() as other:
                elsewhere = other + "/x.safetensors"
                os.rename(local[0], elsewhere)
                loader = fastsafetensors.SafeTensorsFileLoader(None, "cpu", framework=FRAMEWORK)
                loader.add_filenames({0: [elsewhere]})
                with self.assertRaises(ValueError):
                    loader.copy_files_to_device()
                loader.close()


if __name__ == "__main__":
    print(f"fastsafetensors: {missing or f'{fastsafetensors.__version__} with {FRAMEWORK}'}")
    unittest.main(verbosity=2)
