#!/usr/bin/env python3
"""The parts of `programs` that are Python. usage: programs.py sqlite|data FOLDER"""
import hashlib, io, multiprocessing, os, random, signal, sqlite3, sys, tarfile, time


def sqlite_writer(path, i, rows, ready):
    db = sqlite3.connect(path, timeout=60, isolation_level=None)
    ready.set()
    for n in range(rows):
        db.execute("begin immediate")
        db.execute("insert into t values (?, ?, ?)", (i, n, random.randbytes(500)))
        db.execute("update sums set n = n + 1 where w = ?", (i,))
        db.execute("commit")


def sqlite(folder):
    for mode in ["delete", "truncate", "persist", "wal"]:
        path = f"{folder}/many-{mode}.db"
        db = sqlite3.connect(path, timeout=60, isolation_level=None)
        assert db.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode
        db.execute("create table t (w, n, data)")
        db.execute("create table sums (w primary key, n)")
        db.executemany("insert into sums values (?, 0)", [(i,) for i in range(4)])
        ready = multiprocessing.Event()
        writers = [multiprocessing.Process(target=sqlite_writer, args=(path, i, 20, ready)) for i in range(3)]
        victim = multiprocessing.Process(target=sqlite_writer, args=(path, 3, 1_000_000, ready))
        [w.start() for w in writers + [victim]]
        ready.wait()
        while db.execute("select n from sums where w = 3").fetchone()[0] < 10:
            time.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)
        [w.join() for w in writers]
        assert [w.exitcode for w in writers] == [0, 0, 0], mode
        assert db.execute("pragma integrity_check").fetchone()[0] == "ok", mode
        told = dict(db.execute("select w, n from sums"))
        assert told == dict(db.execute("select w, count(*) from t group by w")), mode
        assert [told[i] for i in range(3)] == [20] * 3, (mode, told)
        db.close()


def parquet(folder):
    import duckdb, numpy as np, pyarrow as pa, pyarrow.dataset as ds, pyarrow.feather as feather, pyarrow.parquet as pq
    r = np.random.default_rng(1)
    table = pa.table({"k": np.arange(300_000), "v": r.random(300_000), "s": [f"s{i % 977}" for i in range(300_000)]})
    pq.write_table(table, f"{folder}/t.parquet", row_group_size=20_000)
    for mapped in [True, False]:
        assert pq.read_table(f"{folder}/t.parquet", memory_map=mapped).equals(table)
    feather.write_feather(table, f"{folder}/t.arrow", compression="uncompressed")
    assert feather.read_table(f"{folder}/t.arrow", memory_map=True).equals(table)
    ds.write_dataset(table, f"{folder}/parts", format="parquet", partitioning=["s"], max_partitions=2000)
    assert ds.dataset(f"{folder}/parts", partitioning=["s"]).count_rows() == 300_000
    db = duckdb.connect(f"{folder}/d.duckdb")
    db.execute(f"create table t as select * from '{folder}/t.parquet'")
    db.execute("create index i on t(k); checkpoint; delete from t where k % 3 = 0; update t set v = v + 1 where k % 7 = 0")
    total = "select count(*), sum(k), round(sum(v), 3) from t"
    before = db.execute(total).fetchone()
    assert before[0] == 200_000
    db.close()
    db = duckdb.connect(f"{folder}/d.duckdb")
    assert db.execute(total).fetchone() == before
    db.execute(f"copy t to '{folder}/out.parquet'")
    assert db.execute(f"select count(*) from '{folder}/out.parquet'").fetchone()[0] == 200_000
    db.close()


def shards(folder):
    import webdataset as wds
    r, samples = random.Random(2), {}
    for i in range(600):
        samples[f"{i:06d}"] = (r.randbytes(r.randrange(20_000)), i % 10)
    with wds.ShardWriter(f"{folder}/shard-%03d.tar", maxcount=100, verbose=0) as w:
        for key, (data, label) in samples.items():
            w.write({"__key__": key, "bin": data, "cls": label})
    names = sorted(f"{folder}/{n}" for n in os.listdir(folder) if n.endswith(".tar"))
    assert len(names) == 6
    seen = {}
    for s in wds.WebDataset(names, shardshuffle=False).decode():
        seen[s["__key__"]] = (s["bin"], s["cls"])
    assert seen == samples


def tensors(folder):
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file
    r = np.random.default_rng(3)
    all_ = {f"layer{i}.weight": r.standard_normal((256, 1000 + i), dtype=np.float32) for i in range(20)}
    save_file(all_, f"{folder}/model.safetensors")
    for name, value in load_file(f"{folder}/model.safetensors").items():
        assert np.array_equal(value, all_[name])
    with safe_open(f"{folder}/model.safetensors", framework="numpy") as f:
        assert np.array_equal(f.get_slice("layer7.weight")[10:20, 5:500], all_["layer7.weight"][10:20, 5:500])
    m = np.memmap(f"{folder}/map.bin", dtype=np.float64, mode="w+", shape=(1000, 500))
    m[:] = all_["layer0.weight"][0, 0]
    m[500] = np.arange(500)
    m.flush()
    assert np.array_equal(np.fromfile(f"{folder}/map.bin").reshape(1000, 500)[500], np.arange(500))
    np.savez_compressed(f"{folder}/z.npz", **all_)
    with np.load(f"{folder}/z.npz") as z:
        assert all(np.array_equal(z[k], all_[k]) for k in all_)


def data(folder):
    for f in [parquet, shards, tensors]:
        at = f"{folder}/{f.__name__}"
        os.mkdir(at)
        f(at)


{"sqlite": sqlite, "data": data}[sys.argv[1]](sys.argv[2])
