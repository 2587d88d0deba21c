//! The Python module's tests, with the cluster that they need. `gds-bridge/python/test` builds the
//! module and runs this.

use std::{path::Path, process::Command};

use crate::served::Served;

#[test]
fn python_loads_and_saves() {
    let Some(python) = std::env::var_os("STRAKE_GDS_PYTHON") else {
        println!(
            "skipped: STRAKE_GDS_PYTHON names no interpreter that has the module: run gds-bridge/python/test"
        );
        return;
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let served = Served::new(3);
    let cc = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-pthread", "-o"])
        .arg(served.dir.path().join("libcuda.so.1"))
        .arg(here.join("tests/standin/libcuda.c"))
        .status();
    let standin = cc.is_ok_and(|s| s.success());
    for memory in ["host", "cuda:0"] {
        if memory != "host" && !standin {
            println!("skipped: no C compiler for the stand-in of the driver");
            continue;
        }
        // fastsafetensors is tested with host memory only: for a GPU it needs the CUDA runtime,
        // which the stand-in does not provide.
        let files: &[&str] = if memory == "host" {
            &["test_bridge.py", "test_fastsafetensors.py"]
        } else {
            &["test_bridge.py"]
        };
        for file in files {
            let run = Command::new(&python)
                .arg(here.join("python/tests").join(file))
                .env("MEMORY", memory)
                .env("STRAKE_MDS", &served.mds)
                .env("STRAKE_KEY", &served.key)
                .env("LD_LIBRARY_PATH", served.dir.path())
                .output()
                .unwrap();
            let said = [run.stdout, run.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
            println!("== {file}, {memory}\n{}{}", said[0], said[1]);
            assert!(run.status.success(), "{file}, {memory}");
        }
        for (modules, script) in page(&served, memory) {
            let run = |script: &str| {
                let mut python = Command::new(&python);
                python.args(["-c", script]).env("LD_LIBRARY_PATH", served.dir.path());
                python.envs([
                    ("MEMORY", memory),
                    ("POLICY", "at-least:pageable"),
                    ("MDS", &served.mds),
                ]);
                python.env("KEY", &served.key).output().unwrap()
            };
            if !run(modules).status.success() {
                println!("skipped: a part of the page, because `{modules}` fails here");
                continue;
            }
            let (out, said) = (run(&script), format!("{memory}:\n{script}"));
            assert!(out.status.success(), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
            assert!(String::from_utf8_lossy(&out.stdout).contains("pageable"), "{said}");
        }
    }
}

/// The Python blocks of the page: for each, the imports it needs beside the module, and its text
/// with the names of this cluster filled in.
fn page(served: &Served, memory: &str) -> Vec<(&'static str, String)> {
    let page = include_str!("../../../docs/gds.md");
    let blocks: Vec<&str> =
        page.split("```python\n").skip(1).map(|b| b.split_once("```").unwrap().0).collect();
    // The second one is tested in tools/tests/it/gds_local.rs.
    let [first, copies, torch, fast] = blocks[..] else {
        panic!("{} blocks in Python: are all tested?", blocks.len())
    };
    assert!(
        first.contains("by_transport")
            && copies.contains("local-gds")
            && fast.contains("PipelineParallel")
    );
    let mut all = vec![("pass", first.to_string())];
    if memory == "host" {
        let (mds, key) = (&served.mds, served.key.display());
        let here = |block: &str| {
            let names = [
                ("at-least:bounce-tcp", "at-least:pageable"),
                ("/m/", "/m-"),
                ("/ckpt/", "/ckpt-"),
            ];
            names.iter().fold(block.to_string(), |block, (from, to)| block.replacen(from, to, 2))
        };
        let bridge = format!("\"{mds}\", key=\"{key}\", memory=\"host\"");
        let model = format!(
            "import strake_gds\nb = strake_gds.Bridge({bridge})\n\
             b.save_safetensors({{'w': b.alloc([5, 7], 'F32')}}, '/m-1.safetensors')\n\
             b.save_safetensors({{'x': b.alloc([3], 'I64')}}, '/m-2.safetensors')\n"
        );
        let torch = here(torch).replace("\"mds1,mds2,mds3\", memory=\"cuda:0\"", &bridge);
        let fast = here(fast).replace("device=\"cuda:0\", ", "");
        assert!(torch.contains(&bridge) && fast.contains("Loader(b, policy"), "{torch}{fast}");
        all.push(("import torch", model.clone() + &torch));
        all.push(("import torch, fastsafetensors", model + &fast));
    }
    all
}
