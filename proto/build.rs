//! Compiles `schema/*.proto` with protox, so that no machine needs protoc.

use std::{env, error::Error, path::PathBuf};

const FILES: [&str; 5] =
    ["common.proto", "meta.proto", "cluster.proto", "admin.proto", "log.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=schema");
    let set = protox::compile(FILES, ["schema"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let admin = env::var_os("CARGO_FEATURE_ADMIN").is_some();
    tonic_prost_build::configure()
        .build_client(admin)
        .build_server(admin)
        .out_dir(&out)
        .bytes(".")
        .compile_fds(set)?;
    Ok(())
}
