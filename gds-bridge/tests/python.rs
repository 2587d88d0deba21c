//! The Python module's tests, with the cluster that they need. `gds-bridge/python/test` builds the module and runs this.

#[path = "../../client/tests/common/mod.rs"]
mod common;
mod served;

use std::{path::Path, process::Command};

use served::Served;

#[test]
fn python_loads_and_saves() {
    let Some(python) = std::env::var_os("STRAKE_GDS_PYTHON") else {
        println!("skipped: STRAKE_GDS_PYTHON names no interpreter that has the module: run gds-bridge/python/test");
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
        // What is given to fastsafetensors there is in host memory: on a GPU it wants CUDA's runtime, which the stand-in is not.
        let files: &[&str] =
            if memory == "host" { &["test_bridge.py", "test_fastsafetensors.py"] } else { &["test_bridge.py"] };
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
        // And the page that people read first, as it stands there.
        let page = include_str!("../../docs/gds.md");
        let script = page.split_once("```python\n").unwrap().1.split_once("```").unwrap().0;
        assert!(script.contains("load_safetensors") && script.contains("by_road"), "{script}");
        let run = Command::new(&python)
            .args(["-c", script])
            .envs([("MEMORY", memory), ("POLICY", "at-least:pageable")])
            .env("MDS", &served.mds)
            .env("KEY", &served.key)
            .env("LD_LIBRARY_PATH", served.dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && String::from_utf8_lossy(&run.stdout).contains("pageable"), "{memory}: {said}");
    }
}
