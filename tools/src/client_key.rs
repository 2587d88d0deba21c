//! `strake client-key`: makes the clients' key file from the cluster key.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use strake_proto::Result;
use strake_runtime::ClientKey;

use crate::{admin, config};

#[derive(Args)]
pub struct ClientKeyArgs {
    /// File with the cluster key.
    #[arg(long, env = admin::KEY_VARIABLE)]
    cluster_key: PathBuf,
    /// File to write. Only its owner may read it. A key file of this cluster that lacks a line is
    /// completed. Without this option the key is printed.
    #[arg(long, short)]
    output: Option<PathBuf>,
}

pub fn run(args: &ClientKeyArgs) -> Result<ExitCode> {
    let key = ClientKey::of(&config::read_key(&args.cluster_key)?);
    match &args.output {
        None => print!("{}", key.text()),
        Some(path) => match config::write_client_key(path, &key)? {
            true => println!("wrote {}", path.display()),
            false => println!("{} is complete; nothing was changed", path.display()),
        },
    }
    Ok(ExitCode::SUCCESS)
}
