//! `strake key new|client`: makes the cluster key, and the clients' key file from it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, Subcommand};
use strake_proto::{Code, Error, Result};
use strake_runtime::ClientKey;

use crate::{admin, config};

#[derive(Subcommand)]
pub enum Command {
    /// Make the key of a new cluster. Servers and administrators have it; who has it may do
    /// everything.
    New(NewArgs),
    /// Make the clients' key file from the cluster key.
    Client(ClientArgs),
}

#[derive(Args)]
pub struct NewArgs {
    /// File to write, which must not exist. Only its owner may read it.
    #[arg(long, short, default_value = admin::KEY)]
    output: PathBuf,
}

#[derive(Args)]
pub struct ClientArgs {
    /// File with the cluster key.
    #[arg(long, env = admin::KEY_VARIABLE, default_value = admin::KEY)]
    cluster_key: PathBuf,
    /// File to write. Only its owner may read it. A key file of this cluster that lacks a line is
    /// completed. Without this option the key is printed.
    #[arg(long, short)]
    output: Option<PathBuf>,
}

pub fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::New(a) => {
            new(&a.output)?;
            println!("wrote {}", a.output.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::Client(a) => client(a),
    }
}

/// Writes a new, random cluster key to a file that does not exist, and returns it.
pub(crate) fn new(path: &Path) -> Result<[u8; 32]> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|e| Error::new(Code::Io, format!("random numbers: {e}")))?;
    config::write_private(path, &format!("{}\n", hex::encode(key)))?;
    Ok(key)
}

pub fn client(args: &ClientArgs) -> Result<ExitCode> {
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
