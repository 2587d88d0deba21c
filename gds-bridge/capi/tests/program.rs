//! A C program that uses the library, compiled here, with the in-memory cluster behind real
//! sockets.

#[path = "../../../client/tests/it/common/mod.rs"]
mod common;
#[path = "../../tests/it/served/mod.rs"]
mod served;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use common::{join, user};
use served::Served;

/// Path of the shared library that was built for this test.
fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let found = [deps.join("libstrakegds.so"), deps.parent().unwrap().join("libstrakegds.so")];
    found.into_iter().find(|p| p.exists()).expect("cargo builds it with the test")
}

/// Compiles `source`. Prints a message and returns `None` where there is no compiler.
fn compile(source: &str, to: &Path, cpp: bool) -> Option<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new(if cpp { "c++" } else { "cc" });
    cc.args(if cpp { &["-x", "c++", "-std=c++14"][..] } else { &["-std=c11", "-D_GNU_SOURCE"] });
    cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-I"]).arg(here.join("include"));
    cc.arg(here.join("tests").join(source)).arg("-o").arg(to);
    if cpp {
        cc.arg("-fsyntax-only");
    } else {
        // Link by the soname, as for an installed library.
        let dir = to.parent().unwrap();
        std::fs::copy(library(), dir.join("libstrakegds.so")).unwrap();
        std::fs::copy(library(), dir.join("libstrakegds.so.1")).unwrap();
        cc.arg("-L").arg(dir).args(["-lstrakegds", "-ldl"]);
    }
    match cc.output() {
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
        Err(e) => {
            println!("skipped: no compiler here ({e})");
            return None;
        }
    }
    Some(())
}

#[test]
fn a_program_in_c_saves_loads_and_is_told_what_is_wrong() {
    let served = Served::new(3);
    let program = served.dir.path().join("program");
    let Some(()) = compile("program.c", &program, false) else { return };
    let run = Command::new(&program)
        .args([served.mds.as_ref(), served.key.as_os_str()])
        .env("LD_LIBRARY_PATH", served.dir.path())
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    assert!(run.status.success(), "{said:?}");
    println!("{}", said[0]);

    // Another client in this process sees the files that the program wrote.
    let (three, two) = served.block_on(async {
        let c = served.client().await;
        let mut all = Vec::new();
        for name in [&b"three"[..], b"two"] {
            let ino = c.lookup(&user(), c.root(), name).await.unwrap().ino;
            let (f, attr) = c.open(&user(), ino, 0).await.unwrap();
            all.push(join(&f.read(0, attr.size as usize).await.unwrap()));
            f.close().await.unwrap();
        }
        c.close().await.unwrap();
        (all.remove(0), all.remove(0))
    });
    let byte = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 13) as u8;
    let data: Vec<u8> = (0..1_000_100).map(byte).collect();
    assert!(three[..7] == [0; 7] && three[7..] == data[..1_000_000]);
    assert!(two == [&data[..5], &data[100..]].concat());
    assert_eq!(served.cluster.mds.names(), [b"three".to_vec(), b"two".to_vec()]);
    assert_eq!(served.cluster.mds.opens(), 0, "everything was closed");
}

#[test]
fn a_program_in_c_asks_for_checksums_on_the_device() {
    let served = Served::new(3);
    let dir = served.dir.path();
    let Some(()) = compile("verify.c", &dir.join("verify"), false) else { return };
    let standin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/standin/libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(standin);
    assert!(cc.status().unwrap().success(), "the stand-in for the driver library");
    for memory in ["host", "cuda:0"] {
        let run = Command::new(dir.join("verify"))
            .args([served.mds.as_ref(), served.key.as_os_str(), memory.as_ref()])
            .env("LD_LIBRARY_PATH", dir)
            .output()
            .unwrap();
        assert!(run.status.success(), "{memory}: {}", String::from_utf8_lossy(&run.stderr));
    }
}

/// A C program around lines of the page, which load a file to `device_pointer`.
const AROUND: &str = r#"
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "strakegds.h"

static uint64_t at;

static uint64_t allocated(struct strakegds *b, uint64_t length) {
  if (strakegds_alloc(b, length, &at)) errx(1, "%s", strakegds_error());
  return at;
}
#define device_pointer allocated(b, length)

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  uint64_t length = 5;
  char got[5];
LINES
  if (strakegds_get(b, got, at, length)) errx(1, "%s", strakegds_error());
  return memcmp(got, "model", 5);
}
"#;

/// Runs the page's lines, with this cluster's names, inside a program.
#[test]
fn the_lines_of_the_page_load_a_file() {
    let served = Served::new(3);
    let dir = served.dir.path();
    let page = include_str!("../../../docs/gds.md");
    let lines = page.split_once("```c\n").unwrap().1.split_once("```").unwrap().0;
    let (from, to) = ("\"mds1,mds2,mds3\"}", "argv[1], .client_key = argv[2], .memory = \"host\"}");
    assert!(lines.contains(from) && lines.contains("\"at-least:bounce-tcp\""), "{lines}");
    // Use `pageable`: under a small limit of locked memory nothing can be pinned.
    let lines = lines.replace(from, to).replace("at-least:bounce-tcp", "at-least:pageable");
    let source = AROUND.replace("LINES", &lines);
    std::fs::write(dir.join("page.c"), source).unwrap();
    let Some(()) = compile(dir.join("page.c").to_str().unwrap(), &dir.join("page"), false) else {
        return;
    };
    served.block_on(async {
        let c = served.client().await;
        let (f, _) = c.create(&user(), c.root(), b"model.bin", 0o644, 2, true, None).await.unwrap();
        f.write(0, vec![strake_fabric::Buf::copy_from(b"model")]).await.unwrap();
        f.fsync().await.unwrap();
        f.close().await.unwrap();
        c.close().await.unwrap();
    });
    let run = Command::new(dir.join("page"))
        .args([served.mds.as_ref(), served.key.as_os_str()])
        .env("LD_LIBRARY_PATH", dir)
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    assert!(run.status.success() && said[0].contains("\"by_tier\""), "{said:?}");
}

#[test]
fn the_header_is_cpp_too() {
    let dir = tempfile::tempdir().unwrap();
    compile("header.cpp", &dir.path().join("header"), true);
}
