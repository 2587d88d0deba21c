//! The program; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    strake_tools::main()
}
